from __future__ import annotations

import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import tomli_w
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from kits.patchkit import (
    GROUP,
    NCCL,
    NEW,
    TOPICS,
    Text,
    commit_all,
    make_kit,
    snapshot,
    write_targets,
    write_tree,
)

from m8d_build.errors import DirtyTree, PatchRejected, PortConflict, UnknownVersion, WrongTree
from m8d_build.files.blobs import blob_id
from m8d_build.series.apply import apply_series, revert_series
from m8d_build.series.diffparse import parse_diff
from m8d_build.series.port import port_series, with_entry
from m8d_build.series.read import load_series
from m8d_build.series.relocate import carry
from m8d_build.series.verify import verify
from m8d_build.targets import Status, load_targets

NEXT = "2.7.0"


@pytest.fixture
def tree(kit, tmp_path):
    """Sources of the next version, the same but for the version."""
    write_tree(tmp_path / "next", kit.states[0], NEXT)
    return tmp_path / "next"


def port(kit, tree, **options):
    return port_series(kit.patches, kit.series, NEXT, tree, **options)


def rewrite(tree, path: str, text: Text) -> None:
    (tree / path).write_bytes(text.data)


def refused(kit, tree, error, match, **options) -> str:
    before = snapshot(kit.patches), snapshot(tree)
    with pytest.raises(error, match=match) as caught:
        port(kit, tree, **options)
    assert (snapshot(kit.patches), snapshot(tree)) == before
    return caught.value.tail


def check_ported(kit, tree) -> dict[str, bytes]:
    """Apply the ported series to its tree and return what it makes of the files."""
    target, series = load_targets(kit.patches).get(NEXT), load_series(kit.patches, NEXT)
    sources = {path: (tree / path).read_bytes() for path in (NCCL, GROUP)}
    assert verify(target, series, sources) == []
    before = snapshot(tree)
    apply_series(tree, target, series)
    result = {path: (tree / path).read_bytes() for path in series.paths}
    revert_series(tree)
    assert snapshot(tree) == before
    return result


def test_the_same_sources_take_every_hunk_in_place(kit, tree):
    ported = port(kit, tree)
    assert (ported.exact, ported.moved) == (5, 0)
    assert check_ported(kit, tree) == kit.final
    for name in (f"0001-{TOPICS[0]}.patch", f"0002-{TOPICS[1]}.patch", f"0003-{TOPICS[2]}.patch"):
        assert (kit.patches / f"v{NEXT}" / name).read_bytes() == (kit.folder / name).read_bytes()


def test_lines_pushed_down_move_the_hunks(kit, tree):
    pushed = kit.states[0][GROUP].replaced(20, 20, "pushed", "down")
    rewrite(tree, GROUP, pushed)
    ported = port(kit, tree)
    assert (ported.exact, ported.moved) == (4, 1)
    result = check_ported(kit, tree)
    assert result[NCCL] == kit.final[NCCL]
    assert result[GROUP] == kit.final[GROUP].replace(b"group line 20\n", b"group line 20\npushed\ndown\n")


def test_the_entry_says_what_was_done_and_no_more(kit, tree):
    before = (kit.patches / "targets.toml").read_bytes()
    port(kit, tree)
    after = (kit.patches / "targets.toml").read_bytes()
    assert after.startswith(before)
    target = load_targets(kit.patches).get(NEXT)
    assert target.status is Status.APPLIES
    assert target.tag == "v2.7.0"
    assert target.topics == tuple(TOPICS)
    assert target.defects == ("D5",)
    assert "ported from 2.6.0: 5 hunks in place, 0 moved" in target.note
    assert "not tested" in target.note
    assert target.ported_from == "2.6.0"
    assert target.wheels == ()
    assert target.blob(NCCL) == blob_id((tree / NCCL).read_bytes())
    assert load_targets(kit.patches).get("2.6.0") == kit.target


