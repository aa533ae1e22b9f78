"""Apply a Python-level patch file to an installed torch with a backup, and revert it byte for byte.

The original files are kept in ``torch/.m8d-backup`` (listed in RECORD, so that `pip uninstall torch` removes
them), with a receipt of the progress. The receipt is written before the first file of torch changes and
removed after the last one is restored: the next run, of any command, reverts an interrupted one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from multiworld.errors import InstallError
from multiworld.shim.diff import apply_diff, parse_diff, reversed_diff
from multiworld.shim.receipt import (
    APPLIED,
    APPLYING,
    BACKUP_FOLDER,
    RECEIPT,
    SCHEMA,
    VERSION_FILE,
    Standing,
    backup_of,
    discard,
    kept_files,
    receipt_of,
    sha256_of,
    standing_of,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from multiworld.shim.diff import FileDiff
    from multiworld.shim.record import Record
    from multiworld.shim.torchsite import TorchSite

__all__ = [
    "Outcome",
    "PatchFile",
    "apply_patch",
    "left_by",
    "read_patch",
    "recover",
    "revert_patch",
]

_STATED = re.compile(
    rb"^[#\s]*(?:for[- ])?torch(?: version)?\s*:\s*v?(\d+\.\d+\.\d+)\s*$", re.IGNORECASE | re.MULTILINE
)
_IN_NAME = re.compile(r"(?<![\d.])v?(\d+\.\d+\.\d+)(?![\d]|\.\d)")


@dataclass(frozen=True)
class PatchFile:
    """A patch file that was read.

    Attributes:
        name: of the file.
        sha256: of its bytes, 64 hex digits.
        torch: the version it is for ("2.6.0").
        diffs: what it does, file by file.
    """

    name: str
    sha256: str
    torch: str
    diffs: tuple[FileDiff, ...]


@dataclass(frozen=True)
class Outcome:
    """Result of applying or reverting.

    Attributes:
        changed: whether anything was, or in a dry run would be, changed.
        files: the files of the patch, below the folder that holds ``torch``.
        says: one line for people.
        left: what was done first about an earlier run, as `left_by` says it; empty if nothing was.
    """

    changed: bool
    files: tuple[str, ...]
    says: str
    left: str = ""


def read_patch(path: Path, *, for_torch: str | None = None) -> PatchFile:
    """Read a patch file and find out which torch it is for.

    Its version is stated by the caller, by a line ``For-Torch: X.Y.Z`` above the first diff, or by the file's
    name (``pytorch-v2.4.0.patch``); where several say something, they must agree.

    Raises:
        InstallError: it cannot be read, is refused, or its version is not known.
    """
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise InstallError(
            f"{path} cannot be read: {exc.strerror}", next_step="Name a patch file (a unified diff)"
        ) from exc
    diffs = parse_diff(data)
    above = re.split(rb"^(?:diff --git |--- )", data, maxsplit=1, flags=re.MULTILINE)[0]
    in_name, stated = _IN_NAME.search(path.name), _STATED.search(above)
    said = {
        "--for-torch": for_torch.strip().removeprefix("v").partition("+")[0] if for_torch else None,
        "the patch's head": stated[1].decode() if stated else None,
        "the file's name": in_name[1] if in_name else None,
    }
    versions = {where: version for where, version in said.items() if version}
    if not versions:
        raise InstallError(
            f"{path.name} does not say which torch it is for",
            rule="a patch is applied to the version it was made for",
            next_step="Give --for-torch X.Y.Z, or write a line 'For-Torch: X.Y.Z' above its first diff",
        )
    if len(set(versions.values())) > 1:
        raise InstallError(
            f"{path.name}: " + ", ".join(f"{where} says {version}" for where, version in versions.items()),
            rule="they agree",
            next_step="Find out which torch the patch was made for",
        )
    return PatchFile(path.name, sha256_of(data), next(iter(versions.values())), diffs)


def apply_patch(site: TorchSite, patch: PatchFile, *, dry_run: bool = False) -> Outcome:
    """Apply a patch file to an installed torch, all of it or nothing.

    Raises:
        InstallError: it is for another version, does not fit exactly, another patch is applied, or torch's
            folder cannot be written. Nothing was changed then.
    """
    files = tuple(diff.path for diff in patch.diffs)
    _check_version(site, patch)
    with site.locked():
        left = "" if dry_run else left_by(site)
        receipt = receipt_of(site)
        if recover(site, dry_run=dry_run) is Standing.APPLIED and receipt is not None:
            return _applied_before(site, patch, receipt, files)
        before, after = _results(site, patch)
        if before is None or after is None:
            says = f"{patch.name} is in this torch already; there is no backup"
            return Outcome(changed=False, files=files, says=says, left=left)
        if dry_run:
            return Outcome(changed=True, files=files, says=f"{patch.name} fits; nothing was changed")
        _write(site, patch, before, after)
    says = f"{patch.name} is applied; `m8d-post-setup --revert` takes it back"
    return Outcome(changed=True, files=files, says=says, left=left)


def revert_patch(site: TorchSite, *, dry_run: bool = False, force: bool = False) -> Outcome:
    """Revert the applied patch file; every file is then restored byte for byte.

    Where torch was replaced since, the backup is discarded instead.

    Args:
        site: the torch.
        dry_run: change nothing.
        force: discard a backup that cannot be put back, and leave torch's files as they are.

    Raises:
        InstallError: none is applied, a file was changed since, or torch's folder cannot be written.
    """
    with site.locked():
        why = _why_lost(site) if force else None
        if why is not None:
            return _give_up(site, why, dry_run=dry_run)
        receipt = receipt_of(site)
        found = recover(site, dry_run=dry_run)
        if receipt is None:
            raise InstallError(
                f"no patch file is applied to {site.torch}", rule="--revert takes back what was applied"
            )
        files = tuple(entry["path"] for entry in receipt["files"])
        name = receipt["patch"]["name"]
        if found is Standing.STALE:
            return Outcome(changed=True, files=(), says=_says_stale(receipt, dry_run=dry_run))
        if found is Standing.HALF_DONE:
            return Outcome(changed=True, files=files, says=f"{name} is taken back")
        if dry_run:
            _originals(site, receipt)
            return Outcome(changed=True, files=files, says=f"{name} can be taken back; nothing was changed")
        _restore(site, receipt)
    return Outcome(changed=True, files=files, says=f"{name} is taken back")


def _check_version(site: TorchSite, patch: PatchFile) -> None:
    installed = site.version()
    if installed.partition("+")[0] != patch.torch:
        raise InstallError(
            f"{patch.name} is for torch {patch.torch}, installed is {installed}",
            rule="a patch is applied to the version it was made for",
            next_step=f"Install torch {patch.torch}, or use a patch for {installed.partition('+')[0]}",
        )


def _applied_before(
    site: TorchSite, patch: PatchFile, receipt: Mapping[str, Any], files: tuple[str, ...]
) -> Outcome:
    if receipt["patch"]["sha256"] != patch.sha256:
        raise InstallError(
            f"{receipt['patch']['name']} is applied to this torch",
            rule="one patch file at a time",
            next_step="Take it back with m8d-post-setup --revert, then apply this one",
        )
    for entry in receipt["files"]:
        if sha256_of(site.read(entry["path"])) != entry["after"]:
            raise _changed(entry["path"])
    return Outcome(changed=False, files=files, says=f"{patch.name} is applied already")


def _results(
    site: TorchSite, patch: PatchFile
) -> tuple[dict[str, bytes | None] | None, dict[str, bytes | None] | None]:
    """Return each file before and after; None twice if the patch's changes are in there already."""
    before: dict[str, bytes | None] = {}
    for diff in patch.diffs:
        if site.leads_out(diff.path):
            raise InstallError(
                f"{(site.root / diff.path).parent} leads out of {site.torch}",
                rule="a patch stays below torch/",
            )
        before[diff.path] = site.read(diff.path)
    try:
        return before, {diff.path: apply_diff(diff, before[diff.path]) for diff in patch.diffs}
    except InstallError:
        if not _is_in(patch, before):
            raise
    return None, None


