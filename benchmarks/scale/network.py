"""A simulated network of hosts: ordered connections, with latency, loss and hosts that are cut off.

A packet that is lost is sent again as TCP does it, and holds what comes after it on its connection. What TCP
does to learn of losses sooner needs traffic that signs of life are not.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from multiworld._core.liveness.detector import ConnectionEnd, Probe
from multiworld._net.liveness.sockets import Accepted, Closed, Connected, Received

if TYPE_CHECKING:
    from benchmarks.scale.assumptions import Network
    from benchmarks.scale.loop import Loop
    from multiworld._core.liveness.wire import Frame
    from multiworld._core.membership.roster import Endpoint
    from multiworld._net.liveness.sockets import SocketEvent

_GIVES_UP = 900.0
"""Seconds after which a kernel gives a connection up: longer than any simulation looks."""


class Party(Protocol):
    """A process on the network.

    Attributes:
        endpoint: where it listens.
        host: number of its host.
    """

    endpoint: Endpoint
    host: int

    def arrive(self, event: SocketEvent) -> None:
        """Something came on one of its connections."""


@dataclass
class _End:
    """One end of a connection, and what it has sent."""

    owner: Party
    far: int
    due: float = 0.0  # when the last thing that was sent is there
    acks: deque[float] = field(default_factory=deque)  # when what was sent is acknowledged
    acked: float = 0.0


class Wires:
    """The network. Connections are numbered over all processes.

    Args:
        loop: time and chance.
        about: latency, loss and so on.

    Attributes:
        about: as given; what is put there holds from then on.
        frames: how many were sent.
    """

    def __init__(self, loop: Loop, about: Network) -> None:
        self.frames = 0
        self.channel = itertools.count(1).__next__
        self._loop = loop
        self.about = about
        self._listening: dict[Endpoint, Party] = {}
        self._ends: dict[int, _End] = {}
        self._cut: dict[int, tuple[float, float]] = {}

    def listen(self, party: Party) -> None:
        """Connections to its endpoint reach it from now on."""
        self._listening[party.endpoint] = party

    def cut(self, host: int, until: float = math.inf) -> None:
        """Nothing reaches this host or comes from it any more, until that time."""
        self._cut[host] = (self._loop.now, until)

    def kill(self, party: Party) -> None:
        """Its process has died: its kernel closes its port and its connections."""
        self._listening.pop(party.endpoint, None)
        for channel in [number for number, end in self._ends.items() if end.owner is party]:
            self._loop.after(self.about.exit, lambda channel=channel: self.close(channel))  # type: ignore[misc]

    def dial(self, party: Party, channel: int, endpoint: Endpoint) -> None:
        """Connect; `Connected` or `Closed` comes after a way there and back."""
        target = self._listening.get(endpoint)
        host = party.host if target is None else target.host
        there = self._arrival(party.host, host, self._loop.now, self.about.syn)
        if target is None:
            ending = Closed(channel, ConnectionEnd.DEAD, refused=True)
            self._loop.at(there + self._way(party.host, host), lambda: party.arrive(ending))
            return
        far = self.channel()
        now = self._loop.now
        self._ends[channel], self._ends[far] = _End(party, far, acked=now), _End(target, channel, acked=now)
        self._loop.at(there, lambda: self._give(far, Accepted(far)))
        back = there + self._way(party.host, host)
        self._ends[channel].due = back
        self._loop.at(back, lambda: self._give(channel, Connected(channel)))

    def send(self, channel: int, frame: Frame, late: float = 0.0) -> None:
        """Send a frame to the other end, after what was sent before; `late` seconds from now."""
        end = self._ends.get(channel)
        other = None if end is None else self._ends.get(end.far)
        if end is None or other is None:
            return
        self.frames += 1
        start = max(self._loop.now + late, end.due - self.about.remote)  # once what was lost is there
        came = self._arrival(end.owner.host, other.owner.host, start, self.about.rto)
        end.due = max(came, end.due)
        end.acks.append(end.due + self._way(end.owner.host, other.owner.host))
        far = end.far
        self._loop.at(end.due, lambda: self._give(far, Received(far, [frame], None)))

    def close(self, channel: int) -> None:
        """Close this end: the other one sees an end of file after what was sent."""
        end = self._ends.pop(channel, None)
        other = None if end is None else self._ends.get(end.far)
        if end is None or other is None:
            return
        far, hosts = end.far, (end.owner.host, other.owner.host)
        came = max(self._arrival(*hosts, self._loop.now, self.about.rto), end.due)
        self._loop.at(came, lambda: self._end(far))

    def probe(self, channel: int) -> Probe | None:
        """What the kernel knows of the connection, as seen from this end."""
        end = self._ends.get(channel)
        if end is None:
            return None
        while end.acks and end.acks[0] <= self._loop.now:
            end.acked = end.acks.popleft()
        return Probe(bool(end.acks), self._loop.now - end.acked)

    @property
    def connections(self) -> int:
        """How many there are."""
        return len(self._ends) // 2

    def _give(self, channel: int, event: SocketEvent) -> None:
        end = self._ends.get(channel)
        if end is not None:
            end.owner.arrive(event)

    def _end(self, channel: int) -> None:
        end = self._ends.pop(channel, None)
        if end is not None:
            end.owner.arrive(Closed(channel, ConnectionEnd.LOST, refused=False, plain=True))

    def _way(self, one: int, other: int) -> float:
        jitter = self._loop.random.expovariate(1 / self.about.jitter)
        return (self.about.local if one == other else self.about.remote) + jitter

    def _arrival(self, one: int, other: int, start: float, pause: float) -> float:
        """When a packet is there that is sent at `start`, and again after `pause`, doubled each time."""
        if one == other:
            return start + self._way(one, other)
        begin = start
        while self._is_cut(one, start) or self._is_cut(other, start) or self._is_lost():
            start += pause
            pause *= 2
            if start - begin > _GIVES_UP:
                return math.inf
        return start + self._way(one, other)

    def _is_lost(self) -> bool:
        return self.about.loss > 0 and self._loop.random.random() < self.about.loss

    def _is_cut(self, host: int, when: float) -> bool:
        begin, end = self._cut.get(host, (math.inf, math.inf))
        return begin <= when < end
