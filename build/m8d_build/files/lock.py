"""Locks that the kernel releases when their holder ends: one build per folder, many users of the cache."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from m8d_build.errors import BuildBusy, OutputUnwritable
from m8d_build.files.disk import needs_room

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

__all__ = ["CACHE_OPTION", "LOCK_NAME", "Holder", "hold", "holder_of", "pruning", "using"]

CACHE_OPTION = "--cache or M8D_CACHE"
LOCK_NAME = ".m8d.lock"
USED_NAME = ".m8d.lock.used"
_PRUNED = 600.0  # seconds a prune may take: it removes many gigabytes
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
        raise _unlockable(folder, exc, option) from exc
    try:
        holder = Holder(os.getpid(), socket.gethostname(), what, clock())
        try:
            with needs_room(folder, f"locking it to {what}"):
                _tell(folder, holder)
        except OSError as exc:  # the lock file was there, and nothing can be added
            raise _unlockable(folder, exc, option) from exc
        yield holder
    finally:
        with suppress(OSError):  # nor removed; without the lock it says nothing
            (folder / HOLDER_NAME).unlink(missing_ok=True)
        lock.release()


def using(cache: Path) -> AbstractContextManager[None]:
    """Keep what is in the cache from being pruned for as long as the context lasts; any number of runs do.

    Raises:
        BuildBusy: a prune takes too long.
        OutputUnwritable, DiskFull: as ``hold``.
    """
    return _locked(
        cache, fcntl.LOCK_SH, wait=_PRUNED, found="is being pruned", rule="a run keeps what it uses"
    )


def pruning(cache: Path) -> AbstractContextManager[None]:
    """Keep runs from using the cache for as long as the context lasts.

    Raises:
        BuildBusy: a run uses it.
        OutputUnwritable, DiskFull: as ``hold``.
    """
    return _locked(
        cache,
        fcntl.LOCK_EX,
        wait=0.0,
        found="is in use by a build, a check or the test bed",
        rule="nothing is removed that a run may work with",
    )


@contextmanager
def _locked(cache: Path, kind: int, *, wait: float, found: str, rule: str) -> Iterator[None]:
    try:
        with needs_room(cache, "locking it"):
            cache.mkdir(parents=True, exist_ok=True)
            fd = os.open(cache / USED_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as exc:
        raise _unlockable(cache, exc, CACHE_OPTION) from exc
    try:
        until = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError as exc:
                if time.monotonic() >= until:
                    raise BuildBusy(
                        f"{cache} {found}",
                        rule=rule,
                        next_step=f"Wait for its end, or use another folder with {CACHE_OPTION}",
                    ) from exc
            except OSError as exc:  # a file system without locks
                raise _unlockable(cache, exc, CACHE_OPTION) from exc
            time.sleep(0.1)
        yield
    finally:
        os.close(fd)


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


def _unlockable(folder: Path, exc: OSError, option: str) -> OutputUnwritable:
    return OutputUnwritable(
        f"{folder} cannot be locked: {exc.strerror or exc}",
        rule="it must be a folder we may write",
        next_step=f"Name another folder with {option}, or correct its permissions",
    )


def _tell(folder: Path, holder: Holder) -> None:
    beside = folder / f"{HOLDER_NAME}.new"
    beside.write_text(json.dumps(asdict(holder)), encoding="utf-8")
    beside.replace(folder / HOLDER_NAME)