def test_a_checkouts_commit_is_noted(kit, tree):
    commit_all(tree)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tree, capture_output=True, text=True, check=True)
    assert head.stdout.strip()[:12] in port(kit, tree).target.note


def test_uncommitted_changes_are_refused(kit, tree):
    commit_all(tree)
    rewrite(tree, GROUP, kit.states[0][GROUP].replaced(20, 20, "pushed"))
    refused(kit, tree, DirtyTree, "ProcessGroupNCCL")


def test_a_patched_tree_is_read_below_its_patches(kit, tree):
    port(kit, tree)
    apply_series(tree, load_targets(kit.patches).get(NEXT), load_series(kit.patches, NEXT))
    port_series(kit.patches, kit.series, "2.7.1", _with_version(tree, "2.7.1"))
    series = load_series(kit.patches, "2.7.1")
    assert [patch.data for patch in series.patches] == [patch.data for patch in kit.series.patches]


def _with_version(tree, version):
    (tree / "version.txt").write_text(version)
    return tree


def test_a_changed_place_is_a_conflict_with_both_sides(kit, tree):
    rewrite(tree, GROUP, kit.states[0][GROUP].changed("group line 5", "group line V"))
    shown = refused(kit, tree, PortConflict, "1 hunk of 2.6.0's series has no one place in 2.7.0")
    assert "0001-first-topic.patch" in shown
    assert "expected (2.6.0), line 4:\n    | group line 4\n    | group line 5\n    | group line 6" in shown
    assert "there (2.7.0), line 4:\n    | group line 4\n    | group line V\n    | group line 6" in shown


def test_what_became_of_each_patch_is_told_also_where_one_conflicts(kit, tree):
    rewrite(tree, GROUP, kit.states[0][GROUP].replaced(20, 20, "pushed").changed("group line 5", "V"))
    told = []
    refused(kit, tree, PortConflict, "1 hunk", tell=told.extend)
    assert [(topic.topic, topic.state) for topic in told] == [
        (TOPICS[0], "refused"),
        (TOPICS[1], "moved"),
        (TOPICS[2], "exact"),
    ]
    assert told[1].shifts == (1,)
    assert "1 of them moved by +1 lines" in told[1].says
    (conflict,) = told[0].as_json()["refused"]
    assert (conflict["file"], conflict["there_at"], conflict["there"][1]) == (GROUP, 4, "V")


def test_every_conflict_is_listed(kit, tree):
    text = kit.states[0][GROUP].changed("group line 5", "V").changed("group line 50", "L")
    rewrite(tree, GROUP, text)
    shown = refused(kit, tree, PortConflict, "2 hunks of")
    assert "first-topic" in shown
    assert "second-topic" in shown


def test_a_place_that_is_there_twice_is_a_conflict_not_a_guess(kit, tree):
    twice = kit.states[0][GROUP].replaced(30, 30, "group line 4", "group line 5", "group line 6")
    rewrite(tree, GROUP, twice)  # the first stands where it stood
    assert "ambiguous: its lines stand at lines 4, 31" in refused(kit, tree, PortConflict, "1 hunk")


def test_the_original_sources_tell_equal_places_apart(kit, tree):
    twice = kit.states[0][GROUP].replaced(0, 0, "group line 49", "group line 50", "group line 51")
    (kit.tree / GROUP).write_bytes(twice.data)
    kit = make_kit(
        kit.patches.parent / "twins",
        [{GROUP: twice}, {GROUP: twice.replaced(52, 53, "the second one")}],
        ["only"],
    )
    new = twice.replaced(10, 10, "pushed")
    write_tree(tree, {GROUP: new}, NEXT)
    assert "ambiguous" in refused(kit, tree, PortConflict, "1 hunk")
    port(kit, tree, from_tree=kit.tree)
    target, series = load_targets(kit.patches).get(NEXT), load_series(kit.patches, NEXT)
    apply_series(tree, target, series)
    assert (tree / GROUP).read_bytes() == new.replaced(53, 54, "the second one").data