def _is_in(patch: PatchFile, contents: Mapping[str, bytes | None]) -> bool:
    """Whether a torch has the patch's changes already."""
    try:
        for diff in patch.diffs:
            apply_diff(reversed_diff(diff), contents[diff.path])
    except InstallError:
        return False
    return True


def _write(
    site: TorchSite, patch: PatchFile, before: Mapping[str, bytes | None], after: Mapping[str, bytes | None]
) -> None:
    record = site.record()
    entries = [
        {"path": path, "before": sha256_of(data), "after": sha256_of(after[path]), "row": record.line(path)}
        for path, data in before.items()
    ]
    receipt = {
        "schema": SCHEMA,
        "state": APPLYING,
        "torch": site.version(),
        "version_file": sha256_of(site.read(VERSION_FILE)),
        "patch": {"name": patch.name, "sha256": patch.sha256},
        "files": entries,
    }
    backups = {backup_of(path): data for path, data in before.items() if data is not None}
    # The receipt comes last: as long as there is none, no file of torch was touched.
    _change(site, {**backups, RECEIPT: text_of(receipt)}, record)
    try:
        _change(site, {**after, RECEIPT: text_of({**receipt, "state": APPLIED})}, record)
    except InstallError:
        _restore(site, receipt)
        raise


def _change(site: TorchSite, files: Mapping[str, bytes | None], record: Record) -> None:
    for path, data in files.items():
        if data is not None:
            record.put(path, data)
    site.change(files, record)


