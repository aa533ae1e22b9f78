"""A world's gloo group that is made when one of its members needs it, not while the world is joined.

Most worlds never need it: their messages and collectives go over the lane. The member that does asks all
others over the lane; each makes the group in a thread of its own, so that no program has to take part. Who
asks waits meanwhile, at most for the world's timeout. If the group cannot be made the world breaks.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import ProcessGroup, Store

    from multiworld._c10d.lane.exchange import Exchange

__all__ = ["LateGroup"]

_SLACK = 1.0
"""Seconds beyond its timeout that the thread that makes the group may take to say why it could not."""


class Making(Protocol):
    """A `multiworld._c10d.groups.Group`."""

    pg: ProcessGroup | None

    def make(self, exchange: Store | None = None, agree: Callable[[], None] = lambda: None) -> None:
        """Make the default group."""

    def joined(self) -> None:
        """Every member has built it."""


class LateGroup:
    """See the module.

    Args:
        group: to be made.
        exchange: makes what the members say to each other by; it is told whether this member asks.
        failed: called with the error if the group cannot be made, or is not in time: breaks the world,
            which calls `end`.
        timeout: seconds.
        permitted: raises where the group may not be made at all; the world goes on then.
    """

    def __init__(
        self,
        group: Making,
        exchange: Callable[[bool], Exchange],
        failed: Callable[[BaseException], object],
        timeout: float,
        permitted: Callable[[], None] = lambda: None,
    ) -> None:
        self._group = group
        self._permitted = permitted
        self._exchange = exchange
        self._failed = failed
        self._timeout = timeout
        self._lock = threading.Lock()
        self._maker: threading.Thread | None = None
        self._ended = False
        # It is made, or the world is over: its operations raise, whichever thread has ended it.
        self._told = threading.Event()

    def makes_here(self) -> bool:
        """Whether it is this thread that makes the group now."""
        return self._maker is threading.current_thread()

    def made(self) -> ProcessGroup | None:
        """Make the group if it is not made yet, and return it; None where the world is over.

        It is over where the group was not made in time.

        Raises:
            UnencryptedError: it may not be made.
        """
        self._permitted()
        self.begin(asking=True)
        if not self._told.wait(self._timeout + _SLACK):
            self._failed(TimeoutError(f"it was not made within {self._timeout:g} s"))
            self._told.wait(_SLACK)  # another thread may have been first, and not be ready
            return None
        return self._group.pg

    def begin(self, *, asking: bool) -> None:
        """Begin to make the group, unless that has begun, in a thread of its own.

        Args:
            asking: the other members, rather than because one of them asked.
        """
        with self._lock:
            if self._maker is not None or self._ended:
                return
            # Not of the pool: all its threads may be waiting for this group.
            self._maker = threading.Thread(target=self._make, args=(asking,), name="m8d-mesh", daemon=True)
        try:
            self._maker.start()
        except RuntimeError as error:  # the host has no thread left for this process
            self._failed(error)

    def end(self) -> None:
        """The world is over: who waits goes on, and the group is not made any more."""
        with self._lock:
            self._ended = True
        self._told.set()

    def rest(self) -> None:
        """Wait for the thread that makes the group, which ends soon after `end`."""
        maker = self._maker
        if maker is not None and maker.ident is not None:
            maker.join(self._timeout)

    def _make(self, asking: bool) -> None:
        try:
            exchange = self._exchange(asking)
            try:
                self._group.make(exchange, lambda: self._agree(exchange))
            finally:
                exchange.close()
            self._told.set()
        except BaseException as error:  # the world breaks with it, and tells by `end`
            self._failed(error)

    def _agree(self, exchange: Exchange) -> None:
        exchange.say_built()
        exchange.await_built(self._timeout)
        self._group.joined()
