from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kits.patchkit import GROUP, NCCL, NEW, TOPICS, VERSION, Text, commit_all, make_kit, snapshot, write_tree

from m8d_build.errors import (
    AlreadyApplied,
    BlobMismatch,
    BuildBusy,
    BuildError,
    DirtyTree,
    DiskFull,
    NotApplied,
    OutputUnwritable,
    PatchRejected,
    WrongTree,
)
from m8d_build.files.blobs import blob_id
from m8d_build.series import transaction as swap_module
from m8d_build.series.apply import apply_series, patched_files, pristine_files, revert_series, tree_version
from m8d_build.series.diffs import ABSENT
from m8d_build.series.receipt import RECEIPT, load_receipt, pack
from m8d_build.series.transaction import HOME, Change, repair, swap
from m8d_build.series.verify import verify


@pytest.fixture(params=["folder", "git"])
def both(request, kit):
    """The small series on a plain folder and on a git checkout."""
    if request.param == "git":
        commit_all(kit.tree)
    return kit


def files_of(kit) -> dict[str, bytes]:
    return {path: data for path, (data, _) in snapshot(kit.tree).items() if not path.startswith(HOME)}


def apply(kit, **options):
    return apply_series(kit.tree, kit.target, kit.series, **options)


def test_apply_makes_exactly_the_last_state_and_a_receipt(both):
    receipt = apply(both)
    assert {path: data for path, data in files_of(both).items() if path != "version.txt"} == both.final
    assert receipt.topics == tuple(TOPICS)
    assert receipt.verified
    stored = json.loads((both.tree / RECEIPT).read_text())
    assert (stored["schema"], stored["torch"], stored["topics"]) == (1, VERSION, TOPICS)
    assert [patch["sha256"] for patch in stored["patches"]] == [patch.sha256 for patch in both.series.patches]
    for file in stored["files"]:
        assert file["post_blob"] == blob_id(both.final[file["path"]])
    assert load_receipt(both.tree) == receipt


def test_revert_needs_nothing_but_the_tree_and_leaves_nothing_behind(both):
    before = snapshot(both.tree)
    apply(both)
    shutil.rmtree(both.patches)
    assert revert_series(both.tree).topics == tuple(TOPICS)
    assert snapshot(both.tree) == before
    assert not (both.tree / HOME).exists()
    assert not (both.tree / NEW).parent.exists()


def test_git_sees_the_patches_but_not_our_notes(git_kit):
    apply(git_kit)
    status = subprocess.run(
        ["git", "status", "--short"], cwd=git_kit.tree, capture_output=True, text=True, check=True
    )
    assert sorted(line[3:] for line in status.stdout.splitlines()) == sorted(
        [NCCL, GROUP, str(Path(NEW).parent) + "/"]
    )


def test_file_modes_are_kept(kit):
    (kit.tree / NCCL).chmod(0o755)
    before = snapshot(kit.tree)
    apply(kit)
    assert (kit.tree / NCCL).stat().st_mode & 0o777 == 0o755
    revert_series(kit.tree)
    assert snapshot(kit.tree) == before


def test_hard_links_of_the_sources_are_not_written_through(kit, tmp_path):
    (tmp_path / "other").hardlink_to(kit.tree / NCCL)
    before = (tmp_path / "other").read_bytes()
    apply(kit)
    assert (tmp_path / "other").read_bytes() == before


def test_a_dry_run_checks_everything_and_changes_nothing(both):
    before = snapshot(both.tree)
    receipt = apply(both, dry_run=True)
    assert receipt.topics == tuple(TOPICS)
    assert snapshot(both.tree) == before
    apply(both)
    patched = snapshot(both.tree)
    revert_series(both.tree, dry_run=True)
    assert snapshot(both.tree) == patched
    with pytest.raises(AlreadyApplied):
        apply(both, dry_run=True)


def refused(kit, error, match, **options) -> None:
    before = snapshot(kit.tree)
    with pytest.raises(error, match=match):
        apply(kit, **options)
    assert snapshot(kit.tree) == before


def test_a_second_time_is_refused(both):
    apply(both)
    refused(both, AlreadyApplied, "applied once")


def test_patches_applied_by_other_means_are_noticed(kit):
    for path, data in kit.final.items():
        (kit.tree / path).parent.mkdir(exist_ok=True)
        (kit.tree / path).write_bytes(data)
    refused(kit, AlreadyApplied, "other means")


