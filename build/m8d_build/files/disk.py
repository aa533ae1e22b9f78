"""Disk errors become DiskFull; finished folders are renamed into place."""

from __future__ import annotations

import errno
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

from m8d_build.errors import CommandFailed, DiskFull

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["move_into_place", "needs_room", "remove_tree"]

FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
FULL_TEXTS = ("No space left on device", "Disk quota exceeded", "You don't have enough free space")


@contextmanager
def needs_room(folder: Path, what: str) -> Iterator[None]:
    """Enclose work that writes under a folder; a full disk, ours or met by a program we ran, becomes DiskFull.

    Args:
        folder: where it writes (need not exist).
        what: what it does, for the message ("unpacking PyTorch's sources").

    Raises:
        DiskFull: there was no room left.
    """
    try:
        yield
    except OSError as exc:
        if exc.errno in FULL_ERRNOS:
            raise _full(folder, what) from exc
        raise
    except CommandFailed as exc:
        if any(text in exc.tail for text in FULL_TEXTS):
            raise _full(folder, what) from exc
        raise


def move_into_place(folder: Path, final: Path) -> None:
    """Move a finished folder to its final name on the same disk, replacing an earlier one.

    Stopped at any point, ``final`` is the earlier folder, absent, or the new one: never a mixture.

    Raises:
        OSError: it cannot be moved.
    """
    earlier = final.with_name(f".old-{final.name}")
    remove_tree(earlier)
    if final.exists():
        final.rename(earlier)
    folder.rename(final)
    remove_tree(earlier)


def remove_tree(path: Path) -> None:
    """Remove a folder and all in it; nothing happens if it is not there.

    Raises:
        OSError: something in it cannot be removed.
    """
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _full(folder: Path, what: str) -> DiskFull:
    place = next((p for p in (folder, *folder.parents) if p.exists()), folder)
    left = shutil.disk_usage(place).free / 2**20
    return DiskFull(
        f"no room left under {folder} while {what} ({left:.0f} MiB free)",
        next_step="Free some room, or name a folder on a larger disk (M8D_CACHE for the cache), then run it "
        "again",
    )
