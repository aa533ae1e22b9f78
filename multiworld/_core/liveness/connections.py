"""The connections of one process: by channel, by trusted peer, and when each is due."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from multiworld._core.liveness.connection import PeerConnection
from multiworld._core.liveness.earliest import Earliest

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FASTEST_BEAT", "MAX_UNAUTHENTICATED", "SLOWEST_BEAT", "Connections"]

MAX_UNAUTHENTICATED = 256
"""Unauthenticated connections at a time, at most; a new one replaces the oldest."""

SLOWEST_BEAT = 1.0
FASTEST_BEAT = 0.02
"""Bounds of the interval between two heartbeats, seconds."""


class Connections:
    """Table of connections, without early-close connections.

    Args:
        own: this process's id.
        nonce: gives 16 fresh random bytes.
        channel: gives a fresh number for a connection.
        unauthenticated: bound on accepted connections that wait for their proof.

    Attributes:
        by_channel: all of them.
        trusted: the authenticated ones, by the peer's process.
        beats_due: when the next sign of life is.
    """

    def __init__(
        self, own: str, *, nonce: Callable[[], bytes], channel: Callable[[], int], unauthenticated: int
    ) -> None:
        self.by_channel: dict[int, PeerConnection] = {}
        self.trusted: dict[str, PeerConnection] = {}
        self._own = own
        self._nonce = nonce
        self._channel = channel
        self._max_unauthenticated = unauthenticated
        self._unauthenticated: dict[int, PeerConnection] = {}  # oldest first
        self.beats_due = Earliest(
            lambda: min((each.beat_at for each in self.trusted.values()), default=math.inf)
        )

    def __len__(self) -> int:
        return len(self.by_channel)

    def get(self, channel: int) -> PeerConnection | None:
        """Return a connection; None for an unknown channel."""
        return self.by_channel.get(channel)

    def everyone(self) -> tuple[PeerConnection, ...]:
        """Return all connections; they may be removed while the caller iterates."""
        return tuple(self.by_channel.values())

    def to(self, process: str) -> list[PeerConnection]:
        """Return the connections to a process, unauthenticated ones too."""
        return [each for each in self.by_channel.values() if each.peer == process]

    def surplus(self) -> PeerConnection | None:
        """Return the accepted connection to drop before another is accepted; None below the bound."""
        accepted = [each for each in self._unauthenticated.values() if not each.dialed]
        return accepted[0] if len(accepted) >= self._max_unauthenticated else None

    def accept(self, channel: int, now: float) -> None:
        """Add a connection that a peer dialed."""
        self._add(PeerConnection(channel, self._own, self._nonce(), dialed=False, since=now))

    def dial(self, process: str, now: float) -> PeerConnection:
        """Add and return a connection that this process dials."""
        connection = PeerConnection(
            self._channel(), self._own, self._nonce(), dialed=True, since=now, peer=process, established=False
        )
        connection.knocking = self._own > process
        self._add(connection)
        return connection

    def trust(self, connection: PeerConnection) -> None:
        """Mark a connection as authenticated. The caller has removed the previous one to the same process."""
        connection.trusted = True
        del self._unauthenticated[connection.channel]
        self.trusted[connection.peer] = connection
        self.beats_due.by(connection.beat_at)

    def beat_by(self, connection: PeerConnection, time: float) -> None:
        """Have the next sign of life on a trusted connection due at `time`, if not sooner."""
        connection.beat_at = min(connection.beat_at, time)
        self.beats_due.by(connection.beat_at)

    def remove(self, connection: PeerConnection) -> bool:
        """Remove a connection; return whether it was the trusted one of its process."""
        del self.by_channel[connection.channel]
        self._unauthenticated.pop(connection.channel, None)
        if self.trusted.get(connection.peer) is not connection:
            return False
        del self.trusted[connection.peer]
        return True

    def expired(self, now: float) -> list[PeerConnection]:
        """Return the connections whose handshake took too long."""
        return [each for each in self._unauthenticated.values() if each.since + each.patience <= now]

    def due(self, now: float) -> list[tuple[PeerConnection, int]]:
        """Return the connections that owe a heartbeat, each with its number, and schedule the next ones."""
        if not self.beats_due.passed(now):
            return []
        due = []
        for each in self.trusted.values():
            if each.beat_at <= now:
                due.append((each, each.beats))
                each.beats += 1
                # On a grid: connections with the same interval beat together, one wake-up for all.
                each.beat_at = (now // each.interval + 1) * each.interval
                if each.beat_at <= now:  # the division was rounded down to this very moment
                    each.beat_at = now + each.interval
        self.beats_due.changed()
        return due

    def wake(self) -> float:
        """Return when `expired` or `due` is not empty next; infinite for never."""
        return min(
            min((each.since + each.patience for each in self._unauthenticated.values()), default=math.inf),
            self.beats_due.time,
        )

    def _add(self, connection: PeerConnection) -> None:
        self.by_channel[connection.channel] = self._unauthenticated[connection.channel] = connection
