"""Far members: of a large world, those of which only their connections to a few real processes are there.

In a world of 10,000 there are fifty million connections. Some of its processes run the whole protocol; each
of the others is a `FarMember`, which has the real handshake and sends beats as it is asked, and nothing
else: it watches no member, and is told what to say when the world breaks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from multiworld._core.liveness.connection import PeerConnection
from multiworld._core.liveness.wire import Attach, Attached, Beat, Broken, Hello, Need
from multiworld._net.liveness.sockets import Accepted, Connected, Received

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.scale.loop import Loop
    from benchmarks.scale.network import Wires
    from multiworld._core.liveness.wire import Frame
    from multiworld._core.membership.roster import Member, Roster
    from multiworld._net.liveness.sockets import SocketEvent


@dataclass
class _Link:
    """A connection to a real process."""

    connection: PeerConnection
    beats: bool = False


class FarMember:
    """See the module.

    Args:
        loop: time.
        wires: the network.
        world: as this member has it.
        host: number of its host.
        clock: what its host's clock shows when the simulation begins.
    """

    def __init__(self, loop: Loop, wires: Wires, world: Roster, host: int, *, clock: float) -> None:
        self.world, self.host = world, host
        self.own = world.members[world.rank]
        self.endpoint = self.own.endpoint
        self._loop, self._wires = loop, wires
        self._interval = min(max(world.hang_timeout / 5, 0.02), 1.0)
        self._clock = clock
        self._links: dict[int, _Link] = {}
        self._numbers = itertools.count()
        self._alive = True
        self._beating = False
        wires.listen(self)

    def dial(self, near: Iterable[Member]) -> None:
        """Connect to real processes, where this one's id is the smaller one."""
        for peer in near:
            if self.own.process < peer.process:
                channel = self._wires.channel()
                self._links[channel] = _Link(self._connection(channel, peer.process))
                self._wires.dial(self, channel, peer.endpoint)

    def die(self) -> None:
        """It is killed."""
        self._alive = False
        self._wires.kill(self)

    def stop(self) -> None:
        """It is stopped: its kernel goes on."""
        self._alive = False

    def tell(self, frame: Broken) -> None:
        """Tell the real processes that the world is broken, as a member does that knows."""
        if self._alive:
            for channel in self._links:
                self._wires.send(channel, frame)

    def arrive(self, event: SocketEvent) -> None:
        """An event of a socket."""
        if not self._alive:
            return
        if isinstance(event, Accepted):
            self._links[event.channel] = _Link(self._connection(event.channel, ""))
        elif isinstance(event, Connected):
            self._wires.send(event.channel, self._links[event.channel].connection.hello())
        elif isinstance(event, Received):
            for frame in event.frames:
                self._take(event.channel, frame)

    def _connection(self, channel: int, peer: str) -> PeerConnection:
        nonce = f"{self.own.rank:08d}{next(self._numbers):08d}".encode()
        return PeerConnection(
            channel, self.own.process, nonce, dialed=bool(peer), since=self._loop.now, peer=peer
        )

    def _take(self, channel: int, frame: Frame) -> None:
        link = self._links[channel]
        connection, place = link.connection, (self.world.key, self.world.rank)
        if isinstance(frame, Hello) and connection.greet(frame):
            reply: Frame = connection.hello()
            if connection.dialed:
                reply = connection.offer(self.world.token, place)
            self._wires.send(channel, reply)
        elif isinstance(frame, Attach) and not connection.knocking:
            their = (frame.key, frame.rank)
            if not connection.holds(self.world.token, their, frame.proof):
                raise RuntimeError(f"rank {frame.rank} does not prove that it is a member")
            if not connection.dialed:
                self._wires.send(channel, connection.offer(self.world.token, place))
            self._wires.send(channel, Need(self._interval))
            self._wires.send(channel, Attached(*their))
        elif isinstance(frame, Need):
            link.beats = True
            if not self._beating:
                self._beating = True
                self._beat()

    def _beat(self) -> None:
        if not self._alive:
            return
        for channel, link in self._links.items():
            if link.beats:
                self._wires.send(channel, Beat(0))
        shown = self._loop.now + self._clock
        self._loop.after((shown // self._interval + 1) * self._interval - shown, self._beat)
