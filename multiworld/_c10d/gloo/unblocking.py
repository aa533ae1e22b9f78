"""Unblock operations of a gloo group that gloo forgot when its connections failed.

When a connection fails, gloo (``Pair::signalException`` in transport/tcp/pair.cc) tells the buffers that wait
for their turn on it. It forgets two: the one that is being written or stands in the queue of writes
(``tx_``), and the one that is being read into (``rx_``). A write that the kernel refuses (EPIPE, ECONNRESET)
enters that queue just before the connection fails, so a message of any size can be forgotten; a large one
that is half sent always is. Its operation then ends at its timeout only. A receive from any source belongs to
no connection, so no connection's end reaches it either.

After a group was shut down, and as soon as gloo has closed the group's sockets (from then on they write into
no tensor), each such buffer is told what gloo should have told it (`cxx.tell`). A send's or a receive's
buffer is found in its work. A collective's buffer is the one that a worker thread of the group waits in: the
kernel says at which address a thread waits (``/proc/self/task/ID/syscall``).
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from multiworld._c10d.gloo import cxx, sockets
from multiworld._c10d.nccl import inflight
from multiworld._c10d.waiter_pool import ending
from multiworld._net import procfs
from multiworld.logs.source import logger

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["GroupThread", "Posted", "Target", "threads", "unblock", "workers_of"]

LIMIT = 10.0
"""Seconds for which a group that was shut down is looked after; what then still runs ends at its timeout."""

FIRST_PAUSE = 0.0005
"""Seconds between two looks at first; each pause is half as long again."""

LONGEST_PAUSE = 0.01
"""Seconds between two looks, so an operation ends this much, and a thread's turn, after gloo has closed the
sockets."""

_GROUP = 1024
"""Bytes of a ProcessGroupGloo in which an idle worker's condition lies: 344 in torch 2.4, 400 in 2.13, 432 in
2.15."""

_CONDITIONS = range(72, 192, 4)
"""Bytes from the beginning of a gloo buffer to where waiting threads sleep: behind the table, pointer, size,
context and mutex come the two condition variables (gloo's transport/tcp/unbound_buffer.h; x86-64: 80 to 176,
arm64: 88 to 184)."""

_SETTLING = 1.0
"""Seconds for the threads of a group that was just made to come to rest; 0.2 ms on a machine that has time
for them."""

_MANY = 512
"""Works after which those that are gone are taken out of the books."""

_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})

_TASKS = Path("/proc/self/task")
_log = logger(__name__)


class GroupThread(NamedTuple):
    """A thread of a group; the kernel gives numbers of threads again, but not at the same time.

    Attributes:
        thread: its number.
        began: when it was started, as the kernel writes it.
    """

    thread: int
    began: str


class Target(NamedTuple):
    """One group that was shut down.

    Attributes:
        links: its sockets.
        workers: its threads.
        address: of its C++ object; 0 where that is not known.
    """

    links: tuple[sockets.TcpSocket, ...]
    workers: tuple[GroupThread, ...]
    address: int


class Posted:
    """The sends and receives of a world that may not have ended yet; it keeps none of them."""

    def __init__(self) -> None:
        # By id: that of a work that is gone is soon another one's, so this stays small. It stays this one
        # dictionary, whose methods are atomic: several threads post.
        self._works: dict[int, weakref.ref[object]] = {}
        self._many = _MANY

    def add(self, work: object) -> None:
        """Remember a work."""
        works = self._works
        works[id(work)] = weakref.ref(work)
        if len(works) > self._many:
            # Not its items: for each of them a tuple is made, which may begin a collection, and other threads go on.
            for key in list(works):
                ref = works.get(key)
                if ref is None or ref() is not None:
                    continue
                if (taken := works.pop(key, None)) is not None and taken() is not None:
                    works[key] = taken  # of a work that got the same id just now
            self._many = max(_MANY, 2 * len(works))

    def take(self) -> list[object]:
        """Return those that still exist, once."""
        works, found = self._works, list[object]()
        with contextlib.suppress(KeyError):  # it is empty
            while True:
                _, ref = works.popitem()
                if (work := ref()) is not None:
                    found.append(work)
        return found


def threads() -> frozenset[int]:
    """Return the numbers of this process's threads."""
    try:
        return frozenset(map(int, procfs.names(_TASKS)))
    except OSError:
        return frozenset()


