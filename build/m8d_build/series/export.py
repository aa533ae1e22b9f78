"""``export``: a patched tree back to its series.

A patch whose files are as it left them keeps its bytes: verify, apply, export gives the same series again.
Where the tree was edited, the diffs are made anew by git with fixed options and as many lines of context as
before.

An edit goes to the last patch that touches its file, or to the patch named with ``--topic``. If later patches
touch the file too, the edit is merged below them; an edit that does not merge cleanly is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from m8d_build.errors import BlobMismatch, DirtyTree, NotApplied, PatchRejected, WrongTree
from m8d_build.files.blobs import blob_id
from m8d_build.gitrepo.tree import changed_files, diff_contents, head_contents, is_git_tree, merge_contents
from m8d_build.series.diffs import ABSENT, fit
from m8d_build.series.read import SERIES, parse_series
from m8d_build.series.receipt import RECEIPT, Receipt, Touched, dump_receipt, load_receipt
from m8d_build.series.transaction import Change, locked, missing_folders, read_file, repair, swap
from m8d_build.series.verify import reject, verify

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from m8d_build.series.read import Patch, Series
    from m8d_build.targets import Target

    Images = dict[str, bytes | None]

__all__ = ["Exported", "export_series"]

CONTEXT = 3  # for a patch with no hunk to tell it from


@dataclass(frozen=True)
class Exported:
    """What an export found.

    Attributes:
        series: the series as the tree has it now.
        changed: names of the patches whose text is new.
        edited: files of the tree that were edited since the series was applied.
        written: names of the files written (empty if the folder had them all).
    """

    series: Series
    changed: tuple[str, ...]
    edited: tuple[str, ...]
    written: tuple[str, ...]


def export_series(
    tree: Path,
    target: Target,
    folder: Path,
    *,
    topic: str = "",
    add: Sequence[str] = (),
    refresh: bool = False,
    dry_run: bool = False,
) -> Exported:
    """Write the series a tree carries, with the edits made in the tree since.

    Args:
        tree: a tree the series was applied to.
        target: the target of its version.
        folder: where the series goes (patches/vX.Y.Z); made if need be.
        topic: the patch edits go to; "" means the last one that touches the file.
        add: new files to take in, by path.
        refresh: make every patch's diffs anew, also where nothing changed.
        dry_run: write nothing.

    Raises:
        NotApplied: no series is applied to the tree.
        WrongTree: the tree is of another version than the target.
        DirtyTree: there are edits no patch takes; or the folder's patches are not those that were applied.
        BlobMismatch: there are edits, and the sources are not those the target records.
        PatchRejected: an edit does not merge below later patches, empties a patch, or breaks a rule.
    """
    with locked(tree):
        if not dry_run:
            repair(tree)
        receipt = _receipt(tree, target)
        states = _states(receipt)
        now, known = _present(tree, target, receipt, add=add, topic=topic)
        for state in states:
            for path, data in known.items():
                state.setdefault(path, data)
        edited = tuple(path for path, data in now.items() if data != states[-1][path])
        if edited and not receipt.verified:
            raise BlobMismatch(
                f"{tree} was patched with --allow-unverified and then edited",
                rule=f"a changed patch names blob ids, so its sources must be those of {target.tag}",
                next_step="Make the edit in a tree of the exact sources",
            )
        wanted = _with_edits(receipt.series, states, now, edited, topic)
        contents = dict(receipt.series.contents())
        for number, patch in enumerate(receipt.series.patches):
            step = _step(wanted, number)
            if refresh or step != _step(states, number):
                contents[patch.name] = _regenerated(patch, step)
        series = parse_series(target.version, contents)
        changed = tuple(name for name, data in contents.items() if receipt.series.contents()[name] != data)
        if changed:
            pristine = {path: data for path, data in wanted[0].items() if data is not None}
            reject(target.version, verify(target, series, pristine))
        written = _write(folder, receipt.series, contents, dry_run=dry_run)
        if changed and not dry_run:
            swap(
                tree,
                [
                    Change(
                        RECEIPT,
                        read_file(tree, RECEIPT),
                        dump_receipt(_renewed(tree, receipt, series, wanted)),
                    )
                ],
            )
    return Exported(series, changed, edited, written)


def _receipt(tree: Path, target: Target) -> Receipt:
    receipt = load_receipt(tree)
    if receipt is None:
        raise NotApplied(
            f"no series is applied to {tree}",
            rule=f"export goes by {RECEIPT}, which apply leaves",
            next_step=f"`python -m m8d_build apply --torch {target.version} --source {tree}`",
        )
    if receipt.version != target.version:
        raise WrongTree(
            f"{tree} has the series of {receipt.version}",
            rule=f"{target.version} was asked for",
            next_step=f"Use --torch {receipt.version}",
        )
    return receipt


def _states(receipt: Receipt) -> list[Images]:
    """Return every touched file's contents before the first patch, after it, after the second, and so on."""
    states: list[Images] = [{file.path: file.pre for file in receipt.files}]
    for patch in receipt.series.patches:
        state = dict(states[-1])
        for file in patch.files:
            after, misfits = fit(file, state[file.path])
            if misfits:
                raise NotApplied(
                    f"{RECEIPT} contradicts itself: {misfits[0].reason}",
                    next_step="Restore the sources, apply again",
                )
            state[file.path] = after
        states.append(state)
    return states


