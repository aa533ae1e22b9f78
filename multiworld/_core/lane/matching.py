"""Matching of receives and messages by source, channel and tag, as MPI's rules say.

- Messages of one source, channel and tag are taken in the order in which they were sent.
- A message goes to the receive that was posted first of all that fit it.
- A receive of any source takes sources in turns: of those with a message, the one that such a receive of that
  channel and tag took longest ago.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from multiworld._core.lane.operations import Arrival, Receive

__all__ = ["Matching"]

_TURNS = 1024  # channels and tags of which the turns are known: those that were in use last


class Matching:
    """The receives without a message, and the messages without a receive, of one lane."""

    def __init__(self) -> None:
        self._receives: dict[tuple[int, int], dict[int | None, deque[Receive]]] = {}
        self._arrivals: dict[tuple[int, int], dict[int, deque[Arrival]]] = {}
        # When a receive of any source took each source: a number that grows.
        self._served: OrderedDict[tuple[int, int], dict[int, int]] = OrderedDict()
        self._number = 0

    def post(self, receive: Receive) -> Arrival | None:
        """Return the message for `receive`, which it then has; None: the receive waits."""
        key = receive.channel, receive.tag
        sources = self._arrivals.get(key)
        if sources is not None:
            source = self._next(key, sources) if receive.source is None else receive.source
            queue = sources.get(source)
            if queue is not None:
                arrival = queue.popleft()
                if not queue:
                    del sources[source]
                    if not sources:
                        del self._arrivals[key]
                if receive.source is None:
                    self._serve(key, source)
                return arrival
        self._receives.setdefault(key, {}).setdefault(receive.source, deque()).append(receive)
        return None

    def arrive(self, arrival: Arrival) -> Receive | None:
        """Return the receive for `arrival`, which it then has; None: the message waits."""
        key = arrival.channel, arrival.tag
        posted = self._receives.get(key)
        if posted is not None:
            waiting = min(
                (queue for source in (arrival.peer, None) if (queue := posted.get(source))),
                key=lambda queue: queue[0].order,
                default=None,
            )
            if waiting is not None:
                receive = waiting.popleft()
                self._tidy(key, receive.source)
                if receive.source is None:
                    self._serve(key, arrival.peer)
                return receive
        sources = self._arrivals.setdefault(key, {})
        came = sources.setdefault(arrival.peer, deque())
        # Behind all that were sent before: one whose receive was cancelled comes back out of turn.
        at = len(came)
        while at and came[at - 1].order > arrival.order:
            at -= 1
        came.insert(at, arrival)
        return None

    def cancel(self, receive: Receive) -> bool:
        """Take a waiting receive back; False if it does not wait here."""
        key = receive.channel, receive.tag
        waiting = self._receives.get(key, {}).get(receive.source)
        if waiting is None or receive not in waiting:
            return False
        waiting.remove(receive)
        self._tidy(key, receive.source)
        return True

    def drop(self, channel: int) -> list[Arrival]:
        """Forget the messages of a channel; return them."""
        dropped: list[Arrival] = []
        for key in [key for key in self._arrivals if key[0] == channel]:
            for waiting in self._arrivals.pop(key).values():
                dropped += waiting
        for key in [key for key in self._served if key[0] == channel]:
            del self._served[key]
        return dropped

    def has_come(self, channel: int) -> bool:
        """Whether a message of a channel waits for a receive."""
        return any(key[0] == channel for key in self._arrivals)

    def waiting_for(self, peer: int) -> Iterator[Receive]:
        """Yield the receives that a message of `peer` could go to."""
        for posted in self._receives.values():
            for source in (peer, None):
                yield from posted.get(source, ())

    def clear(self) -> list[Receive]:
        """Forget all; return the receives that waited."""
        left = [each for posted in self._receives.values() for waiting in posted.values() for each in waiting]
        self._receives.clear()
        self._arrivals.clear()
        self._served.clear()
        return left

    @property
    def empty(self) -> bool:
        """Whether no receive and no message waits."""
        return not self._receives and not self._arrivals

    @property
    def arrivals(self) -> int:
        """Number of messages without a receive."""
        return sum(len(waiting) for sources in self._arrivals.values() for waiting in sources.values())

    def _next(self, key: tuple[int, int], sources: Iterable[int]) -> int:
        served = self._served.get(key, {})
        return min(sources, key=lambda source: served.get(source, 0))

    def _serve(self, key: tuple[int, int], source: int) -> None:
        self._number += 1
        self._served.setdefault(key, {})[source] = self._number
        self._served.move_to_end(key)
        if len(self._served) > _TURNS:
            self._served.popitem(last=False)

    def _tidy(self, key: tuple[int, int], source: int | None) -> None:
        posted = self._receives[key]
        if not posted[source]:
            del posted[source]
            if not posted:
                del self._receives[key]
