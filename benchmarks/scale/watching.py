"""A simulated process: the real peer protocol, and around it what the watchdog's thread and executor do.

`multiworld.watchdog` and `multiworld._net.liveness.executor` need threads and sockets; what they do with the
protocol is written again here, with the CPU time that each step takes.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from multiworld._core.liveness.actions import Break, Dial, Drop, Keep, Ready, Release, Send
from multiworld._core.liveness.peers import Peers
from multiworld._core.liveness.wire import Attach, Close
from multiworld._core.membership.roster import Endpoint, Member, Roster
from multiworld._net.liveness.evidence import Answered
from multiworld._net.liveness.executor import feed
from multiworld._net.liveness.sockets import Accepted, Received

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.scale.assumptions import Costs
    from benchmarks.scale.loop import Loop
    from benchmarks.scale.network import Wires
    from multiworld._core.liveness.wire import Frame
    from multiworld._net.liveness.sockets import SocketEvent

ACCEPTS = 16
"""Connections that are accepted in a turn, as `multiworld._net.liveness.sockets` does."""
LONGEST_WAIT = 3600.0
TOKEN = b"0123456789abcdef"


def process_id(number: int) -> str:
    """The id of a process: their order is not that of ranks, as with ids that are drawn."""
    return f"{(number * 0x9E3779B97F4A7C15) % (1 << 64):016x}{number:016x}"


def members(count: int, per_host: int) -> tuple[Member, ...]:
    """The members of a world, in the order of their hosts."""
    return tuple(
        Member(
            rank,
            process_id(rank),
            Endpoint(f"10.{rank // per_host >> 8}.{rank // per_host & 255}.1", 20000 + rank % per_host),
            1000 + rank,
            f"host{rank // per_host}",
        )
        for rank in range(count)
    )


def roster(everyone: tuple[Member, ...], rank: int, hang_timeout: float) -> Roster:
    """The first generation of the world, as that member has it."""
    return Roster("w", 1, rank, everyone, TOKEN, hang_timeout)


class Cores:
    """The cores of a host.

    Args:
        count: how many; 0: enough for all.
    """

    def __init__(self, count: int) -> None:
        self._free = [0.0] * count

    def begin(self, now: float) -> float:
        """When a core is free for what begins now."""
        return max(now, min(self._free)) if self._free else now

    def take(self, until: float) -> None:
        """Use the core that is free first."""
        if self._free:
            self._free[self._free.index(min(self._free))] = until


class Process:
    """One process that watches the others.

    Args:
        loop: time.
        wires: the network.
        world: as it has it.
        host: number of its host.
        costs: of its turns.
        cores: of its host.
        clock: what its host's clock shows when the simulation begins: beats are sent when that is a multiple.
        early_close: whether it dials early-close connections.

    Attributes:
        ready: when the world was attached.
        broken: when the world broke here, and why.
        sent: frames, by their kind.
        turns: of its loop.
        busy: CPU seconds.
        looking: those of them for looks at all peers.
    """

    def __init__(
        self,
        loop: Loop,
        wires: Wires,
        world: Roster,
        host: int,
        costs: Costs,
        cores: Cores,
        *,
        clock: float = 0.0,
        early_close: bool = False,
    ) -> None:
        self.host, self.own = host, world.members[world.rank]
        self.endpoint, own = self.own.endpoint, self.own
        self.ready: float | None = None
        self.broken: tuple[float, Break] | None = None
        self.sent: dict[str, int] = {}
        self.turns = 0
        self.busy = self.looking = 0.0
        self.looks = 0
        self.kept: set[int] = set()
        counter = itertools.count()

        def nonce() -> bytes:
            return f"{own.rank:08d}{next(counter) % 10**8:08d}".encode()

        self.peers = Peers(
            own.process,
            nonce=nonce,
            channel=wires.channel,
            early_close=early_close,
        )
        self._loop, self._wires, self._costs, self._cores = loop, wires, costs, cores
        self._clock, self._world = clock, world
        self._inbox: list[SocketEvent] = []
        self._commands: list[Callable[[float], None]] = []
        self._free = 0.0
        self._before = clock
        self._timeout = LONGEST_WAIT
        self._wake = math.inf
        self._alive = True
        wires.listen(self)

    @property
    def now(self) -> float:
        """What its clock shows."""
        return self._loop.now + self._clock

    @property
    def idle(self) -> bool:
        """Whether all that came was handled."""
        return not self._inbox and self._loop.now >= self._free

    @property
    def done(self) -> tuple[int, int, float, float]:
        """So far: frames sent, turns, CPU seconds, and those of them for looks at all peers."""
        return sum(self.sent.values()), self.turns, self.busy, self.looking

    def attach(self) -> None:
        """Attach its world."""
        self._commands.append(lambda now: self.peers.add(self._world, now))
        self._turn_at(self._loop.now)

    def die(self) -> None:
        """It is killed."""
        self._alive = False
        self._wires.kill(self)

    def stop(self) -> None:
        """It is stopped: its kernel goes on."""
        self._alive = False

    def arrive(self, event: SocketEvent) -> None:
        """An event of a socket: it ends the wait."""
        self._inbox.append(event)
        self._turn_at(self._loop.now)

    # -- the loop of the watchdog's thread

    def _turn_at(self, when: float) -> None:
        when = max(when, self._free)
        if when < self._wake:
            self._wake = when
            self._loop.at(when, lambda: self._turn(when))

    def _turn(self, scheduled: float) -> None:
        if scheduled != self._wake or not self._alive:
            return  # another one was scheduled before this
        loop = self._loop
        begin = self._cores.begin(loop.now)
        if begin > loop.now:
            self._wake = begin
            loop.at(begin, lambda: self._turn(begin))
            return
        now = self.now
        self._wake = math.inf
        events = self._taken()
        waited = now - self._before
        if waited > self._timeout:
            self.peers.stalled(waited - self._timeout, now)
        self._before = now
        cost = self._costs.turn
        for event in events:
            feed(self.peers, event, now)
            cost += self._cost_of(event)
        commands, self._commands = self._commands, []
        for command in commands:
            command(now)
        probes = {process: self._wires.probe(channel) for process, channel in self.peers.suspects(now)}
        self.peers.settle(now, {process: each for process, each in probes.items() if each is not None})
        self._timeout = min(max(0.0, self.peers.wake() - now), LONGEST_WAIT)
        cost += self._run() + self._looked()
        self.turns += 1
        self.busy += cost
        self._free = loop.now + cost
        self._cores.take(self._free)
        self._turn_at(self._free if self._inbox or self._commands else self._free + self._timeout)

    def _looked(self) -> float:
        """What it has cost to look at all peers since this was asked last."""
        looks, self.looks = self.peers.looks - self.looks, self.peers.looks
        cost = self._costs.look * self.peers.connections * looks
        self.looking += cost
        return cost

    def _taken(self) -> list[SocketEvent]:
        """Take what came, without the connections, and what came on them, that the next turns accept."""
        accepted, late = 0, set[int]()
        taken: list[SocketEvent] = []
        left: list[SocketEvent] = []
        for event in self._inbox:
            channel = 0 if isinstance(event, Answered) else event.channel
            if isinstance(event, Accepted):
                accepted += 1
                if accepted > ACCEPTS:
                    late.add(channel)
            (left if channel in late else taken).append(event)
        self._inbox = left
        return taken

    def _cost_of(self, event: SocketEvent) -> float:
        costs = self._costs
        if isinstance(event, Accepted):
            return costs.connect
        hard = isinstance(event, Received) and sum(isinstance(each, Attach) for each in event.frames)
        return costs.event + hard * costs.proof

    def _run(self) -> float:
        cost, costs, wires = 0.0, self._costs, self._wires
        for action in self.peers.take():
            if isinstance(action, Send):
                cost += costs.send + (costs.proof if isinstance(action.frame, Attach) else 0.0)
                self._send(action.channel, action.frame, cost)
            elif isinstance(action, Dial):
                cost += costs.connect
                wires.dial(self, action.channel, action.endpoint)
            elif isinstance(action, Drop):
                wires.close(action.channel)
            elif isinstance(action, Keep):
                self.kept.add(action.channel)
            elif isinstance(action, Release):
                self.kept.discard(action.channel)
                self._send(action.channel, Close(), cost)
                wires.close(action.channel)
            elif isinstance(action, Ready):
                self.ready = self._loop.now
            elif isinstance(action, Break):
                self.broken = self._loop.now, action
        return cost

    def _send(self, channel: int, frame: Frame, late: float) -> None:
        kind = type(frame).__name__
        self.sent[kind] = self.sent.get(kind, 0) + 1
        self._wires.send(channel, frame, late)
