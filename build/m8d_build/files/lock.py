"""One build per folder: a lock that the kernel releases when its holder ends."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from m8d_build.errors import BuildBusy, OutputUnwritable
from m8d_build.files.disk import needs_room

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["CACHE_OPTION", "LOCK_NAME", "Holder", "hold", "holder_of"]

CACHE_OPTION = "--cache or M8D_CACHE"
LOCK_NAME = ".m8d.lock"
HOLDER_NAME = ".m8d.lock.json"  # beside the lock, not in it: filelock truncates its file in some versions


@dataclass(frozen=True)
class Holder:
    """Who holds a folder.

    Attributes:
        pid: process id on ``host``.
        host: name of its machine.
        what: what it does there ("build torch 2.6.0").
        since: seconds since the epoch.
    """

    pid: int
    host: str
    what: str
    since: float

    def describe(self, now: float) -> str:
        """Return "process 12 on host (what), since <UTC time>, for N s"."""
        began = datetime.fromtimestamp(self.since, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
        lasted = f"since {began}, for {max(now - self.since, 0):.0f} s"
        return f"process {self.pid} on {self.host} ({self.what}), {lasted}"


@contextmanager
def hold(
    folder: Path,
    *,
    what: str,
    wait: float = 0.0,
    option: str = "--out",
    clock: Callable[[], float] = time.time,
) -> Iterator[Holder]:
    """Hold a folder, made if it is not there, for as long as the context lasts.

    The lock is the kernel's (flock), so a killed holder never leaves the folder locked, and programs we run
    do not inherit it. The same process cannot hold a folder twice.

    Args:
        folder: what to hold.
        what: what is done there, told to callers that find it held.
        wait: seconds to wait for another holder to finish.
        option: what names another folder, for the message; ``CACHE_OPTION`` for one in the cache.
        clock: seconds since the epoch.

    Raises:
        BuildBusy: another holds it, and still did after ``wait``.
        OutputUnwritable: the folder cannot be made or written.
        DiskFull: there is no room for the lock file.
    """
    try:
        with needs_room(folder, f"locking it to {what}"):
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / LOCK_NAME)
            lock.acquire(timeout=wait)
    except Timeout as exc:
        holder = holder_of(folder)
        held = holder.describe(clock()) if holder else "a process that did not say who it is"
        raise BuildBusy(
            f"{folder} is in use by {held}",
            rule="one build works in a folder at a time",
            next_step=f"Wait for it or end it, or use another folder with {option}",
        ) from exc
    except OSError as exc:
        raise OutputUnwritable(
            f"{folder} cannot be locked: {exc.strerror or exc}",
            rule="it must be a folder we may write",
            next_step=f"Name another folder with {option}, or correct its permissions",
        ) from exc
    try:
        holder = Holder(os.getpid(), socket.gethostname(), what, clock())
        with needs_room(folder, f"locking it to {what}"):
            _tell(folder, holder)
        yield holder
    finally:
        (folder / HOLDER_NAME).unlink(missing_ok=True)
        lock.release()


def holder_of(folder: Path) -> Holder | None:
    """Return the recorded holder of a folder, None if there is none or it cannot be read.

    Only meaningful while the lock is held: a killed holder's word stays behind and is overwritten by the
    next.
    """
    try:
        said = json.loads((folder / HOLDER_NAME).read_text(encoding="utf-8"))
        return Holder(int(said["pid"]), str(said["host"]), str(said["what"]), float(said["since"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _tell(folder: Path, holder: Holder) -> None:
    beside = folder / f"{HOLDER_NAME}.new"
    beside.write_text(json.dumps(asdict(holder)), encoding="utf-8")
    beside.replace(folder / HOLDER_NAME)
