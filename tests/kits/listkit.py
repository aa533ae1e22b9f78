"""Lives on hosts that serve the store by turns, and may be cut off from each other, in simulated time.

Each life is on the host of its number, divided by the number of hosts; one of them serves there if it does. A store
of a life moves as `multiworld._net.stores.moving_store` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from greenlet import getcurrent, greenlet

from kits.lifekit import NEVER, Life, Lives
from kits.meetkit import Joiner, MemoryStore
from multiworld._core.membership import serving
from multiworld._core.membership.ledger import decode
from multiworld._core.membership.request import JoinRequest
from multiworld._core.membership.roster import Endpoint, Roster
from multiworld._core.membership.serving import AddressState, Found

KEEP = 0.2
"""Seconds between two looks of a process at whether its store is there."""


@dataclass
class Server:
    """One server: of which epoch, whose process; since when it sees enough addresses (`NEVER`: not now); its keys."""

    epoch: int
    position: int
    owner: Resident
    settles: float
    keys: dict[str, str]


class Resident(Life):
    """A life on a host of the list. While its generation works it sees now and then that its store is there."""

    def __init__(self, sim: Hosts, request: JoinRequest, start: float, timeout: float) -> None:
        super().__init__(sim, request, start, timeout)
        self.position = int(request.process, 16) % sim.count
        self.known = serving.NEVER
        self.store: Moving | None = None
        self.looked = 0.0

    def pause(self, seconds: float) -> None:
        super().pause(seconds)
        if self.active is not None and self.store is not None and self.sim.now - self.looked >= KEEP:
            self.looked = self.sim.now
            self.store.keep_up()


class Hosts(Lives):
    """`Lives` on hosts whose network falls apart into the `parts` of each host, by schedule.

    Attributes:
        cuts: (simulated seconds, the part of each host), ascending.
        servers: by position.
        opened: epochs of all servers there were.
    """

    def __init__(self, seed: int, *, end: float, count: int = 3) -> None:
        super().__init__(seed, end=end)
        self.count = count
        self.cuts: list[tuple[float, tuple[int, ...]]] = []
        self.parts: tuple[int, ...] = (0,) * count
        self.servers: dict[int, Server] = {}
        self.opened: list[int] = []
        self._turns: dict[greenlet, Resident] = {}

    def life(self, request: JoinRequest, *, start: float = 0.0, timeout: float = 4.0) -> Resident:
        made = Resident(self, request, start, timeout)
        self.joiners.append(made)
        return made

    def refresh(self) -> None:
        while self.cuts and self.now >= self.cuts[0][0]:
            self.parts = self.cuts.pop(0)[1]
        for at, server in list(self.servers.items()):
            gone = server.owner.dead or server.owner.done
            if gone or serving.outranked(at, server.epoch, self.found(at)):
                del self.servers[at]
            elif not serving.may_begin(at, self.found(at)):
                server.settles = NEVER
            else:
                server.settles = min(server.settles, self.now)

    def reach(self, one: int, other: int) -> bool:
        return self.parts[one] == self.parts[other]

    def found(self, position: int) -> list[Found]:
        """What a process on this host sees at each address."""
        seen = []
        for at in range(self.count):
            server = self.servers.get(at)
            if not self.reach(position, at):
                seen.append(Found(AddressState.SILENT))
            elif server is None:
                seen.append(Found(AddressState.FREE))
            else:
                seen.append(Found(AddressState.OPEN, server.epoch, str(id(server))))
        return seen

    def server_for(self, life: Resident) -> Server:
        """The server to use, which may be a new one on the life's host."""
        self.refresh()
        found = self.found(life.position)
        at = serving.best(found, life.known)
        if at is None:
            at = life.position
            epoch = serving.next_epoch(at, found, life.known, self.random.randrange(serving.STRIDE))
            self.servers[at] = Server(epoch, at, life, NEVER, {})
            self.opened.append(epoch)
        life.known = self.servers[at].epoch
        return self.servers[at]

    def store_of(self, joiner: Joiner) -> MemoryStore:
        assert isinstance(joiner, Resident)
        self._turns[getcurrent()] = joiner
        joiner.store = Moving(joiner.before_call, self, joiner)
        return joiner.store

    # What a process learns of others:

    def _cut_off(self, process: str) -> bool:
        me = self._turns.get(getcurrent())
        return me is not None and not self.reach(me.position, int(process, 16) % self.count)

    def probe(self, endpoints: Iterable[Endpoint], within: float) -> dict[Endpoint, bool | None]:
        self.refresh()
        found = super().probe(endpoints, within)
        where = {each.request.endpoint: each.request.process for each in self.lives}
        return {end: None if self._cut_off(where[end]) else answer for end, answer in found.items()}

    def lost(self, roster: Roster) -> tuple[int, ...]:
        self.refresh()
        away = {member.rank for member in roster.members if self._cut_off(member.process)}
        return tuple(sorted(away | set(super().lost(roster))))

    def over(self, roster: Roster) -> bool:
        went_on = any(
            (member.process, roster.token) in self.gone_on
            for member in roster.members
            if not self._cut_off(member.process)
        )
        return bool(self.lost(roster)) or roster.generation in self.failed or went_on


class Moving(MemoryStore):
    """The store of one life, at whichever server it uses."""

    def __init__(self, before: Callable[[], None], sim: Hosts, life: Resident) -> None:
        super().__init__(before)
        self._sim, self._life = sim, life
        self._users: list[Any] = []
        self._server = sim.server_for(life)
        self.keys, self.epoch = self._server.keys, self._server.epoch

    def on_move(self, bring: Any) -> None:
        self._users.append(bring)

    def may_begin(self) -> bool:
        server = self._server
        self._sim.refresh()
        return self._sim.now - server.settles >= 1.0

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        found = super().compare_set(key, expected, desired)
        if found.decode() == desired and key.endswith("/record") and desired.startswith("{"):
            self._sim.written.append(decode(desired, "w"))
        return found

    def keep_up(self) -> None:
        """Move, if the server is gone or cannot be reached."""
        sim, life = self._sim, self._life
        sim.refresh()
        there = sim.servers.get(self._server.position) is self._server
        if there and sim.reach(life.position, self._server.position):
            return
        server = sim.server_for(life)
        if server is self._server:
            return
        beside = MemoryStore()
        beside.keys = server.keys
        for each in self._users:
            if (bring := each()) is not None:
                bring(beside, server.epoch)
        self._server = server
        self.keys, self.epoch = server.keys, server.epoch

    def _called(self) -> None:
        super()._called()
        self.keep_up()


__all__ = ["NEVER", "Hosts", "Resident"]