def test_a_receipt_whose_files_were_all_restored_does_not_stand_in_the_way(git_kit):
    apply(git_kit)
    subprocess.run(["git", "checkout", "--quiet", "."], cwd=git_kit.tree, check=True)
    (git_kit.tree / NEW).unlink()
    apply(git_kit)
    revert_series(git_kit.tree)
    assert files_of(git_kit).keys() == {NCCL, GROUP, "version.txt"}


@pytest.mark.parametrize("text", ["2.5.0a0", "2.6.1", "nonsense", None])
def test_a_tree_of_another_version_or_none_is_refused(kit, text):
    path = kit.tree / "version.txt"
    path.unlink() if text is None else path.write_text(text)
    refused(kit, WrongTree, "2\\.6\\.0|version\\.txt")


def test_a_folder_that_is_not_there_is_refused(kit):
    kit.tree = kit.tree / "nowhere"
    with pytest.raises(WrongTree, match="is no folder"):
        apply(kit)


@pytest.mark.parametrize("text", ["2.6.0", "2.6.0a0", "2.6.0a0+git2236df1\n"])
def test_the_version_of_a_tree(tmp_path, text):
    (tmp_path / "version.txt").write_text(text)
    assert tree_version(tmp_path) == "2.6.0"


def change_unpatched_line(kit) -> None:
    text = kit.states[0][GROUP].changed("group line 30", "edited")
    (kit.tree / GROUP).write_bytes(text.data)


def test_a_source_that_differs_is_a_blob_mismatch_in_a_plain_folder(kit):
    change_unpatched_line(kit)
    refused(kit, BlobMismatch, GROUP)


def test_a_source_that_differs_is_taken_only_with_allow_unverified_and_revert_restores_it(kit):
    change_unpatched_line(kit)
    before = snapshot(kit.tree)
    assert not apply(kit, allow_unverified=True).verified
    assert b"edited" in (kit.tree / GROUP).read_bytes()
    assert b"fifty" in (kit.tree / GROUP).read_bytes()
    revert_series(kit.tree)
    assert snapshot(kit.tree) == before


def test_allow_unverified_does_not_mean_fuzz(kit):
    (kit.tree / GROUP).write_bytes(b"pushed down\n" + kit.states[0][GROUP].data)
    refused(kit, PatchRejected, "breaks 2 rules", allow_unverified=True)


def test_uncommitted_changes_of_touched_files_are_refused_however_they_are_staged(git_kit):
    change_unpatched_line(git_kit)
    refused(git_kit, DirtyTree, GROUP, allow_unverified=True)
    subprocess.run(["git", "add", "--all"], cwd=git_kit.tree, check=True)
    refused(git_kit, DirtyTree, GROUP, allow_unverified=True)
    (git_kit.tree / GROUP).write_bytes(git_kit.states[0][GROUP].data)  # staged, but restored in the tree
    refused(git_kit, DirtyTree, GROUP)


def test_changes_elsewhere_in_a_checkout_are_nobodys_business(git_kit):
    (git_kit.tree / "notes.txt").write_text("mine")
    apply(git_kit)
    revert_series(git_kit.tree)
    assert (git_kit.tree / "notes.txt").read_text() == "mine"


def test_a_committed_change_of_a_touched_file_is_a_blob_mismatch(git_kit):
    change_unpatched_line(git_kit)
    commit_all(git_kit.tree, "ours")
    refused(git_kit, BlobMismatch, GROUP)


def test_a_file_in_the_way_of_a_new_one_is_refused(both):
    (both.tree / NEW).parent.mkdir()
    (both.tree / NEW).write_text("mine")
    refused(both, DirtyTree, "Marker.cpp", allow_unverified=True)


def test_a_symbolic_link_in_the_tree_is_not_followed(kit, tmp_path):
    outside = tmp_path / "outside.cpp"
    (kit.tree / NCCL).rename(outside)
    (kit.tree / NCCL).symlink_to(outside)
    before = outside.read_bytes()
    with pytest.raises(DirtyTree, match="symbolic link"):
        apply(kit)
    assert outside.read_bytes() == before


def test_a_series_with_findings_is_refused(both):
    patch = both.folder / f"0001-{TOPICS[0]}.patch"
    patch.write_bytes(patch.read_bytes().replace(b"\n", b"\r\n"))
    refused(both, PatchRejected, "breaks")


def test_git_must_agree(git_kit, monkeypatch):
    monkeypatch.setattr("m8d_build.series.apply.check_applies", lambda tree, diffs: "error: no")
    refused(git_kit, PatchRejected, "git apply --check")


