from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kits.patchkit import GROUP, NCCL, NEW, TOPICS, Text, commit_all, make_kit, snapshot

from m8d_build.errors import BlobMismatch, DirtyTree, NotApplied, PatchRejected, WrongTree
from m8d_build.gitrepo.tree import check_applies, diff_contents, merge_contents
from m8d_build.series.apply import apply_series, revert_series
from m8d_build.series.export import export_series
from m8d_build.series.receipt import load_receipt
from m8d_build.series.verify import verify

FIRST, SECOND, THIRD = (f"{n:04}-{topic}.patch" for n, topic in enumerate(TOPICS, 1))


@pytest.fixture
def applied(kit):
    apply_series(kit.tree, kit.target, kit.series)
    return kit


def export(kit, folder=None, **options):
    return export_series(kit.tree, kit.target, folder or kit.folder, **options)


def edit(kit, path: str, old: str, new: str) -> None:
    data = (kit.tree / path).read_bytes()
    assert data.count(old.encode()) == 1
    (kit.tree / path).write_bytes(data.replace(old.encode(), new.encode()))


def folder_of(path) -> dict[str, bytes]:
    return {name: data for name, (data, _) in snapshot(path).items()}


def test_verify_apply_export_gives_the_same_bytes(kit):
    before = folder_of(kit.folder)
    assert verify(kit.target, kit.series) == []
    apply_series(kit.tree, kit.target, kit.series)
    shutil.rmtree(kit.folder)
    exported = export_series(kit.tree, kit.target, kit.folder)
    assert folder_of(kit.folder) == before
    assert (exported.changed, exported.edited) == ((), ())
    assert set(exported.written) == set(before)
    assert export_series(kit.tree, kit.target, kit.folder).written == ()


def test_refreshed_diffs_are_the_same_when_git_made_them(applied, tmp_path):
    export(applied, refresh=True)
    once = folder_of(applied.folder)
    export(applied, refresh=True)
    assert folder_of(applied.folder) == once
    assert verify(applied.target, applied.series, {p: t.data for p, t in applied.states[0].items()}) == []


def test_an_edit_goes_to_the_last_patch_that_touches_the_file(applied):
    before = folder_of(applied.folder)
    edit(applied, GROUP, "fifty\n", "fifty and more\n")
    exported = export(applied)
    assert exported.edited == (GROUP,)
    assert exported.changed == (SECOND,)
    after = folder_of(applied.folder)
    assert {name for name in before if before[name] != after[name]} == {SECOND}
    assert b"+fifty and more\n" in after[SECOND]
    assert after[SECOND].startswith(before[SECOND].partition(b"---\n")[0])


def test_an_edit_in_an_earlier_patch_is_merged_below_the_later_ones(applied):
    edit(applied, GROUP, "five\n", "fünf\n")
    with pytest.raises(PatchRejected) as caught:  # the last patch must not change the first one's lines
        export(applied)
    assert "[overlap]" in caught.value.tail
    exported = export(applied, topic="first-topic")
    assert exported.changed == (FIRST, SECOND)  # the second one's blob ids
    assert "+fünf\n" in applied.series.patches[0].data.decode()
    assert "fünf" not in applied.series.patches[1].data.decode()
    assert verify(applied.target, applied.series) == []


def test_after_an_export_the_tree_carries_the_new_series(applied):
    edit(applied, GROUP, "fifty\n", "fifty and more\n")
    edited = {path: data for path, (data, _) in snapshot(applied.tree).items() if not path.startswith(".m8d")}
    export(applied)
    assert load_receipt(applied.tree).series == applied.series
    revert_series(applied.tree)
    assert {path: applied.states[0][path].data for path in (NCCL, GROUP)} == {
        path: (applied.tree / path).read_bytes() for path in (NCCL, GROUP)
    }
    apply_series(applied.tree, applied.target, applied.series)
    assert {p: d for p, (d, _) in snapshot(applied.tree).items() if not p.startswith(".m8d")} == edited


def test_an_edit_that_does_not_merge_below_later_patches_is_refused(applied):
    edit(applied, GROUP, "fifty\n", "fifty and more\n")
    before = snapshot(applied.patches)
    with pytest.raises(PatchRejected, match="does not fit below"):
        export(applied, topic="first-topic")
    assert snapshot(applied.patches) == before


def test_context_stays_as_narrow_as_it_was(applied):
    edit(applied, GROUP, "fifty\n", "fifty and more\n")
    export(applied)
    hunk = applied.series.patch("second-topic").files[0].hunks[0]
    assert (hunk.leading, hunk.trailing) == (1, 1)


