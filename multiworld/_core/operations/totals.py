"""Totals of a member since its generation began: sent, received, reduced; numbers that only rise.

A send costs 60 ns more for them. They are added to without a lock: CPython 3.10 to 3.13 changes threads at
calls and at the ends of loops, so ``numbers[peer] += size`` of a list and an int is never cut in two. A
build without the GIL may lose some.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

from multiworld._core.lane.operations import Receive, Send

__all__ = ["Sums", "Totals"]

_SETTLED_FROM = 64
"""Posted messages that are kept until it is looked which of them are over."""


@dataclass(frozen=True)
class Sums:
    """Totals, without the peers; sums of sums are sums.

    Attributes:
        operations: how many of each kind went well; "send" and "recv" are those of messages.
        sent, received: bytes of messages.
        collective_bytes: by kind; of each the bytes that the log has: of one member's tensor.
    """

    operations: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    received: int = 0
    collective_bytes: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.operations + other.operations,
            self.sent + other.sent,
            self.received + other.received,
            self.collective_bytes + other.collective_bytes,
        )


class Totals:
    """Those of one generation. What failed does not count, nor what the transfer of a state sends.

    Args:
        size: of the world.

    Attributes:
        sent, sent_bytes: messages and their bytes by rank of the other member.
        received, received_bytes: the same. The last place of all four is for messages whose other end is not
            known: torch carries them.
        collectives, collective_bytes: by kind.
    """

    __slots__ = (
        "__weakref__", "_posted", "_settle_at", "collective_bytes", "collectives", "received",
        "received_bytes", "sent", "sent_bytes",
    )  # fmt: skip

    def __init__(self, size: int) -> None:
        self.sent = [0] * (size + 1)
        self.sent_bytes = [0] * (size + 1)
        self.received = [0] * (size + 1)
        self.received_bytes = [0] * (size + 1)
        # Not Counters, which call Python where a kind is new.
        self.collectives: defaultdict[str, int] = defaultdict(int)
        self.collective_bytes: defaultdict[str, int] = defaultdict(int)
        self._posted: deque[Send | Receive] = deque()
        self._settle_at = _SETTLED_FROM

    def message(self, kind: str, peer: int | None, size: int) -> None:
        """A message is over; `kind` is "send" or "recv", `peer` None where it is not known."""
        at = -1 if peer is None else peer
        if kind == "send":
            self.sent[at] += 1
            self.sent_bytes[at] += size
        else:
            self.received[at] += 1
            self.received_bytes[at] += size

    def collective(self, kind: str, size: int) -> None:
        """A collective is over."""
        self.collectives[kind] += 1
        self.collective_bytes[kind] += size

    def posted(self, operation: Send | Receive) -> None:
        """A message was posted: it counts when it is over. One that is never waited for does, too."""
        if operation.done:
            self._over(operation)
            return
        posted = self._posted
        posted.append(operation)
        if len(posted) >= self._settle_at:
            self.settle()
            self._settle_at = max(_SETTLED_FROM, 2 * len(self._posted))

    def settle(self) -> None:
        """Count the posted messages that are over."""
        posted = self._posted
        with contextlib.suppress(IndexError):  # another thread settles, too: each takes others
            for _ in range(len(posted)):
                operation = posted.popleft()
                if operation.done:
                    self._over(operation)
                else:
                    posted.append(operation)

    def close(self) -> None:
        """The generation is over: what is still under way fails by that, and is not held."""
        self.settle()
        self._posted = deque(maxlen=0)

    def sums(self) -> Sums:
        """Return what was done up to now."""
        self.settle()
        # Copies of one call each: other threads go on.
        operations, sizes = Counter(self.collectives.copy()), Counter(self.collective_bytes.copy())
        for kind, numbers in (("send", self.sent), ("recv", self.received)):
            if count := sum(numbers):
                operations[kind] = count
        return Sums(operations, sum(self.sent_bytes), sum(self.received_bytes), +sizes)

    def _over(self, operation: Send | Receive) -> None:
        if operation.error is not None:
            return
        size = len(operation.view)
        if isinstance(operation, Send):
            self.message("send", operation.peer, size)
        elif operation.sender is not None:  # else it was taken back
            self.message("recv", operation.sender, size)
