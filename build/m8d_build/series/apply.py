"""``apply`` and ``revert``: a series into a source tree and out of it, atomically, with a receipt.

Works in a git checkout and in a plain folder. Everything is computed and checked in memory first; only then
are files changed, by ``transaction``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from m8d_build.errors import AlreadyApplied, BlobMismatch, DirtyTree, NotApplied, PatchRejected, WrongTree
from m8d_build.files.blobs import blob_id
from m8d_build.gitrepo.tree import check_applies, is_git_tree, uncommitted
from m8d_build.series.diffs import ABSENT, fit
from m8d_build.series.findings import Finding
from m8d_build.series.receipt import RECEIPT, Receipt, Touched, dump_receipt, load_receipt
from m8d_build.series.transaction import Change, interrupted, locked, missing_folders, read_file, repair, swap
from m8d_build.series.verify import reject, verify

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from m8d_build.series.read import Series
    from m8d_build.targets import Target

__all__ = ["apply_series", "patched_files", "pristine_files", "revert_series", "tree_version"]


@dataclass(frozen=True)
class _Plan:
    receipt: Receipt
    changes: tuple[Change, ...]


def tree_version(tree: Path) -> str:
    """Return the PyTorch version a source tree says it is ("2.6.0"; its version.txt may say 2.6.0a0).

    Raises:
        WrongTree: it is no PyTorch source tree.
    """
    path = tree / "version.txt"
    try:
        return Version(path.read_text(encoding="utf-8").strip()).base_version
    except (OSError, UnicodeDecodeError, InvalidVersion) as exc:
        raise WrongTree(
            f"{tree} is no PyTorch source tree",
            rule="its version.txt must be there and name a version",
            next_step="Name the root of PyTorch's sources with --source",
        ) from exc


def apply_series(
    tree: Path, target: Target, series: Series, *, dry_run: bool = False, allow_unverified: bool = False
) -> Receipt:
    """Apply a series to a source tree.

    Args:
        tree: root of PyTorch's sources, a git checkout or a plain folder.
        target: the version's target.
        series: its patches.
        dry_run: check everything, change nothing.
        allow_unverified: take files whose blob ids differ from the recorded ones, if the patches still apply
            with no fuzz and no offset.

    Returns:
        The receipt, which also lies in the tree (not with ``dry_run``).

    Raises:
        WrongTree: the tree is of another version, or no PyTorch tree.
        AlreadyApplied: the series is in it.
        DirtyTree: touched files have changes that are not committed, or a file a patch makes is there.
        BlobMismatch: touched files are not those the target records.
        PatchRejected: the series breaks a rule, or does not apply exactly.
        BuildBusy: another run works in the tree.
        DiskFull: there is no room; the tree is as before.
        OutputUnwritable: the tree cannot be written; it is as before.
    """
    with locked(tree):
        if dry_run:
            _refuse_interrupted(tree)
        else:
            repair(tree)
        plan = _plan(tree, target, series, allow_unverified=allow_unverified)
        if not dry_run:
            stale = read_file(tree, RECEIPT)
            swap(tree, [*plan.changes, Change(RECEIPT, stale, dump_receipt(plan.receipt))])
    return plan.receipt


def revert_series(tree: Path, *, dry_run: bool = False) -> Receipt:
    """Take the applied series out of a tree again; the tree is byte for byte as it was before.

    Returns:
        The receipt of what was reverted.

    Raises:
        NotApplied: the tree has no receipt, or a touched file was changed after it.
        DirtyTree: a run stopped half-way and a file was changed since.
        BuildBusy: another run works in the tree.
        DiskFull: there is no room; the tree is as before.
        OutputUnwritable: the tree cannot be written; it is as before.
    """
    with locked(tree):
        if dry_run:
            _refuse_interrupted(tree)
        else:
            repair(tree)
        receipt = load_receipt(tree)
        if receipt is None:
            raise NotApplied(
                f"no series is applied to {tree}",
                rule=f"revert goes by {RECEIPT}, which apply leaves",
                next_step="Nothing needs to be done",
            )
        now = {file.path: read_file(tree, file.path) for file in receipt.files}
        changed = [
            file.path
            for file in receipt.files
            if _blob(now[file.path]) not in {file.post_blob, file.pre_blob}
        ]
        if changed:
            raise NotApplied(
                f"changed since the series was applied: {', '.join(changed)}",
                rule="revert takes out what apply put in, nothing else",
                next_step="Keep the changes with `python -m m8d_build export`, or undo them, then revert",
            )
        if not dry_run:
            changes = [Change(file.path, now[file.path], file.pre, file.mode) for file in receipt.files]
            swap(
                tree,
                [*changes, Change(RECEIPT, read_file(tree, RECEIPT), None)],
                drop_folders=receipt.folders,
            )
    return receipt


def patched_files(
    tree: Path, target: Target, series: Series, *, allow_unverified: bool = False
) -> dict[str, bytes]:
    """Return the touched files as they are with the series applied; the tree is only read.

    A tree this same series is applied to gives its files as they are.

    Returns:
        Contents by path. Files the series deletes are not in it.

    Raises:
        As ``apply_series``; AlreadyApplied only where another series, or a changed one, is in the tree.
    """
    with locked(tree, reading=True):
        _refuse_interrupted(tree)
        _check_version(tree, target)
        receipt = load_receipt(tree)
        if receipt is not None and receipt.series.contents() == series.contents():
            now = {file.path: read_file(tree, file.path) for file in receipt.files}
            if all(_blob(now[file.path]) == file.post_blob for file in receipt.files):
                if not receipt.verified and not allow_unverified:
                    raise BlobMismatch(
                        f"the series was applied to {tree} with --allow-unverified",
                        rule=f"the sources are not those recorded for {target.version}",
                        next_step="Use the exact sources, or pass --allow-unverified here too",
                    )
                return {path: data for path, data in now.items() if data is not None}
        plan = _plan(tree, target, series, allow_unverified=allow_unverified)
    return {change.path: change.after for change in plan.changes if change.after is not None}


def pristine_files(tree: Path, paths: Sequence[str]) -> dict[str, bytes]:
    """Return files without our patches, whether or not a series is applied; missing ones are left out.

    Raises:
        NotApplied: the tree's receipt is damaged, or a touched file was changed after it.
        DirtyTree: a run stopped half-way here.
    """
    _refuse_interrupted(tree)
    receipt = load_receipt(tree)
    before = {file.path: file for file in receipt.files} if receipt else {}
    contents: dict[str, bytes] = {}
    for path in paths:
        data = read_file(tree, path)
        if path in before:
            if _blob(data) not in {before[path].post_blob, before[path].pre_blob}:
                raise NotApplied(
                    f"{path} was changed since the series was applied",
                    next_step="Export or undo the change first",
                )
            data = before[path].pre
        if data is not None:
            contents[path] = data
    return contents


def _refuse_interrupted(tree: Path) -> None:
    if interrupted(tree):
        raise DirtyTree(
            f"a run was stopped half-way in {tree}",
            rule="only a run that may write can put that right",
            next_step=f"Run `python -m m8d_build revert --source {tree}`",
        )


def _blob(content: bytes | None) -> str:
    return ABSENT if content is None else blob_id(content)


def _check_version(tree: Path, target: Target) -> None:
    version = tree_version(tree)
    if version != target.version:
        raise WrongTree(
            f"{tree} is PyTorch {version}",
            rule=f"these patches are for {target.version}",
            next_step=f"Use --torch {version}, or the sources of {target.version}",
        )


def _plan(tree: Path, target: Target, series: Series, *, allow_unverified: bool) -> _Plan:
    """Decide everything about an application without changing anything."""
    _check_version(tree, target)
    reject(target.version, verify(target, series))
    before = {path: read_file(tree, path) for path in series.paths}
    first, final = _ends(series)
    _check_not_applied(tree, target, before, final)
    if is_git_tree(tree):
        changed = uncommitted(tree, {p: "" if data is None else blob_id(data) for p, data in before.items()})
        if changed:
            raise DirtyTree(
                f"not committed in {tree}: {', '.join(changed)}",
                rule="the files a series touches must be as they are in the commit",
                next_step="Commit, stash or undo these changes",
            )
    in_the_way = [p for p, data in before.items() if first[p] == ABSENT and data is not None]
    if in_the_way:
        raise DirtyTree(
            f"there already in {tree}: {', '.join(in_the_way)}",
            rule="a patch makes these files",
            next_step="Move them away",
        )
    differing = [
        f"{p} is {_blob(data)}, recorded is {first[p]}"
        for p, data in before.items()
        if _blob(data) != first[p]
    ]
    if differing and not allow_unverified:
        raise BlobMismatch(
            "; ".join(differing),
            rule=f"the sources must be exactly those of {target.tag} (git blob ids)",
            next_step="Use the exact sources (`python -m m8d_build fetch`), or pass --allow-unverified",
        )
    after = _applied(target, series, before)
    if is_git_tree(tree):
        _cross_check(tree, target, series)
    modes = {p: (tree / p).stat().st_mode & 0o777 if data is not None else 0 for p, data in before.items()}
    made = {f.path: int(f.mode, 8) & 0o777 for patch in series.patches for f in patch.files}
    changes = tuple(Change(p, before[p], after[p], modes[p] or made[p]) for p in before)
    folders = missing_folders(tree, [c.path for c in changes if c.after is not None])
    touched = tuple(Touched(c.path, c.before, _blob(c.after), c.mode) for c in changes)
    return _Plan(Receipt(target.version, not differing, series, touched, folders), changes)


def _ends(series: Series) -> tuple[dict[str, str], dict[str, str]]:
    """Return each touched file's blob id before the first patch and after the last."""
    first: dict[str, str] = {}
    final: dict[str, str] = {}
    for patch in series.patches:
        for file in patch.files:
            first.setdefault(file.path, file.pre_blob)
            final[file.path] = file.post_blob
    return first, final