def test_the_twin_of_a_vanished_place_is_not_taken_for_it(tmp_path):
    # "b" stands twice; the patch means the second, the new version has only the first.
    old = Text.of("x", "a", "b", "c", "y", "z", "a", "b", "c", "w")
    (file,), _ = parse_diff(_diff(old, old.replaced(7, 8, "B")))
    new = Text.of("x", "a", "b", "c", "y", "z", "w").data
    assert carry(file, new, old.data).conflicts
    assert "not with the lines around" in carry(file, new, old.data).conflicts[0].reason


def _diff(pre: Text, post: Text, context: int = 1) -> str:
    from kits.patchkit import file_diff

    return file_diff("f", pre, post, context).decode()


def test_an_insertion_without_context_is_never_placed_in_another_file():
    old = Text.of("a", "b", "c")
    (file,), _ = parse_diff(_diff(old, old.replaced(1, 1, "new"), 0))
    assert carry(file, old.data).exact == 1
    conflict = carry(file, b"0\n" + old.data).conflicts[0]
    assert conflict.reason == "it has no context to find its place by"


def test_a_change_at_the_end_of_the_file_stays_at_the_end():
    old = Text.of("a", "}", "b", "end")
    (file,), _ = parse_diff(_diff(old, old.replaced(4, 4, "tail")))
    moved = carry(file, b"0\na\n}\nb\nend\n")
    assert (moved.content, moved.moved) == (b"0\na\n}\nb\nend\ntail\n", 1)
    assert carry(file, b"a\nend\nb\n").conflicts


def test_hunks_that_changed_their_order_are_a_conflict():
    old = Text.of("a", "b", "c", "d", "e", "f", "g", "h")
    (file,), _ = parse_diff(_diff(old, old.changed("b", "B").changed("g", "G")))
    carried = carry(file, b"f\ng\nh\na\nb\nc\n")
    assert [conflict.reason for conflict in carried.conflicts] == [
        "its place overlaps or comes before that of the hunk before it"
    ]


def test_what_upstream_has_taken_is_shown_as_such(kit, tree):
    rewrite(tree, GROUP, kit.states[0][GROUP].changed("group line 50", "fifty"))
    assert "is there already" in refused(kit, tree, PortConflict, "1 hunk")
    ported = port(kit, tree, drop=["second-topic"])
    assert ported.target.topics == ("first-topic", "third")
    assert "0002" not in (kit.patches / f"v{NEXT}" / "series").read_text()
    assert verify(ported.target, ported.series) == []


def test_a_file_that_is_gone_or_in_the_way_is_a_conflict(kit, tree):
    (tree / NCCL).unlink()
    (tree / NEW).parent.mkdir()
    (tree / NEW).write_text("theirs")
    shown = refused(kit, tree, PortConflict, "3 hunks")
    assert f"{NCCL} is not there in 2.7.0" in shown
    assert f"{NEW} is there already in 2.7.0" in shown


def test_wrong_input_is_refused(kit, tree):
    refused(kit, _with_version(tree, "2.8.0"), WrongTree, r"2\.8\.0")
    refused(kit, _with_version(tree, NEXT), WrongTree, "2.7.0", from_tree=tree)
    refused(kit, tree, PatchRejected, "no topic nope", drop=["nope"])
    with pytest.raises(UnknownVersion, match="no version"):
        port_series(kit.patches, kit.series, "newest", tree)


def test_a_version_that_has_a_series_keeps_it(kit, tree):
    port(kit, tree)
    refused(kit, tree, PortConflict, "replaces none")
    refused(kit, kit.tree, WrongTree, "2.6.0")


def test_a_folder_without_an_entry_is_not_written_into(kit, tree):
    (kit.patches / f"v{NEXT}").mkdir()
    (kit.patches / f"v{NEXT}" / "series").write_text("mine\n")
    refused(kit, tree, PortConflict, "has a series in")