def test_a_users_git_configuration_makes_no_difference(git_kit):
    for name, value in (
        ("core.autocrlf", "true"),
        ("diff.noprefix", "true"),
        ("apply.whitespace", "error-all"),
        ("diff.mnemonicPrefix", "true"),
        ("color.ui", "always"),
    ):
        subprocess.run(["git", "config", name, value], cwd=git_kit.tree, check=True)
    apply(git_kit)
    assert files_of(git_kit)[GROUP] == git_kit.final[GROUP]


def test_a_plain_folder_inside_a_checkout_is_a_plain_folder(kit, tmp_path):
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    before = snapshot(kit.tree)
    apply(kit)
    revert_series(kit.tree)
    assert snapshot(kit.tree) == before


def test_revert_without_a_receipt(kit):
    with pytest.raises(NotApplied, match="no series is applied"):
        revert_series(kit.tree)


def test_revert_of_a_file_changed_since_is_refused_and_changes_nothing(both):
    apply(both)
    (both.tree / GROUP).write_bytes(both.final[GROUP] + b"more\n")
    before = snapshot(both.tree)
    with pytest.raises(NotApplied, match="ProcessGroupNCCL"):
        revert_series(both.tree)
    assert snapshot(both.tree) == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-20],
        lambda data: data.replace(b'"schema": 1', b'"schema": 7'),
        lambda data: data.replace(b"nccl ten", b"nccl 10!"),
        lambda data: data.replace(b'"pre_blob": "', b'"pre_blob": "0'),
        lambda data: b"[]",
    ],
)
def test_a_damaged_receipt_is_not_trusted(kit, damage):
    apply(kit)
    (kit.tree / RECEIPT).write_bytes(damage((kit.tree / RECEIPT).read_bytes()))
    before = snapshot(kit.tree)
    with pytest.raises(NotApplied, match="damaged"):
        revert_series(kit.tree)
    assert snapshot(kit.tree) == before


def test_patched_files_only_reads(both):
    before = snapshot(both.tree)
    assert patched_files(both.tree, both.target, both.series) == both.final
    assert snapshot(both.tree) == before
    apply(both)
    assert patched_files(both.tree, both.target, both.series) == both.final


def test_patched_files_holds_to_the_same_rules(kit):
    apply(kit)
    patch = kit.folder / f"0001-{TOPICS[0]}.patch"
    patch.write_bytes(patch.read_bytes().replace(b"two lines", b"2 lines"))
    with pytest.raises(AlreadyApplied):  # another series than ours is in the tree
        patched_files(kit.tree, kit.target, kit.series)
    revert_series(kit.tree)
    change_unpatched_line(kit)
    with pytest.raises(BlobMismatch):
        patched_files(kit.tree, kit.target, kit.series)
    assert patched_files(kit.tree, kit.target, kit.series, allow_unverified=True)[NCCL] == kit.final[NCCL]
    apply(kit, allow_unverified=True)
    with pytest.raises(BlobMismatch):
        patched_files(kit.tree, kit.target, kit.series)


def test_pristine_files_are_those_below_the_patches(kit):
    before = {path: text.data for path, text in kit.states[0].items()}
    assert pristine_files(kit.tree, [NCCL, GROUP, NEW]) == before
    apply(kit)
    assert pristine_files(kit.tree, [NCCL, GROUP, NEW]) == before
    (kit.tree / GROUP).write_text("edited")
    with pytest.raises(NotApplied):
        pristine_files(kit.tree, [GROUP])