def workers_of(backend: object, before: frozenset[int], count: int) -> tuple[tuple[GroupThread, ...], int]:
    """Find the threads of a ProcessGroupGloo that was just made.

    Args:
        backend: as torch returned it.
        before: `threads` from before it was made.
        count: how many it has.

    Returns:
        Its threads, and the address of its C++ object; none and 0 where the build or the system does not
        tell.
    """
    address = cxx.address_of(backend)
    if not (cxx.usable() and _tells_where() and _is_group(address)):
        _warn()
        return (), 0
    end = time.monotonic() + _SETTLING
    while True:
        found = [each for each in threads() - before if _rests(each, address)]
        if len(found) >= count or time.monotonic() > end:
            return tuple(GroupThread(each, _began(each)) for each in found), address
        time.sleep(FIRST_PAUSE / 5)


def _is_group(address: int) -> bool:
    try:
        with contextlib.closing(cxx.Memory()) as memory:
            return memory.is_a(address, cxx.GROUP)
    except OSError:  # it was allowed before this process went on as another user
        return False


def unblock(targets: Iterable[Target], posted: Posted) -> None:
    """Tell what gloo forgets about groups that were shut down, in a thread of a pool; returns at once.

    Args:
        targets: the groups.
        posted: of their world.
    """
    if not cxx.usable():
        return
    groups, deadline = tuple(targets), time.monotonic() + LIMIT
    try:
        ending.run(lambda: _until_quiet(groups, posted, deadline))
    except RuntimeError:  # the host has no thread left for this process
        _log.warning("no thread to end operations that gloo has forgotten: they end at their timeout")


def _until_quiet(groups: tuple[Target, ...], posted: Posted, deadline: float) -> None:
    pause, failed = FIRST_PAUSE, None
    while time.monotonic() < deadline:
        if not any(sockets.still_open(each.links) for each in groups):
            try:
                _tell_posted(posted)
                working, failed = [_tell_workers(each) for each in groups], None
                if not any(working):
                    return
            except OSError as error:
                failed = error
                if error.errno not in _NO_DESCRIPTOR:  # nor will there be any
                    break
        time.sleep(pause)
        pause = min(LONGEST_PAUSE, pause * 1.5)
    if failed is not None:
        _log.warning("operations that gloo has forgotten end at their timeout: %s", failed)


def _tell_posted(posted: Posted) -> None:
    with contextlib.closing(cxx.Memory()) as memory:
        for work in posted.take():
            if buffer := cxx.buffer_at(memory, work):
                cxx.tell(buffer, inflight.ABORTED)


def _tell_workers(group: Target) -> bool:
    """Tell the buffers that the group's threads wait in; whether any of the threads has not come to rest.

    Only one descriptor is open at a time: there may be no more than those that gloo has just closed.

    Raises:
        OSError: there is none.
    """
    working = False
    for worker in group.workers:
        if _start_of(worker.thread) != worker.began or _rests(worker.thread, group.address):
            continue
        working = True
        waits = _waits_at(worker.thread)
        if waits and (buffer := _buffer_around(waits)) and _waits_at(worker.thread) == waits:
            cxx.tell(buffer, inflight.ABORTED)
    return working


def _buffer_around(address: int) -> int:
    """Return the gloo buffer one of whose condition variables is at `address`; 0 if there is none."""
    with contextlib.closing(cxx.Memory()) as memory:
        for distance in _CONDITIONS:
            if (address - distance) % 8 == 0 and memory.is_a(address - distance, cxx.BUFFER):
                return address - distance
    return 0


def _rests(thread: int, group: int) -> bool:
    """Whether a thread waits for work in the group at the address `group`."""
    return 0 <= _waits_at(thread) - group < _GROUP


def _tells_where() -> bool:
    """Whether this system tells where a thread sleeps; sandboxes may not."""
    try:
        (_TASKS / str(threading.get_native_id()) / "syscall").read_text()
    except OSError as error:
        return error.errno in _NO_DESCRIPTOR  # for a moment
    return True


def _waits_at(thread: int) -> int:
    """Return the first argument of the system call that a thread is in: where it sleeps; 0 if it runs."""
    try:
        words = (_TASKS / str(thread) / "syscall").read_text().split()
        return int(words[1], 16) if len(words) > 1 else 0
    except (OSError, ValueError):
        return 0


def _began(thread: int) -> str:
    try:
        return _start_of(thread)
    except OSError:
        return ""


def _start_of(thread: int) -> str:
    """Return when a thread began; "" where it is over.

    Raises:
        OSError: no descriptor is free to read that.
    """
    try:
        # The name of a thread, in brackets, may hold anything.
        return (_TASKS / str(thread) / "stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    except IndexError:
        return ""
    except OSError as error:
        if error.errno in _NO_DESCRIPTOR:
            raise
        return ""


_warned = threading.Event()


def _warn() -> None:
    if not _warned.is_set():
        _warned.set()
        _log.warning(
            "this build of torch, or this system, does not show gloo's buffers: an operation that gloo forgets when its "
            "world breaks ends at its timeout (docs/faults.md)"
        )