def test_a_dry_run_writes_nothing(kit, tree):
    before = snapshot(kit.patches)
    assert port(kit, tree, dry_run=True).exact == 5
    assert snapshot(kit.patches) == before


def test_a_series_with_findings_is_not_carried(kit, tree):
    (kit.folder / "stray.patch").write_text("x")
    refused(kit, tree, PatchRejected, "breaks 1 rule")


PLANNED = {"version": NEXT, "tag": "v2.7.0-rc9", "status": "planned", "defects": ["D6"], "commit": "f" * 40}


def test_a_planned_entry_gives_way_in_its_place_and_keeps_what_it_knows(kit, tree):
    path = kit.patches / "targets.toml"
    last = {"version": "2.9.0", "tag": "v2.9.0", "status": "planned"}
    planned = "[[target]]\n" + tomli_w.dumps(PLANNED)
    head = path.read_text()
    path.write_text(head + "\n" + planned + "\n# before the last\n" + "[[target]]\n" + tomli_w.dumps(last))
    for name in (f"0001-{TOPICS[0]}.patch", f"0003-{TOPICS[2]}.patch"):
        patch = kit.folder / name
        patch.write_bytes(patch.read_bytes().replace(b"Ends: D5", b"Ends: D5\n D6"))
    port(kit, tree)
    text = path.read_text()
    assert text.startswith(head)
    assert text.endswith("\n# before the last\n" + "[[target]]\n" + tomli_w.dumps(last))
    target = load_targets(kit.patches).get(NEXT)
    assert (target.tag, target.commit, target.defects) == ("v2.7.0-rc9", "f" * 40, ("D6",))
    # The version is known not to have D5: its patches do not claim to end it.
    assert [patch.header.ends for patch in target_series(kit).patches] == [("D6",), (), ("D6",)]
    assert check_ported(kit, tree) == kit.final


def target_series(kit):
    return load_series(kit.patches, NEXT)


def test_the_marker_is_made_to_say_the_new_version(tmp_path):
    def info(version, topics):
        listed = ",".join(f'\\"{topic}\\"' for topic in topics)
        return f'  "m8d-patch-info:{{\\"torch\\":\\"{version}\\",\\"topics\\":[{listed}]}}";'

    base = {NCCL: Text.of("a", "b", "c", "d", "e")}
    one = {NCCL: base[NCCL].changed("b", "B")}
    two = {NCCL: one[NCCL].replaced(5, 5, info("2.6.0", ["one", "marker"]))}
    kit = make_kit(tmp_path, [base, one, two], ["one", "marker"])
    write_tree(tmp_path / "next", base, NEXT)
    port(kit, tmp_path / "next")
    assert info(NEXT, ["one", "marker"]) in (kit.patches / f"v{NEXT}/0002-marker.patch").read_text()
    write_tree(tmp_path / "other", base, "2.8.0")
    port_series(kit.patches, kit.series, "2.8.0", tmp_path / "other", drop=["one"])
    assert info("2.8.0", ["marker"]) in (kit.patches / "v2.8.0/0002-marker.patch").read_text()


def test_a_marker_over_several_lines_loses_the_topics_that_are_left_out(tmp_path):
    lines = [r'"m8d-patch-info:{\"torch\":\"2.6.0\",\"topics\":[\"one\","', r'"\"two\",\"marker\"]}";']
    base = {NCCL: Text.of("a", "b", "c", "d", "e")}
    one = {NCCL: base[NCCL].changed("b", "B")}
    two = {NCCL: one[NCCL].changed("d", "D")}
    three = {NCCL: two[NCCL].replaced(5, 5, *lines)}
    kit = make_kit(tmp_path, [base, one, two, three], ["one", "two", "marker"])
    write_tree(tmp_path / "next", base, NEXT)
    ported = port(kit, tmp_path / "next", drop=["two"])
    text = (kit.patches / f"v{NEXT}/0003-marker.patch").read_text()
    assert r'+"m8d-patch-info:{\"torch\":\"2.7.0\",\"topics\":[\"one\","' in text
    assert r'+"\"marker\"]}";' in text
    assert ported.topics[-1].state == "adapted"


