"""Disk errors become DiskFull; finished folders are renamed into place."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

from m8d_build.errors import CommandFailed, DiskFull, WrongTree

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["copy_sources", "move_into_place", "needs_room", "remove_tree"]

FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_SHOWN = 3  # of the errors of one copy
FULL_TEXTS = ("No space left on device", "Disk quota exceeded", "You don't have enough free space")


@contextmanager
def needs_room(folder: Path, what: str) -> Iterator[None]:
    """Enclose work that writes under a folder; a full disk, ours or a program's, becomes DiskFull.

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


def copy_sources(source: Path, to: Path) -> None:
    """Copy a folder of sources with all in it, links as links.

    Args:
        source: the folder.
        to: its copy, made here.

    Raises:
        OSError: the disk is full, or the copy cannot be made at all.
        WrongTree: some of it cannot be copied; the rest was.
    """
    try:
        shutil.copytree(source, to, symlinks=True)
    except shutil.Error as exc:
        # It has no number of its own: there is the text of each error, after the places.
        whys = [str(why) for *_, why in exc.args[0]]
        for number in FULL_ERRNOS:
            if any(why.startswith(f"[Errno {number}]") for why in whys):
                raise OSError(number, os.strerror(number), str(to)) from exc
        more = f"; and {len(whys) - _SHOWN} more" if len(whys) > _SHOWN else ""
        raise WrongTree(
            f"{source} could not be copied: {'; '.join(whys[:_SHOWN])}{more}",
            next_step="Correct what cannot be read there",
        ) from exc


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