def test_two_runs_in_one_tree(kit):
    fd = os.open(kit.tree, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        for act in (lambda: apply(kit), lambda: revert_series(kit.tree)):
            with pytest.raises(BuildBusy, match="another run"):
                act()
    finally:
        os.close(fd)
    apply(kit)


def test_runs_that_only_read_a_tree_do_so_together(kit):
    fd = os.open(kit.tree, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        assert patched_files(kit.tree, kit.target, kit.series)
        with pytest.raises(BuildBusy, match="another run"):
            apply(kit)
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(BuildBusy, match="another run"):
            patched_files(kit.tree, kit.target, kit.series)
    finally:
        os.close(fd)


class Crash(BaseException):
    """Stands for the machine going down: nothing after it runs."""


@contextmanager
def faulty(monkeypatch, number: int, fault: BaseException):
    """Make the n-th change of the file system under the swap fail; yields a list that has one entry if it did."""
    done: list[str] = []
    count = 0

    def wrap(owner, name):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            nonlocal count
            if not done:
                count += 1
                if count == number:
                    done.append(name)
                    raise fault
            return real(*args, **kwargs)

        patch.setattr(owner, name, call)

    with monkeypatch.context() as patch:
        for owner, name in (
            (Path, "replace"),
            (Path, "unlink"),
            (Path, "mkdir"),
            (Path, "rmdir"),
            (os, "fsync"),
        ):
            wrap(owner, name)
        if isinstance(fault, Crash):
            patch.setattr(swap_module, "repair", lambda tree: False)
        yield done


def no_room():
    return OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (no_room, DiskFull),
        (lambda: OSError(errno.EROFS, "Read-only file system"), OutputUnwritable),
        (lambda: PermissionError(errno.EACCES, "Permission denied"), OutputUnwritable),
        (KeyboardInterrupt, KeyboardInterrupt),
    ],
)
@pytest.mark.parametrize("command", ["apply", "revert"])
def test_stopped_at_any_step_everything_is_as_before(kit, monkeypatch, command, fault, error):
    if command == "revert":
        apply(kit)
    before = snapshot(kit.tree)
    failed = 0
    for number in range(1, 100):
        with faulty(monkeypatch, number, fault()) as done:
            try:
                apply(kit) if command == "apply" else revert_series(kit.tree)
            except error:
                failed += 1
        if not done:
            break
        now = snapshot(kit.tree)
        if now != before:  # only the tidying up after the last move may fail without undoing all
            assert number > 10
            apply(kit) if command == "revert" else revert_series(kit.tree)
        assert snapshot(kit.tree) == before
        assert not swap_module.interrupted(kit.tree)
    assert failed > 10


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_after_a_crash_at_any_step_the_next_run_puts_things_right(kit, monkeypatch, command):
    unpatched = snapshot(kit.tree)
    if command == "revert":
        apply(kit)
    crashed = 0
    for number in range(1, 100):
        with faulty(monkeypatch, number, Crash()) as done:
            try:
                apply(kit) if command == "apply" else revert_series(kit.tree)
            except Crash:
                crashed += 1
        if swap_module.interrupted(kit.tree):
            with pytest.raises(DirtyTree, match="half-way"):
                patched_files(kit.tree, kit.target, kit.series)
            with pytest.raises(DirtyTree, match="half-way"):
                apply(kit, dry_run=True)
        repair(kit.tree)
        if load_receipt(kit.tree) is not None:
            revert_series(kit.tree)
        assert snapshot(kit.tree) == unpatched
        if not done:
            break
        if command == "revert":
            apply(kit)
    assert crashed > 10


def test_repair_does_not_touch_what_somebody_changed_after_the_crash(kit, monkeypatch):
    with faulty(monkeypatch, 9, Crash()), pytest.raises(Crash):
        apply(kit)
    assert swap_module.interrupted(kit.tree)
    (kit.tree / GROUP).write_text("mine")
    with pytest.raises(DirtyTree, match="changed after a run was stopped"):
        apply(kit)
    assert (kit.tree / GROUP).read_text() == "mine"


def test_a_damaged_journal_is_refused(kit):
    (kit.tree / HOME).mkdir()
    (kit.tree / HOME / "journal.json").write_text("{")
    with pytest.raises(DirtyTree, match="damaged"):
        repair(kit.tree)


def journal_of(path: str, *folders: str) -> str:
    changes = [{"path": path, "before": pack(b"theirs"), "after": None, "mode": 0o644}]
    return json.dumps({"changes": changes, "folders": folders})


def outside(kit) -> list[Path]:
    return [path for path in kit.tree.parent.rglob("*") if kit.tree not in (path, *path.parents)]


OUTSIDE = [
    "../victim/evil.pth",
    "{root}/victim/evil.pth",
    "a/../../victim/evil.pth",
    "link/evil.pth",
    ".git/config",
]


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_journal_that_leads_out_of_the_tree_is_damaged(kit, path):
    (kit.tree.parent / "victim").mkdir()
    (kit.tree / "link").symlink_to(kit.tree.parent / "victim")
    (kit.tree / HOME).mkdir()
    (kit.tree / HOME / "journal.json").write_text(journal_of(path.format(root=kit.tree.parent)))
    before = outside(kit)
    with pytest.raises(DirtyTree, match="damaged"):
        apply(kit)
    assert outside(kit) == before
    assert not (kit.tree / ".git").exists()


