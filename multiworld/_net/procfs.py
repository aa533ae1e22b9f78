"""Names in folders of the /proc file system, and what it tells of processes."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["names", "start_time"]


def names(folder: str | os.PathLike[str]) -> list[str]:
    """Return the names in a folder, complete before the caller opens or closes descriptors.

    Raises:
        OSError: the folder cannot be read.
    """
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks, which differs for a reused pid.

    Returns:
        None if it has ended, also while its parent has not waited for it, or if /proc does not show it.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    state, *fields = stat.rpartition(b")")[2].split()  # the program's name, before it, may have any character
    return None if state in {b"Z", b"X"} else int(fields[18])