def test_an_entry_is_appended_and_nothing_else_changes():
    text = '# note\nschema = 1\n[[target]]\nversion = "2.6.0"  # why\n'
    new = with_entry(text, {"version": "2.7.0", "files": {"a/b": "0"}})
    assert new.startswith(text)
    assert new.count("[[target]]") == 2


def test_an_entry_that_cannot_be_told_from_others_is_refused():
    with pytest.raises(PatchRejected):
        with_entry('target = [{ version = "2.7.0", status = "planned" }]\n', {"version": "2.7.0"})


WORD = st.sampled_from(["a", "b", "c", "}", "", "x"])
EDIT = st.tuples(st.floats(0, 1), st.integers(0, 2), st.lists(WORD, max_size=2))


def edited(text: Text, edits) -> Text:
    for where, count, new in edits:
        at = int(where * len(text.lines))
        text = text.replaced(at, min(at + count, len(text.lines)), *new)
    return text


def changed_lines(series) -> list[tuple[str, bytes]]:
    return [
        (line.tag, line.text)
        for patch in series.patches
        for file in patch.files
        for hunk in file.hunks
        for line in hunk.lines
        if line.tag != " "
    ]


@given(
    st.lists(WORD, min_size=4, max_size=16),
    st.lists(EDIT, min_size=1, max_size=3),
    st.lists(EDIT, max_size=3),
    st.integers(0, 3),
    st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_what_is_ported_makes_the_same_changes_or_nothing_is_written(
    lines, patch, drift, context, with_origin
):
    base = Text.of(*lines)
    assume(edited(base, patch).data != base.data)
    with TemporaryDirectory() as name:
        kit = make_kit(Path(name), [{NCCL: base}, {NCCL: edited(base, patch)}], ["only"], context)
        assume(not verify(kit.target, kit.series))
        new = edited(base, drift)
        write_tree(Path(name) / "next", {NCCL: new}, NEXT)
        before = snapshot(kit.patches)
        try:
            ported = port(kit, Path(name) / "next", from_tree=kit.tree if with_origin else None)
        except PortConflict:
            assert snapshot(kit.patches) == before
            assert new.data != base.data  # the same file always carries
            return
        assert verify(ported.target, ported.series, {NCCL: new.data}) == []
        assert changed_lines(ported.series) == changed_lines(kit.series)
        if new.data == base.data:
            assert [p.data for p in ported.series.patches] == [p.data for p in kit.series.patches]
        apply_series(Path(name) / "next", ported.target, ported.series)


@given(st.lists(WORD, min_size=1, max_size=12), st.lists(EDIT, min_size=1, max_size=3), st.integers(1, 5))
# By chance most edits change nothing, or meet what the lines have elsewhere.
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.filter_too_much])
def test_with_the_original_sources_a_file_pushed_down_always_means_the_same(lines, patch, count):
    base = Text.of(*lines)
    post = edited(base, patch)
    assume(post.data != base.data)
    (file,), _ = parse_diff(_diff(base, post))
    top = b"".join(b"unique %d\n" % n for n in range(count))
    carried = carry(file, top + base.data, base.data)
    assume(not carried.conflicts)
    assert carried.content == top + post.data
    assert carried.moved == len(file.hunks)


def test_write_targets_of_the_kit_is_what_port_reads(tmp_path):
    write_targets(tmp_path, {NCCL: Text.of("a")}, ["x"])
    assert load_targets(tmp_path).get("2.6.0").topics == ("x",)