def test_a_dry_run_writes_nothing(applied):
    edit(applied, GROUP, "fifty\n", "fifty and more\n")
    before = snapshot(applied.patches), snapshot(applied.tree)
    assert export(applied, dry_run=True).written == (SECOND,)
    assert (snapshot(applied.patches), snapshot(applied.tree)) == before


def test_an_unpatched_tree_has_nothing_to_export(kit):
    with pytest.raises(NotApplied, match="no series"):
        export(kit)


def test_an_unknown_topic_is_refused(applied):
    edit(applied, GROUP, "fifty\n", "60\n")
    with pytest.raises(PatchRejected, match="no topic 'nope'"):
        export(applied, topic="nope")


def test_a_patch_that_would_be_empty_is_refused(applied):
    edit(applied, GROUP, "fifty\n", "group line 50\n")
    with pytest.raises(PatchRejected, match="nothing is left of 0002-second-topic"):
        export(applied)


def test_patches_edited_by_hand_meanwhile_are_not_overwritten(applied):
    patch = applied.folder / SECOND
    patch.write_bytes(patch.read_bytes().replace(b"as it is.", b"half of it."))
    edit(applied, GROUP, "fifty\n", "60\n")
    before = snapshot(applied.patches)
    with pytest.raises(DirtyTree, match=f"{SECOND}.*with --folder"):
        export(applied)
    assert snapshot(applied.patches) == before
    assert SECOND in export(applied, applied.patches / "elsewhere").written


def test_the_series_of_another_version_is_refused(applied):
    other = applied.target.__class__(**{**vars(applied.target), "version": "2.7.0"})
    with pytest.raises(WrongTree, match=r"2\.6\.0"):
        export_series(applied.tree, other, applied.folder)


def test_edits_of_unverified_sources_are_not_exported(kit):
    (kit.tree / GROUP).write_bytes(kit.states[0][GROUP].changed("group line 30", "near").data)
    apply_series(kit.tree, kit.target, kit.series, allow_unverified=True)
    assert export(kit).changed == ()
    edit(kit, GROUP, "fifty\n", "60\n")
    with pytest.raises(BlobMismatch, match="--allow-unverified"):
        export(kit)


OTHER = "torch/csrc/distributed/c10d/NCCLUtils.cpp"


def test_edits_of_untouched_files_need_a_topic_in_a_checkout(kit):
    (kit.tree / OTHER).write_text("one\ntwo\nthree\n")
    commit_all(kit.tree)
    apply_series(kit.tree, kit.target, kit.series)
    edit(kit, OTHER, "two\n", "zwei\n")
    with pytest.raises(DirtyTree, match="NCCLUtils"):
        export(kit)
    assert export(kit, topic="second-topic").changed == (SECOND,)
    assert kit.series.patch("second-topic").paths == (OTHER, GROUP)
    revert_series(kit.tree)
    assert (kit.tree / OTHER).read_text() == "one\ntwo\nthree\n"


def test_edits_of_recorded_files_no_patch_touches_are_not_lost_in_a_plain_folder(tmp_path):
    base = {NCCL: Text.of("a", "b", "c"), OTHER: Text.of("1", "2")}
    kit = make_kit(tmp_path, [base, {**base, NCCL: base[NCCL].changed("b", "B")}], ["one"])
    apply_series(kit.tree, kit.target, kit.series)
    edit(kit, OTHER, "2\n", "3\n")
    with pytest.raises(DirtyTree, match="NCCLUtils"):
        export(kit)


def test_a_new_file_is_taken_in_by_name(applied):
    (applied.tree / "torch/new.h").write_text("// mine\n")
    assert export(applied, add=["torch/new.h"], topic="third").changed == (THIRD,)
    assert "torch/new.h" in applied.series.patch("third").paths
    revert_series(applied.tree)
    assert not (applied.tree / "torch/new.h").exists()
    with pytest.raises(NotApplied):
        export(applied)


def test_a_file_that_is_not_there_cannot_be_added(applied):
    with pytest.raises(NotApplied, match=r"no\.h"):
        export(applied, add=["no.h"], topic="third")


def test_a_file_a_patch_makes_may_go_again(applied):
    (applied.tree / NEW).unlink()
    export(applied)
    assert applied.series.patch("third").paths == (NCCL,)


