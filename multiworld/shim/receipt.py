"""The receipt of an applied patch file: what was changed, and how far a run came.

It lies in ``torch/.m8d-backup`` beside the original files.
"""

from __future__ import annotations

import enum
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multiworld.errors import InstallError
from multiworld.shim.torchsite import unreadable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from multiworld.shim.record import Record
    from multiworld.shim.torchsite import TorchSite

__all__ = [
    "APPLIED",
    "APPLYING",
    "BACKUP_FOLDER",
    "RECEIPT",
    "SCHEMA",
    "VERSION_FILE",
    "Standing",
    "backup_of",
    "discard",
    "kept_files",
    "receipt_of",
    "sha256_of",
    "standing_of",
    "text_of",
]

BACKUP_FOLDER = "torch/.m8d-backup"
"""Folder of the receipt and the original files, below the folder that holds ``torch``."""

RECEIPT = f"{BACKUP_FOLDER}/receipt.json"
SCHEMA = 1
VERSION_FILE = "torch/version.py"
"""File whose hash tells one build of torch from another."""

APPLYING, APPLIED = "applying", "applied"
"""States of a receipt: files of torch are about to be changed; all of them are."""


class Standing(str, enum.Enum):
    """How an applied patch file stands.

    Attributes:
        APPLIED: as it was left.
        HALF_DONE: a run that applied or reverted it was ended half way.
        STALE: torch was replaced since, and the backup is of the other one.
    """

    APPLIED = "applied"
    HALF_DONE = "half done"
    STALE = "stale"

    __str__ = str.__str__


def receipt_of(site: TorchSite) -> dict[str, Any] | None:
    """Return the receipt of the applied patch file; None without one.

    Raises:
        InstallError: it cannot be read, or is not one that this package writes. The owner of the folder can
            put anything there, and root may be the user who runs this.
    """
    _require_folder(site)
    data = site.read(RECEIPT)
    if data is None:
        return None
    try:
        receipt: Any = json.loads(data)
        _require_fields(receipt)
        for entry in receipt["files"]:
            _require_inside(site, entry["path"])
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise InstallError(
            f"{site.root / RECEIPT} is damaged: {type(exc).__name__}: {exc}",
            next_step="Discard the backup with m8d-post-setup --revert --force, then install torch again",
        ) from exc
    found: dict[str, Any] = receipt
    return found


def standing_of(site: TorchSite, receipt: Mapping[str, Any]) -> Standing:
    """Tell how an applied patch file stands.

    Args:
        site: the torch.
        receipt: what `receipt_of` returns.

    Raises:
        InstallError: a file cannot be read.
    """
    if _of_another_torch(site, receipt):
        return Standing.STALE
    half = receipt["state"] == APPLYING or _ended_early(site, receipt)
    return Standing.HALF_DONE if half else Standing.APPLIED


def discard(site: TorchSite, record: Record | None = None) -> None:
    """Remove the backup and its rows in RECORD; other files of torch stay as they are.

    Args:
        site: the torch.
        record: its RECORD, with other changes; None to read it.

    Raises:
        InstallError: the backup cannot be removed, or its folder is a symbolic link.
    """
    _require_folder(site)
    changed = site.record() if record is None else record
    for path in changed.below(BACKUP_FOLDER):
        changed.restore(path, None)
    # The receipt goes first: a backup without one is removed by the next run.
    site.change(dict.fromkeys(sorted(kept_files(site), key=lambda path: path != RECEIPT)), changed)


def kept_files(site: TorchSite) -> list[str]:
    """Return the files of the backup folder, by their paths below ``site.root``.

    Raises:
        InstallError: the folder cannot be read.
    """
    folder = site.root / BACKUP_FOLDER

    def refuse(exc: OSError) -> None:
        if not isinstance(exc, FileNotFoundError):
            raise unreadable(folder, exc) from exc

    # Unlike `rglob`, it says what it could not list.
    found = [Path(place, name) for place, _, names in os.walk(folder, onerror=refuse) for name in names]
    return [str(path.relative_to(site.root)) for path in found]


def backup_of(path: str) -> str:
    """Return where the original of a file is kept."""
    # Not *.py: tools that compile or collect Python files must not take it for one.
    return f"{BACKUP_FOLDER}/{path}.orig"


def text_of(receipt: Mapping[str, Any]) -> bytes:
    """Return a receipt as it is written."""
    return (json.dumps(receipt, indent=1, sort_keys=True) + "\n").encode()


def sha256_of(data: bytes | None) -> Any:
    """Return the hash of a file's bytes, 64 hex digits; None for no file."""
    return None if data is None else hashlib.sha256(data).hexdigest()


def _require_fields(receipt: Any) -> None:
    """Raise a ValueError, KeyError or TypeError where a receipt is incomplete, or has something else."""
    if receipt["schema"] != SCHEMA or receipt["state"] not in {APPLYING, APPLIED}:
        raise ValueError(f"schema {receipt['schema']!r}, state {receipt['state']!r}")
    for entry in receipt["files"]:
        if not isinstance(entry["path"], str):
            raise TypeError(f"path {entry['path']!r}")
        for field in ("before", "after", "row"):
            if not isinstance(entry[field], (str, type(None))):
                raise TypeError(f"{field} {entry[field]!r}")
    for value in (receipt["torch"], receipt["patch"]["name"], receipt["patch"]["sha256"]):
        if not isinstance(value, str):
            raise TypeError(f"torch or patch {value!r}")


def _require_folder(site: TorchSite) -> None:
    """Raise an InstallError where the backup's folder leads elsewhere."""
    folder = site.root / BACKUP_FOLDER
    if folder.is_symlink():
        raise InstallError(
            f"{folder} is a symbolic link",
            rule="the backup of a patch file is a folder, whose files are removed with it",
            next_step="Remove the link",
        )


def _ended_early(site: TorchSite, receipt: Mapping[str, Any]) -> bool:
    """Tell whether a run ended although the receipt says applied."""
    record = site.record()
    for entry in receipt["files"]:
        if entry["before"] == entry["after"]:  # m8d 1.0.0 and older took such a patch
            continue
        data = site.read(entry["path"])
        now = sha256_of(data)
        # A revert that was ended has some files back. An apply that was ended before its last step,
        # RECORD, left rows of the original files. A file that was edited since says nothing.
        unrecorded = data is not None and now == entry["after"] and not record.says(entry["path"], data)
        if now == entry["before"] or unrecorded:
            return True
    return False


def _of_another_torch(site: TorchSite, receipt: Mapping[str, Any]) -> bool:
    version = site.version()
    changed = [entry["after"] for entry in receipt["files"] if entry["path"] == VERSION_FILE]
    if "version_file" in receipt:
        return sha256_of(site.read(VERSION_FILE)) not in {receipt["version_file"], *changed}
    # m8d 1.0.0 and older wrote no hash.
    return not changed and receipt["torch"] != version


def _require_inside(site: TorchSite, path: str) -> None:
    """Raise a ValueError where a file, or its backup, is not below torch."""
    parts = path.split("/")
    plain = path.isascii() and path.isprintable()
    if not plain or parts[0] != "torch" or len(parts) < 2 or {"", ".", ".."} & set(parts):
        raise ValueError(f"{path!r} is not below torch/")
    for each in (path, backup_of(path)):
        if site.leads_out(each):
            raise ValueError(f"{each} leads out of {site.torch}")
