"""Coalesced operations (`batch_isend_irecv`, torch's coalescing manager): their NCCL group is always closed.

Between ``_start_coalescing`` and ``_end_coalescing`` a group of NCCL is open in the calling thread. Torch
does not close it where an exception comes between the two, or where the world is over when the end comes: the
next operation of a healthy world in that thread would go into it, and do nothing. So it is known what a
thread has open, and it is closed when an operation in it fails, when an exception leaves torch's coalescing
manager, when the method or the `with` block it was opened in ends, when its world is closed in that thread,
and at its next operation when its world is over.

Closing it posts what is in it. After an error that is a part of what the peers expect, who would take the
next messages for the rest: the world breaks.

NCCL runs over all communicators of a group when it is closed. So while operations are in an open group their
communicator is not aborted, for as long as an operation may take. That delays only waits for the GPU in the
same thread.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from multiworld._c10d.nccl.inflight import Traffic

__all__ = ["PARTLY", "Coalescing", "beside", "close_left", "depths", "of", "start"]

PARTLY = "multiworld: a part of the operations put together was posted"
"""Error text of a world whose batch was cut off; known to `multiworld._c10d.fault_classification`."""

_here = threading.local()  # .open: by id of the process group, what this thread has open


class Coalescing:
    """Operations that one thread coalesces in one process group.

    Args:
        group: the process group.
        traffic: of its world.
        pending: torch's own list of coalesced operations, by process group: of the world's state.
        end: closes it; called with no argument, plain torch.

    Attributes:
        group, traffic: as given.
        depth: how often it was started and not ended; torch allows more than once.
        blocks: of the world's `with` blocks that this thread was in.
        taken: operations in it: to close it posts them.
    """

    def __init__(self, group: Any, traffic: Traffic, pending: dict[Any, Any], end: Callable[[], Any]) -> None:
        self.group = group
        self.traffic = traffic
        self.depth = 1
        self.blocks = traffic.blocks()
        self.taken = 0
        self._pending = pending
        self._end = end
        self._thread = threading.current_thread()
        self._queued = self._calling = False

    def __enter__(self) -> None:
        """Add an operation."""
        self._queued = self._calling = True

    def __exit__(self, kind: object, *exc: object) -> None:
        self._calling = False
        self.taken += kind is None

    @property
    def queued(self) -> bool:
        """Whether NCCL may have operations in it that its thread may still run by closing it."""
        return self._queued and not self._calling and self._thread.is_alive()

    def ended(self) -> bool:
        """Count one end by torch; return whether it was the last."""
        self.depth -= 1
        if self.depth:
            return False
        self.forget()
        return True

    def forget(self) -> None:
        """Mark it as closed."""
        opened = _open()
        if opened.get(id(self.group)) is self:
            del opened[id(self.group)]
            self.traffic.closed(self)

    def close(self) -> None:
        """Close it, as often as it was started; its operations run, and end with their communicator."""
        self._calling = True
        depth, self.depth = self.depth, 0
        try:
            for _ in range(depth):
                # An operation in it has failed, which closed it, or now does.
                with contextlib.suppress(Exception):
                    self._end()
        finally:
            self._pending.pop(self.group, None)  # torch would put the next operations to it, and not run them
            self.forget()


def _open() -> dict[int, Coalescing]:
    found: dict[int, Coalescing] | None = getattr(_here, "open", None)
    if found is None:
        found = _here.open = {}
    return found


def of(group: Any) -> Coalescing | None:
    """Return this thread's open group of a process group; None without one."""
    return _open().get(id(group))


def depths() -> dict[Coalescing, int]:
    """Return what this thread has open, of any group, and how often each was started."""
    return {each: each.depth for each in _open().values()}


def beside(group: Any) -> Coalescing | None:
    """Return what this thread has open of another process group, where NCCL would put an operation, too.

    What it has open of worlds that are over is closed.
    """
    for each in [each for each in _open().values() if each.group is not group]:
        if not each.traffic.over.is_set():
            return each
        each.close()
    return None


@contextlib.contextmanager
def start(group: Any, traffic: Traffic, pending: dict[Any, Any], end: Callable[[], Any]) -> Iterator[None]:
    """Context in which torch starts to coalesce operations; see `Coalescing` for the arguments.

    Raises:
        torch.distributed.DistBackendError: the world is over.
    """
    found = of(group)
    if found is not None:
        try:
            with traffic.call():
                yield
        except BaseException:
            found.close()
            raise
        found.depth += 1
        return
    fresh = Coalescing(group, traffic, pending, end)
    traffic.opened(fresh)
    _open()[id(group)] = fresh
    try:
        yield
    except BaseException:
        fresh.forget()
        raise


def close_left(traffic: Traffic, blocks: int = -1) -> list[Any]:
    """Close the groups of a world that this thread has left open.

    Args:
        traffic: of the world.
        blocks: of the world's `with` blocks that the thread is in; what was opened in no deeper one stays
            open.

    Returns:
        The process groups.
    """
    left = [each for each in _open().values() if each.traffic is traffic and each.blocks > blocks]
    for each in left:
        each.close()
    return [each.group for each in left]