def left_by(site: TorchSite) -> str:
    """Return what `recover` will do about an earlier run, one line for people; empty if nothing.

    Raises:
        InstallError: a file cannot be read, or the receipt is damaged.
    """
    receipt = receipt_of(site)
    found = None if receipt is None else standing_of(site, receipt)
    if receipt is None or found is Standing.APPLIED:
        return ""
    if found is Standing.STALE:
        return _says_stale(receipt)
    return f"A run that was ended left {receipt['patch']['name']} half done; it is taken back"


def recover(site: TorchSite, *, dry_run: bool = False) -> Standing | None:
    """Revert an interrupted run, and discard the backup of another torch, in a torch that is locked.

    Returns:
        How a patch file stood before; None without one.

    Raises:
        InstallError: a run was interrupted, and this is a dry run; or it cannot be reverted.
    """
    receipt = receipt_of(site)
    found = None if receipt is None else standing_of(site, receipt)
    if dry_run:
        if found is Standing.HALF_DONE:
            raise InstallError(
                f"a run on {site.torch} was ended half way",
                next_step="Run without --dry-run: it is taken back first",
            )
        return found
    site.clean(BACKUP_FOLDER, [entry["path"] for entry in receipt["files"]] if receipt else ())
    if receipt is None or found is Standing.STALE:
        discard(site)
    elif found is Standing.HALF_DONE:
        _restore(site, receipt)
    return found


def _restore(site: TorchSite, receipt: Mapping[str, Any]) -> None:
    originals = _originals(site, receipt)
    record = site.record()
    for entry in receipt["files"]:
        record.restore(entry["path"], entry["row"])
    for path in record.below(BACKUP_FOLDER):
        record.restore(path, None)
    site.change(originals, record)
    # The receipt goes last: as long as it is there, the next run can finish this one.
    site.change(dict.fromkeys(sorted(kept_files(site), key=lambda path: path == RECEIPT)), record)


def _originals(site: TorchSite, receipt: Mapping[str, Any]) -> dict[str, bytes | None]:
    """Return what is to be put back: each file that is not yet what it was, and each that was not there."""
    found: dict[str, bytes | None] = {}
    for entry in receipt["files"]:
        path = entry["path"]
        now = sha256_of(site.read(path))
        if now == entry["before"]:
            if now is None:
                # It is gone, or was not written yet; folders that were made for it may be there.
                found[path] = None
            continue
        if now != entry["after"]:
            raise _changed(path)
        original = site.read(backup_of(path)) if entry["before"] is not None else None
        if sha256_of(original) != entry["before"]:
            raise InstallError(
                f"the backup of {path} is gone, or was changed",
                next_step="Discard it with m8d-post-setup --revert --force, then install torch again",
            )
        found[path] = original
    return found


def _why_lost(site: TorchSite) -> InstallError | None:
    """Return why an applied patch file cannot be reverted; None if it can, or there is none.

    Raises:
        InstallError: something cannot be read, which says nothing of the backup.
    """
    try:
        receipt = receipt_of(site)
        if receipt is not None and standing_of(site, receipt) is not Standing.STALE:
            _originals(site, receipt)
    except InstallError as exc:
        if isinstance(exc.__cause__, OSError):
            raise
        return exc
    return None


def _give_up(site: TorchSite, why: InstallError, *, dry_run: bool) -> Outcome:
    try:
        receipt = receipt_of(site)
    except InstallError:
        receipt = None
    files = tuple(entry["path"] for entry in receipt["files"]) if receipt is not None else ()
    if not dry_run:
        record = site.record()
        for path in files:  # RECORD then says what is there
            data = site.read(path)
            if data is not None:
                record.put(path, data)
        discard(site, record)
    says = (
        f"{why.value}: nothing is taken back, and the backup {'would be' if dry_run else 'is'} discarded. "
        "These files stay as they are, patched or not. Install torch again to have its own"
    )
    return Outcome(changed=True, files=files, says=says)


def _says_stale(receipt: Mapping[str, Any], *, dry_run: bool = False) -> str:
    return (
        f"The backup of {receipt['patch']['name']} is of torch {receipt['torch']}, which was replaced; "
        f"it {'would be' if dry_run else 'is'} discarded, and no file of torch is changed"
    )


def _changed(path: str) -> InstallError:
    return InstallError(
        f"{path} was changed after the patch was applied",
        rule="a file is put back only if it is as the patch left it",
        next_step="Undo that change; or discard the backup with m8d-post-setup --revert --force, "
        "then install torch again",
    )