def _present(
    tree: Path, target: Target, receipt: Receipt, *, add: Sequence[str], topic: str
) -> tuple[Images, Images]:
    """Return what is in the tree now, and the originals of the files no patch touches yet."""
    now: Images = {file.path: read_file(tree, file.path) for file in receipt.files}
    known: Images = {}
    if is_git_tree(tree):
        for path in changed_files(tree):
            if path not in now:
                now[path], known[path] = read_file(tree, path), head_contents(tree, path)
    else:
        for file in target.files:
            data = read_file(tree, file.path) if file.path not in now else None
            if data is not None and file.blob and blob_id(data) != file.blob:
                raise DirtyTree(
                    f"{file.path} was edited, and no patch touches it",
                    rule="in a plain folder its original is not known",
                    next_step="Make this edit in a git checkout, or undo it",
                )
    for path in add:
        if path not in now:
            now[path], known[path] = read_file(tree, path), None
        if now[path] is None:
            raise NotApplied(f"there is no file {path} in {tree}", next_step="Correct --add")
    if known and not topic:
        raise DirtyTree(
            f"edited, and no patch touches them: {', '.join(known)}",
            rule="an edit goes to the last patch that touches its file",
            next_step="Name the patch that takes them with --topic, or undo them",
        )
    return now, known


def _with_edits(
    series: Series, states: Sequence[Images], now: Images, edited: Sequence[str], topic: str
) -> list[Images]:
    """Return the states as they become when every edit is made in the patch it belongs to."""
    wanted = [dict(state) for state in states]
    for path in edited:
        owners = [number for number, patch in enumerate(series.patches, 1) if path in patch.paths]
        first = _number(series, topic) if topic else owners[-1]
        last = max([first, *owners])
        for number in range(first, last):
            wanted[number][path] = _merged(series, path, number, states, now[path])
        for number in range(last, len(wanted)):
            wanted[number][path] = now[path]
    return wanted


def _number(series: Series, topic: str) -> int:
    if topic not in series.topics:
        raise PatchRejected(
            f"the series has no topic {topic!r}",
            rule=f"its topics are {', '.join(series.topics)}",
            next_step="Correct --topic",
        )
    return series.topics.index(topic) + 1


def _merged(series: Series, path: str, number: int, states: Sequence[Images], edit: bytes | None) -> bytes:
    """Carry an edit made on top of all patches down to the state after an earlier one."""
    base, below = states[-1][path], states[number][path]
    merged = merge_contents(base, below, edit) if None not in {base, below, edit} else None  # type: ignore[arg-type]
    if merged is None:
        name = series.patches[number - 1].name
        raise PatchRejected(
            f"the edit of {path} does not fit below the patches after {name}",
            rule="an edit must not touch lines that later patches change",
            next_step="Give it to a later patch with --topic, or split it",
        )
    return merged


def _step(states: Sequence[Images], number: int) -> dict[str, tuple[bytes | None, bytes | None]]:
    """Return what one patch changes: the bytes before and after by path."""
    before, after = states[number], states[number + 1]
    return {path: (data, after[path]) for path, data in before.items() if data != after[path]}


def _regenerated(patch: Patch, step: Mapping[str, tuple[bytes | None, bytes | None]]) -> bytes:
    margins = [
        max(hunk.leading, hunk.trailing) for file in patch.files for hunk in file.hunks if hunk.old_count
    ]
    diff = diff_contents(
        {path: before for path, (before, _) in step.items() if before is not None},
        {path: after for path, (_, after) in step.items() if after is not None},
        context=max(margins, default=CONTEXT),
        executable={file.path for file in patch.files if file.mode == "100755"},
    )
    if not diff:
        raise PatchRejected(
            f"nothing is left of {patch.name}",
            rule="a patch changes something",
            next_step=f"Revert, remove it from the {SERIES} file and from targets.toml, and apply again",
        )
    return patch.header_text.encode() + diff


def _write(folder: Path, applied: Series, contents: Mapping[str, bytes], *, dry_run: bool) -> tuple[str, ...]:
    """Write what differs; refuse where the folder holds other patches than those that were applied."""
    there = (
        {name: read_file(folder, name) for name in contents} if folder.is_dir() else dict.fromkeys(contents)
    )
    theirs = applied.contents()
    foreign = [
        name
        for name, data in there.items()
        if data is not None and data not in {theirs[name], contents[name]}
    ]
    if foreign:
        raise DirtyTree(
            f"changed in {folder} since they were applied: {', '.join(foreign)}",
            rule="export must not lose changes made to the patches themselves",
            next_step="Move them away or export to another folder with --folder, and join the two by hand",
        )
    changes = [Change(name, there[name], data) for name, data in contents.items() if there[name] != data]
    if changes and not dry_run:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            repair(folder)
            swap(folder, changes)
    return tuple(change.path for change in changes)


def _renewed(tree: Path, receipt: Receipt, series: Series, wanted: Sequence[Images]) -> Receipt:
    modes = {file.path: file.mode for file in receipt.files}
    touched = tuple(
        Touched(
            path,
            wanted[0][path],
            ABSENT if (after := wanted[-1][path]) is None else blob_id(after),
            modes.get(path, 0o644),
        )
        for path in series.paths
    )
    folders = dict.fromkeys([*receipt.folders, *missing_folders(tree, series.paths)])
    return Receipt(receipt.version, receipt.verified, series, touched, tuple(folders))