def _check_not_applied(
    tree: Path, target: Target, before: Mapping[str, bytes | None], final: Mapping[str, str]
) -> None:
    receipt = load_receipt(tree)
    # A receipt whose files are all as before (restored by hand) says nothing any more.
    applied = receipt is not None and any(_blob(read_file(tree, f.path)) != f.pre_blob for f in receipt.files)
    if receipt is not None and applied:
        value = f"{tree} has the series of {receipt.version} already ({', '.join(receipt.topics)})"
    elif before and all(_blob(data) == final[path] for path, data in before.items()):
        value = f"{tree} has the series of {target.version} already, applied by other means"
    else:
        return
    raise AlreadyApplied(
        value,
        rule="a series is applied once",
        next_step=f"`python -m m8d_build revert --source {tree}` takes it out"
        if applied
        else "Nothing needs to be done",
    )


def _applied(target: Target, series: Series, before: Mapping[str, bytes | None]) -> dict[str, bytes | None]:
    state = dict(before)
    findings = []
    for patch in series.patches:
        for file in patch.files:
            after, misfits = fit(file, state[file.path])
            for misfit in misfits:
                at = misfit.hunk.at if misfit.hunk else file.at
                findings.append(Finding(patch.name, at, "fuzz", misfit.reason))
            if not misfits:
                state[file.path] = after
    reject(target.version, findings)
    return state


def _cross_check(tree: Path, target: Target, series: Series) -> None:
    """Git must be of the same opinion; it reads the same bytes with other code."""
    diffs = b"".join(patch.data[len(patch.header_text.encode()) :] for patch in series.patches)
    complaint = check_applies(tree, diffs) if diffs else ""
    if complaint:
        raise PatchRejected(
            f"git does not apply the series of {target.version} to {tree}",
            rule="`git apply --check` must agree with our own check",
            next_step="The lines below are git's own",
            tail=complaint,
        )
