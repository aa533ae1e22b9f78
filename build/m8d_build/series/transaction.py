"""Transactional change of many files: all or none, also across a crash (write-ahead journal).

A journal with every file's bytes before is put down first; then all new contents are written beside their
places; then they are moved in. An error on the way puts everything back, and so does the next run if this one
could not (``repair``).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from m8d_build.errors import BuildBusy, DirtyTree, DiskFull, OutputUnwritable, WrongTree
from m8d_build.series.paths import require_inside
from m8d_build.series.receipt import RECEIPT, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["HOME", "Change", "interrupted", "locked", "missing_folders", "read_file", "repair", "swap"]

HOME = ".m8d"
JOURNAL = "journal.json"
SUFFIX = ".m8d-new"


@dataclass(frozen=True)
class Change:
    """What becomes of one file.

    Attributes:
        path: relative to the tree.
        before: its bytes now, None if it is not there.
        after: its bytes afterwards, None to delete it.
        mode: its permission bits.
    """

    path: str
    before: bytes | None
    after: bytes | None
    mode: int = 0o644


@contextmanager
def locked(tree: Path, *, reading: bool = False) -> Iterator[None]:
    """Keep other runs out of a tree, or those that change it where it is only read.

    The lock is on the folder itself and leaves nothing behind.

    Raises:
        BuildBusy: another run works in it.
        WrongTree: there is no such folder.
    """
    try:
        fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise WrongTree(f"{tree} is no folder", next_step="Name the root of the tree with --source") from exc
    try:
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if reading else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise BuildBusy(
                f"another run works in {tree}", rule="one at a time", next_step="Wait until it is done"
            ) from exc
        yield
    finally:
        os.close(fd)


def read_file(tree: Path, path: str) -> bytes | None:
    """Return a file's bytes, None if there is none.

    Raises:
        DirtyTree: it is no plain file, or a symbolic link is on the way to it.
    """
    place = tree / path
    for part in (place, *place.parents):
        if part == tree:
            break
        if part.is_symlink():
            raise DirtyTree(
                f"{part} is a symbolic link",
                rule="files are changed inside the tree only",
                next_step="Put the file itself there",
            )
    try:
        if not stat.S_ISREG(place.stat().st_mode):
            raise DirtyTree(f"{place} is no plain file", next_step="Restore the tree")
        return place.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def missing_folders(tree: Path, paths: Sequence[str]) -> tuple[str, ...]:
    """Return the folders that have to be made for these files, outermost first."""
    missing = {
        parent.relative_to(tree).as_posix()
        for path in paths
        for parent in (tree / path).parents
        if parent != tree and parent.is_relative_to(tree) and not parent.exists()
    }
    return tuple(sorted(missing - {HOME}))


def interrupted(tree: Path) -> bool:
    """Return whether a run was stopped here half-way (``repair`` puts it right)."""
    return (tree / HOME / JOURNAL).exists()


def swap(tree: Path, changes: Sequence[Change], *, drop_folders: Sequence[str] = ()) -> None:
    """Change many files as one.

    Args:
        tree: the folder all paths are relative to; no other program may write there meanwhile (``locked``).
        changes: what becomes of each file.
        drop_folders: folders to remove afterwards if they are empty, outermost first.

    Raises:
        DiskFull: not enough room; everything is as before.
        OutputUnwritable: the tree cannot be written; everything is as before.
        OSError: anything else the system says; everything is as before.
    """
    changes = [change for change in changes if change.before != change.after]
    folders = missing_folders(tree, [change.path for change in changes if change.after is not None])
    with _translated(tree):
        home = _home(tree)
        try:
            home.mkdir(exist_ok=True)
            _write(home / ".gitignore", b"*\n")  # git must not take our notes for the tree's
            _write(home / JOURNAL, _dump(changes, folders))
            for folder in folders:
                (tree / folder).mkdir(exist_ok=True)
            for change in changes:
                if change.after is not None:
                    _write_beside(tree / change.path, change.after, change.mode)
            for change in changes:
                if change.after is None:
                    (tree / change.path).unlink()
                else:
                    _beside(tree / change.path).replace(tree / change.path)
            for folder in reversed(drop_folders):
                _remove_empty(tree / folder)
            (home / JOURNAL).unlink()
        except BaseException:
            # If this fails as well, the journal is still there and the next run puts things right.
            with suppress(OSError):
                repair(tree)
            raise
        _tidy(tree)


def repair(tree: Path) -> bool:
    """Put back what an interrupted run left half-done.

    Returns:
        Whether there was anything to put back.

    Raises:
        DirtyTree: a file was changed by another program since; or the journal is damaged, or names what is
            outside the tree.
    """
    journal = _home(tree) / JOURNAL
    raw = read_file(tree, f"{HOME}/{JOURNAL}")
    if raw is None:
        _tidy(tree)
        return False
    try:
        changes, folders = _parse(tree, raw)
    except (ValueError, KeyError, TypeError) as exc:
        raise DirtyTree(
            f"{journal} is damaged: {exc}",
            rule="it holds files of this tree as they were before a run that was stopped half-way",
            next_step=f"Restore the tree and delete {journal.parent}",
        ) from exc
    for change in changes:
        _beside(tree / change.path).unlink(missing_ok=True)
        now = read_file(tree, change.path)
        if now == change.before:
            continue
        if now != change.after:
            raise DirtyTree(
                f"{tree / change.path} was changed after a run was stopped half-way",
                rule=f"it must be as that run found it or left it; {journal} has both",
                next_step="Restore the file and run this again",
            )
        if change.before is None:
            (tree / change.path).unlink()
        else:
            (tree / change.path).parent.mkdir(parents=True, exist_ok=True)
            _write(tree / change.path, change.before, change.mode)
    for folder in reversed(folders):
        _remove_empty(tree / folder)
    journal.unlink()
    _tidy(tree)
    return True


def _dump(changes: Sequence[Change], folders: Sequence[str]) -> bytes:
    rows = [
        {"path": c.path, "before": pack(c.before), "after": pack(c.after), "mode": c.mode} for c in changes
    ]
    return json.dumps({"changes": rows, "folders": list(folders)}).encode()


def _parse(tree: Path, raw: bytes) -> tuple[list[Change], list[str]]:
    data = json.loads(raw)
    changes = [
        Change(c["path"], unpack(c["before"]), unpack(c["after"]), int(c["mode"]) & 0o777)
        for c in data["changes"]
    ]
    folders = list(data["folders"])
    require_inside(tree, [*(change.path for change in changes), *folders], also=RECEIPT)
    return changes, folders


def _home(tree: Path) -> Path:
    home = tree / HOME
    if home.is_symlink():
        raise DirtyTree(
            f"{home} is a symbolic link",
            rule="notes about the tree lie in the tree",
            next_step="Remove the link",
        )
    return home


def _tidy(tree: Path) -> None:
    """Remove our folder once it holds nothing but the note for git."""
    home = tree / HOME
    for left in home.glob(f".*{SUFFIX}"):
        left.unlink()
    if home.is_dir() and not {path.name for path in home.iterdir()} - {".gitignore"}:
        (home / ".gitignore").unlink(missing_ok=True)
        home.rmdir()


def _remove_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError as exc:
        # Not there, or files of others are in it: both are as they should be.
        if exc.errno not in {errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST}:
            raise


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}{SUFFIX}")


def _write_beside(path: Path, data: bytes, mode: int) -> None:
    _beside(path).unlink(missing_ok=True)
    with _beside(path).open("xb") as file:  # through no link that the tree came with
        file.write(data)
        file.flush()
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())


def _write(path: Path, data: bytes, mode: int = 0o644) -> None:
    _write_beside(path, data, mode)
    _beside(path).replace(path)


@contextmanager
def _translated(tree: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if exc.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise DiskFull(
                f"no room left in {tree}",
                rule="everything is as it was before",
                next_step="Make room, run it again",
            ) from exc
        if exc.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
            raise OutputUnwritable(
                f"{exc.filename or tree} cannot be written: {exc.strerror}",
                rule="everything is as it was before",
                next_step="Make the folder writable, or work on a copy",
            ) from exc
        raise
