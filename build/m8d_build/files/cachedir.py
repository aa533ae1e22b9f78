"""The cache folder: its contents, their sizes, and the parts not used for a while."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from m8d_build.files.disk import remove_tree

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["KINDS", "Kept", "prune", "survey", "unused"]

DAY = 86400.0
# Prefix of what is being removed: of a folder under its own name a part would be taken for the whole.
_ASIDE = ".pruned-"
# Folders of the cache and what they are for; an entry is whatever lies directly in one.
KINDS = {
    "wheels": "official wheels and packages with headers",
    "sources": "PyTorch's sources",
    "headers": "headers unpacked from wheels",
    "objects": "compiled units",
    "deflate": "compressed parts of patched wheels",
    "envs": "environments of check-wheel and tests-torch",
}


@dataclass(frozen=True)
class Kept:
    """One entry of the cache.

    Attributes:
        kind: one of KINDS.
        path: a file or folder.
        size: bytes on disk.
        used: seconds since the epoch when it was last read or written.
    """

    kind: str
    path: Path
    size: int
    used: float


def survey(cache: Path) -> tuple[Kept, ...]:
    """Return the cache's contents, without locks and unfinished work, whose names begin with a dot.

    What a `prune` that was interrupted has left is among them, and unused since the epoch.
    """
    found = []
    for kind in KINDS:
        folder = cache / kind
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.name.startswith(_ASIDE):
                found.append(replace(_entry(kind, path), used=0.0))
            elif not path.name.startswith("."):
                found.append(_entry(kind, path))
    return tuple(found)


def unused(entries: Sequence[Kept], days: float, now: float) -> tuple[Kept, ...]:
    """Return the entries not used for so many days (0: all of them)."""
    return tuple(entry for entry in entries if now - entry.used >= days * DAY)


def prune(entries: Sequence[Kept]) -> int:
    """Remove entries; return how many bytes they had.

    Raises:
        OSError: one cannot be removed.
    """
    for entry in entries:
        path = entry.path
        if path.is_dir() and not path.is_symlink():
            if not path.name.startswith(_ASIDE):
                aside = path.with_name(_ASIDE + path.name)
                remove_tree(aside)  # of a run that was interrupted
                path = path.rename(aside)
            remove_tree(path)
        else:
            path.unlink(missing_ok=True)
    return sum(entry.size for entry in entries)


def _entry(kind: str, path: Path) -> Kept:
    size, used = 0, 0.0
    for each in _files(path):
        try:
            state = each.lstat()
        except FileNotFoundError:  # another run has just replaced it
            continue
        size += state.st_blocks * 512
        used = max(used, state.st_mtime, state.st_atime if each.is_file() else 0.0)
    return Kept(kind, path, size, used or time.time())


def _files(path: Path) -> Iterator[Path]:
    yield path
    if path.is_dir() and not path.is_symlink():
        yield from path.rglob("*")