def test_a_journal_removes_no_folder_outside_the_tree(kit):
    (kit.tree.parent / "victim").mkdir()
    (kit.tree / HOME).mkdir()
    (kit.tree / HOME / "journal.json").write_text(journal_of("a", "../victim"))
    with pytest.raises(DirtyTree, match="damaged"):
        repair(kit.tree)
    assert (kit.tree.parent / "victim").is_dir()
    assert not (kit.tree / "a").exists()


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_receipt_that_leads_out_of_the_tree_is_damaged(kit, path):
    (kit.tree.parent / "victim").mkdir()
    (kit.tree / "link").symlink_to(kit.tree.parent / "victim")
    apply(kit)
    data = json.loads((kit.tree / RECEIPT).read_text())
    file = {"path": path.format(root=kit.tree.parent), "mode": 0o644, "pre": pack(b"theirs")}
    data["files"].append({**file, "pre_blob": blob_id(b"theirs"), "post_blob": ABSENT})
    (kit.tree / RECEIPT).write_text(json.dumps(data))
    before = outside(kit)
    with pytest.raises(NotApplied, match="damaged"):
        revert_series(kit.tree)
    assert outside(kit) == before
    assert not (kit.tree / ".git").exists()


def test_notes_go_through_no_link_that_the_tree_came_with(kit):
    victim = kit.tree.parent / "victim"
    victim.mkdir()
    (victim / "file").write_text("mine")
    (kit.tree / HOME).symlink_to(victim)
    with pytest.raises(DirtyTree, match="symbolic link"):
        apply(kit)
    (kit.tree / HOME).unlink()
    beside = kit.tree / Path(NCCL).parent / f".{Path(NCCL).name}.m8d-new"
    beside.symlink_to(victim / "file")
    apply(kit)
    assert [path.read_text() for path in victim.iterdir()] == ["mine"]


def test_swap_leaves_folders_that_others_use(tmp_path):
    swap(tmp_path, [Change("a/b/x", None, b"1"), Change("a/y", None, b"2")])
    (tmp_path / "a/b/mine").write_text("mine")
    swap(tmp_path, [Change("a/b/x", b"1", None), Change("a/y", b"2", None)], drop_folders=["a", "a/b"])
    assert list(snapshot(tmp_path)) == ["a/b/mine"]


LINE = st.sampled_from(["a", "b", "}", "", "  x = 1;", "äöü", "\x0c", "\u2028"])
EDIT = st.tuples(
    st.sampled_from(["f.cpp", "d/g.cpp", "new/h.cpp"]),
    st.floats(0, 1),
    st.integers(0, 3),
    st.lists(LINE, max_size=3),
)


def grown(base, patches):
    """Apply edits to a state, and return all states."""
    states = [base]
    for edits in patches:
        state = dict(states[-1])
        for path, where, count, new in edits:
            text = state.get(path) or Text(())
            at = int(where * len(text.lines))
            state[path] = text.replaced(at, min(at + count, len(text.lines)), *new)
        states.append(state)
    return states


@st.composite
def random_states(draw):
    base = {path: Text.of(*draw(st.lists(LINE, max_size=15))) for path in ("f.cpp", "d/g.cpp")}
    return grown(base, draw(st.lists(st.lists(EDIT, min_size=1, max_size=3), min_size=1, max_size=3)))


@given(random_states(), st.integers(0, 3), st.booleans())
@settings(deadline=None, max_examples=60)
def test_apply_then_revert_is_the_identity(states, context, in_git):
    assume(all(before != after for before, after in itertools.pairwise(states)))
    with TemporaryDirectory() as name:
        kit = make_kit(Path(name), states, [f"t{n}" for n in range(1, len(states))], context)
        assume(not verify(kit.target, kit.series))  # the edits overlap
        in_git = in_git and context > 0  # git apply itself refuses some diffs without context
        if in_git:
            commit_all(kit.tree)
        before = snapshot(kit.tree)
        try:
            apply(kit)
        except AlreadyApplied:
            assume(False)  # the patches cancel out
        assert {path: data for path, data in files_of(kit).items() if path != "version.txt"} == kit.final
        revert_series(kit.tree)
        assert snapshot(kit.tree) == before


def test_every_refusal_is_one_of_our_errors_and_says_what_to_do(kit):
    change_unpatched_line(kit)
    with pytest.raises(BuildError) as caught:
        apply(kit)
    assert caught.value.value
    assert caught.value.rule
    assert caught.value.next_step


def test_other_versions_of_the_tree_are_named(kit, tmp_path):
    other = tmp_path / "other"
    write_tree(other, kit.states[0], "2.5.1")
    with pytest.raises(WrongTree, match=r"2\.5\.1.*2\.6\.0"):
        apply_series(other, kit.target, kit.series)
