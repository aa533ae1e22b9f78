"""A world of so many members in the simulation: joined, watched, and hit by a fault."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.scale.assumptions import Costs, Network
from benchmarks.scale.far import FarMember
from benchmarks.scale.loop import Loop
from benchmarks.scale.network import Wires
from benchmarks.scale.watching import Cores, Process, members, roster
from multiworld._core.liveness.wire import Broken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiworld.events import Cause

_TOGETHER = 5e-3
"""Seconds within which the members begin to connect."""
_UNTIL = 600.0
_SETTLED = 2.0
"""Seconds after the last verdict: a process that has not handled all by then is busy for good."""


@dataclass(frozen=True)
class Steady:
    """What one process does in a second while nothing happens.

    Attributes:
        connections: that it has, without early-close connections.
        sent: frames.
        turns: of the watchdog's loop.
        cpu: of the watchdog's thread, share of a core.
        looking: of that, for looks at all peers.
    """

    connections: float
    sent: float
    turns: float
    cpu: float
    looking: float


@dataclass(frozen=True)
class Fault:
    """What came of a fault.

    Attributes:
        took: seconds from the fault until each real process had the verdict.
        causes: of the verdicts.
        told: frames with its verdict that one process sent, at most.
        settled: seconds from the fault until all that was sent about it was handled; infinite for processes
            that are busy for good.
    """

    took: tuple[float, ...]
    causes: tuple[Cause, ...]
    told: int
    settled: float


@dataclass
class Mesh:
    """A world.

    Args:
        size: how many members.
        real: how many of them run the whole protocol; the others are far members.
        seed: of chance.
        network, costs: assumptions.
        hang_timeout: of all members, seconds.
        early_close: whether they dial early-close connections.
    """

    size: int
    real: int = 0
    seed: int = 1
    network: Network = field(default_factory=Network)
    costs: Costs = field(default_factory=Costs)
    hang_timeout: float = 5.0
    early_close: bool = False

    def __post_init__(self) -> None:
        loop = self.loop = Loop(self.seed)
        self.wires = Wires(loop, self.network)
        per_host = self.network.per_host
        everyone = members(self.size, per_host)
        self.world = roster(everyone, 0, self.hang_timeout).key
        real = min(self.real or self.size, self.size)
        # Spread over the ranks, and so over the hosts.
        chosen = {number * self.size // real for number in range(real)} if real > 1 else {self.size // 2}
        clocks = [loop.random.uniform(1e3, 1e6) for _ in range((self.size - 1) // per_host + 1)]
        cores = [Cores(self.costs.cores) for _ in clocks]
        self.processes: list[Process] = []
        self.far: list[FarMember] = []
        for rank in range(self.size):
            host, world = rank // per_host, roster(everyone, rank, self.hang_timeout)
            clock = clocks[host]
            if rank in chosen:
                self.processes.append(
                    Process(
                        loop, self.wires, world, host, self.costs, cores[host],
                        clock=clock, early_close=self.early_close,
                    )
                )  # fmt: skip
            else:
                self.far.append(FarMember(loop, self.wires, world, host, clock=clock))
        for process in self.processes:
            loop.at(loop.random.uniform(0, _TOGETHER), process.attach)
        for each in self.far:
            loop.at(
                loop.random.uniform(0, _TOGETHER), partial(each.dial, [near.own for near in self.processes])
            )

    def join(self) -> float:
        """Let all connect; the seconds until the last real process was attached.

        Raises:
            RuntimeError: they do not come together.
        """
        self.loop.run(_UNTIL, lambda: all(each.ready is not None for each in self.processes))
        if any(each.ready is None for each in self.processes):
            raise RuntimeError(f"{self.size} members did not connect within {_UNTIL:g} s")
        return max(each.ready or 0.0 for each in self.processes)

    def steady(self, seconds: float) -> Steady:
        """Let so much time pass; what the real processes did in it, on average.

        Raises:
            RuntimeError: the world broke.
        """
        self.loop.run(self.loop.now + 1.5)  # the first beats are over
        before = [each.done for each in self.processes]
        self.loop.run(self.loop.now + seconds)
        after = [each.done for each in self.processes]
        if broken := [each.broken for each in self.processes if each.broken is not None]:
            raise RuntimeError(f"a world of {self.size} broke: {broken[0][1].breakage.detail}")
        count = len(self.processes)
        sent, turns, busy, looking = (
            sum(late[at] - early[at] for early, late in zip(before, after, strict=True)) / count / seconds
            for at in range(4)
        )
        connections = sum(each.peers.connections for each in self.processes) / count
        return Steady(connections, sent, turns, busy, looking)

    def breaks(self, seconds: float) -> bool:
        """Let so much time pass, at most until a real process has a verdict; whether one has."""
        self.loop.run(
            self.loop.now + seconds, lambda: any(each.broken is not None for each in self.processes)
        )
        return any(each.broken is not None for each in self.processes)

    def kill(self) -> Fault:
        """Kill a member: the one in the middle that is not watched, or any."""
        victim, rest = self._victim()
        victim.die()
        return self._after(rest, [victim])

    def stop(self) -> Fault:
        """Stop a member: its host answers, it does not."""
        victim, rest = self._victim()
        victim.stop()
        return self._after(rest, [victim])

    def lose_host(self) -> Fault:
        """Cut a host off the network; the real processes elsewhere."""
        host = self._victim()[0].host
        self.wires.cut(host)
        everyone: list[Process | FarMember] = [*self.processes, *self.far]
        gone = [each for each in everyone if each.host == host]
        return self._after([each for each in self.processes if each.host != host], gone)

    def _victim(self) -> tuple[Process | FarMember, list[Process]]:
        if self.far:
            return self.far[len(self.far) // 2], self.processes
        victim = self.processes[self.size // 2]
        return victim, [each for each in self.processes if each is not victim]

    def _after(self, rest: Sequence[Process], gone: Sequence[Process | FarMember]) -> Fault:
        loop, began = self.loop, self.loop.now
        lost = {each.own.rank for each in gone}
        loop.run(began + 20 * self.hang_timeout, lambda: any(each.broken is not None for each in rest))
        first = next((each.broken[1].breakage for each in rest if each.broken is not None), None)
        if first is not None:
            # The far members learn of it as the real ones do, and tell everyone.
            told = Broken(self.world, first.cause, first.ranks, first.detail)
            for far in self.far:
                if far.own.rank not in lost:
                    loop.after(loop.random.uniform(0, self.network.remote), partial(far.tell, told))
        loop.run(loop.now + 20 * self.hang_timeout, lambda: all(each.broken is not None for each in rest))
        verdicts = [each.broken for each in rest if each.broken is not None]
        loop.run(loop.now + 2 * self.network.remote)
        until = loop.now + _SETTLED
        while loop.now < until and not all(each.idle for each in rest):
            loop.run(loop.now + 1e-3)
        return Fault(
            tuple(at - began for at, _ in verdicts),
            tuple(verdict.breakage.cause for _, verdict in verdicts),
            max(each.sent.get("Broken", 0) for each in rest),
            loop.now - began if loop.now < until else math.inf,
        )