def test_the_diff_is_the_same_whatever_the_user_configured(monkeypatch, tmp_path):
    config = (
        "[diff]\nnoprefix = true\nalgorithm = patience\nsuppressBlankEmpty = true\n[core]\nautocrlf = true\n"
    )
    (tmp_path / ".gitconfig").write_text(config)
    monkeypatch.setenv("HOME", str(tmp_path))
    diff = diff_contents({"a/b.cpp": b"\n2\n"}, {"a/b.cpp": b"\n3\n", "c": b"x"}, 1, {"c"})
    assert b"--- a/a/b.cpp\n+++ b/a/b.cpp\n@@ -1,2 +1,2 @@\n \n-2\n+3\n" in diff
    assert b"new file mode 100755" in diff


def test_a_repository_that_the_environment_names_is_left_alone(monkeypatch, tmp_path):
    """As in a hook of git's, and with dot files in a repository: its index would be emptied."""
    theirs = tmp_path / "theirs"
    run = lambda *more: subprocess.run(["git", "-C", theirs, *more], check=True, capture_output=True).stdout  # noqa: E731
    theirs.mkdir()
    run("init", "--quiet")
    (theirs / "kept").write_text("1\n")
    run("add", "kept")
    monkeypatch.setenv("GIT_DIR", str(theirs / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(theirs / ".git" / "index"))
    assert b"+3" in diff_contents({"a": b"2\n"}, {"a": b"3\n"}, 1, {"a"})
    monkeypatch.delenv("GIT_DIR")
    monkeypatch.delenv("GIT_INDEX_FILE")
    assert run("ls-files") == b"kept\n"


def test_git_says_in_its_own_words_what_does_not_apply(git_kit):
    good = git_kit.series.patches[0]
    diff = good.data[len(good.header_text) :]
    assert check_applies(git_kit.tree, diff) == ""
    assert "patch does not apply" in check_applies(
        git_kit.tree, diff.replace(b"-nccl line 10", b"-nccl line X")
    )


def test_merge_is_three_way_and_refuses_conflicts():
    base = b"1\n2\n3\n4\n5\n6\n7\n"
    ours, theirs = base.replace(b"1", b"one"), base.replace(b"7", b"seven")
    assert merge_contents(base, ours, theirs) == b"one\n2\n3\n4\n5\n6\nseven\n"
    assert merge_contents(base, base.replace(b"4", b"a"), base.replace(b"4", b"b")) is None


WORD = st.sampled_from(["a", "b", "}", "", "é"])
EDITS = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 2), st.lists(WORD, max_size=2)), min_size=1, max_size=3
)


def edited_text(text: Text, edits) -> Text:
    for where, count, new in edits:
        at = int(where * len(text.lines))
        text = text.replaced(at, min(at + count, len(text.lines)), *new)
    return text


@given(
    st.lists(WORD, min_size=1, max_size=12), st.lists(EDITS, min_size=1, max_size=3), EDITS, st.integers(0, 3)
)
@settings(deadline=None, max_examples=25)
def test_export_then_apply_is_the_identity(lines, patches, later, context):
    states = [{NCCL: Text.of(*lines)}]
    for edits in patches:
        states.append({NCCL: edited_text(states[-1][NCCL], edits)})
    assume(all(before[NCCL].data != after[NCCL].data for before, after in itertools.pairwise(states)))
    assume(states[0][NCCL].data != states[-1][NCCL].data)
    with TemporaryDirectory() as name:
        kit = make_kit(Path(name), states, [f"t{n}" for n in range(1, len(states))], context)
        assume(not verify(kit.target, kit.series))
        apply_series(kit.tree, kit.target, kit.series)
        before = folder_of(kit.folder)
        shutil.rmtree(kit.folder)
        export(kit)
        assert folder_of(kit.folder) == before  # apply, then export: the series again

        (kit.tree / NCCL).write_bytes(edited_text(states[-1][NCCL], later).data)
        tree = (kit.tree / NCCL).read_bytes()
        try:
            export(kit)
        except PatchRejected:  # the edit overlaps an earlier patch, or undoes one: nothing may have changed
            assert folder_of(kit.folder) == before
            return
        assert verify(kit.target, kit.series, {NCCL: states[0][NCCL].data}) == []
        revert_series(kit.tree)
        if tree == states[0][NCCL].data:  # the patches cancel out: to apply, that looks like done
            return
        apply_series(kit.tree, kit.target, kit.series)
        assert (kit.tree / NCCL).read_bytes() == tree  # export, then apply: the tree again
