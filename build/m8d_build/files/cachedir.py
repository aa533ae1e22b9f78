"""The cache folder: its contents, their sizes, and the parts not used for a while."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from m8d_build.errors import BuildBusy, OutputUnwritable
from m8d_build.files.disk import remove_tree
from m8d_build.files.lock import CACHE_OPTION, LOCK_NAME, hold

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

__all__ = ["KINDS", "Kept", "mark_used", "prune", "survey", "unused"]

DAY = 86400.0
# Prefix of what is being removed: of a folder under its own name a part would be taken for the whole.
_ASIDE = ".pruned-"
_LOCKS = ".locks"  # of the environments, beside them
_WORK = "work"
# Folders of the cache and what they are for; an entry is whatever lies directly in one.
KINDS = {
    "wheels": "official wheels and packages with headers",
    "sources": "PyTorch's sources",
    "headers": "headers unpacked from wheels",
    "objects": "compiled units",
    "deflate": "compressed parts of patched wheels",
    "envs": "environments of check-wheel and tests-torch",
    _WORK: "libraries unpacked for a build that runs, or was killed",
}


@dataclass(frozen=True)
class Kept:
    """One entry of the cache.

    Attributes:
        kind: one of KINDS.
        path: a file or folder.
        size: bytes on disk.
        used: seconds since the epoch when it was last read or written; 0 of unfinished work, which no later
            run takes up.
        lock: the folder that a run holds that makes or uses it; None if there is none.
    """

    kind: str
    path: Path
    size: int
    used: float
    lock: Path | None = None


def survey(cache: Path) -> tuple[Kept, ...]:
    """Return the cache's contents, without locks; with what runs that were killed have left.

    Unfinished work that no lock speaks for is among them once it was not touched for a day.
    """
    found = []
    for kind in KINDS:
        for path in _inside(cache / kind):
            if kind == _WORK:
                found += [replace(_entry(kind, left), used=0.0, lock=path) for left in _inside(path)]
            elif path.name.startswith("."):
                entry = _entry(kind, path)
                lock = _lock_of(kind, path)
                if lock is not None or path.name.startswith(_ASIDE) or time.time() - entry.used >= DAY:
                    found.append(replace(entry, used=0.0, lock=lock))
            else:
                lock = _lock_of(kind, path)
                if lock != path or _inside(path):
                    found.append(replace(_entry(kind, path), lock=lock))
    return tuple(found)


def mark_used(*paths: Path) -> None:
    """Note that entries, or files of them, are used now: not every file system notes when one is read."""
    for path in paths:
        with suppress(OSError):  # it is another user's, or another run has just replaced it
            os.utime(path)


def unused(entries: Sequence[Kept], days: float, now: float) -> tuple[Kept, ...]:
    """Return the entries not used for so many days (0: all of them)."""
    return tuple(entry for entry in entries if now - entry.used >= days * DAY)


def prune(entries: Sequence[Kept]) -> int:
    """Remove entries, but for those that a run holds; return how many bytes they had.

    Raises:
        OutputUnwritable: one cannot be removed; the others are.
    """
    freed, failed = 0, []
    for entry in entries:
        try:
            with _held(entry):
                _remove(entry)
        except BuildBusy:
            continue
        except (OSError, OutputUnwritable) as exc:
            failed.append((entry.path, exc))
            continue
        freed += entry.size
    if failed:
        path, why = failed[0]
        more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise OutputUnwritable(
            f"{path}{more} cannot be removed: {why}",
            rule="files are removed by their owner; all others were removed",
            next_step="Remove them as the user who made them, or name another cache with --cache",
        ) from why
    return freed


def _held(entry: Kept) -> AbstractContextManager[object]:
    if entry.lock is None:
        return nullcontext()
    return hold(entry.lock, what="prune the cache", option=CACHE_OPTION)


def _remove(entry: Kept) -> None:
    path = entry.path
    if path.is_dir() and not path.is_symlink():
        if path == entry.lock:
            # The lock in it stays: another run may wait for it.
            for part in _inside(path):
                _remove(replace(entry, path=part))
            return
        if not path.name.startswith("."):
            aside = path.with_name(_ASIDE + path.name)
            remove_tree(aside)  # of a run that was interrupted
            path = path.rename(aside)
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)


def _inside(folder: Path) -> list[Path]:
    """Return what lies in a folder, locks left out."""
    try:
        found = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # or another run has just removed it
        found = []
    return [path for path in found if not path.name.startswith(LOCK_NAME) and path.name != _LOCKS]


def _lock_of(kind: str, path: Path) -> Path | None:
    """Return the folder that a run holds that makes or uses this."""
    if path.name.startswith(_ASIDE):
        return None
    if kind == "wheels":
        return path.parent
    if kind == "envs":  # "NAME"; unfinished: ".part-NAME" and ".old-NAME"
        name = path.name.partition("-")[2] if path.name.startswith(".") else path.name
        return path.parent / _LOCKS / name
    # One that was never held gets no lock: it may be a link, and what it leads to is not ours.
    return path if kind == "sources" and (path / LOCK_NAME).exists() else None


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
    if not path.is_symlink():
        # Unlike `rglob`, it passes over a folder that another run has just removed.
        for folder, folders, files in os.walk(path):
            yield from (Path(folder, name) for name in (*folders, *files))
