"""Lives of processes in worlds whose ranks are assigned, in simulated time: they join, notice losses, reform, die.

A `Life` is a `meetkit.Joiner` that joins again whenever its generation is over for it: a member died or left, or an
operation of one failed. It notices that after a while of its own, as real watchdogs do. The store may die: calls of
the old one raise, and the next one is empty. Answers of the store may be lost after it did what it was asked to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from kits.meetkit import Joiner, MemoryStore, Simulation, ask
from multiworld._core.membership import admission
from multiworld._core.membership.ledger import decode
from multiworld._core.membership.request import JoinRequest
from multiworld._core.membership.roster import Endpoint, Roster
from multiworld._net.stores.rendezvous import Rendezvous
from multiworld.errors import JoinAbandonedError, JoinError, StoreUnreachableError

LOOK = 0.05
LAST_CALL = 1.0
NEVER = float("inf")


def seat(who: int, least: int, most: int, **changes: object) -> JoinRequest:
    """A request by process number `who` for a world of `least` to `most`."""
    return ask(-1, most, who, **({"least": least, "seat": f"s{who}"} | changes))


class Life(Joiner):
    """One process, from its first join to the end of the simulation, or its own.

    Attributes:
        die_at, leave_at, fail_at: simulated seconds; never by default. Failing ends its generation, and no process.
        rosters: of every generation that it agreed on, in order; `actives` of those that became active for it.
        active: the present generation, while it is one.
        serves: whether the store dies with it, if it is a member then.
        errors: what joins raised.
    """

    def __init__(self, sim: Lives, request: JoinRequest, start: float, timeout: float) -> None:
        super().__init__(sim, request, start, timeout)
        self.die_at = self.leave_at = self.fail_at = NEVER
        self.rosters: list[Roster] = []
        self.actives: list[Roster] = []
        self.active: Roster | None = None
        self.left = self.serves = False
        self.errors: list[Exception] = []
        self.sim = sim

    def _die_if_dead(self) -> None:
        if not self.dead and self.sim.now >= self.die_at:
            self.dead = True
            if self.serves and self.active is not None:
                self.sim.store_dies.append(self.sim.now)
        super()._die_if_dead()

    def _join(self) -> None:
        last: Roster | None = None
        while self.sim.now < self.sim.end and not self.left:
            known = max((each.generation for each in self.rosters), default=0)
            request = dataclasses.replace(self.request, last_generation=known)
            if last is not None:
                request = dataclasses.replace(
                    request,
                    past=last.members,
                    past_generation=last.generation,
                    past_rank=last.rank,
                    lost=self.sim.lost(last),
                )
            try:
                way, last = self._meet(request)
            except JoinError as error:
                self.errors.append(error)
                self.left = self.sim.now >= self.leave_at
                self.pause(0.005)
            else:
                self._stay(way, last)

    def _meet(self, request: JoinRequest) -> tuple[Rendezvous, Roster]:
        sim = self.sim
        way = self.rendezvous = Rendezvous(
            sim.store_of(self), request, deadline=sim.now + self.timeout, last_call=LAST_CALL,
            cancelled=lambda: sim.now >= min(self.leave_at, sim.end),
            clock=lambda: sim.now, sleep=self.pause, probe=sim.probe,
        )  # fmt: skip
        roster = way._agree()
        self.rosters.append(roster)
        try:
            self.pause(sim.random.uniform(0, 0.05))
            way._commit(lambda: self._raise_if_lost(roster))
        except JoinError as error:
            way._last_words(error)
            # A join that fails closes the member's connections: those that had committed see that it is gone.
            sim.gone_on.add((request.process, roster.token))
            raise
        self.actives.append(roster)
        self.active = roster
        return way, roster

    def _raise_if_lost(self, roster: Roster) -> None:
        if self.sim.lost(roster):
            raise JoinAbandonedError("w", "a member died")

    def _stay(self, way: Rendezvous, roster: Roster) -> None:
        sim = self.sim
        while sim.now < sim.end and not sim.over(roster):
            if sim.now >= self.leave_at:
                self.left = True
                break
            if sim.now >= self.fail_at:
                self.fail_at = NEVER
                sim.failed.add(roster.generation)
            self.pause(LOOK)
        if sim.now >= sim.end:
            return
        self.active = None
        self.pause(sim.random.choice((0.0, 0.0, 0.3)))
        sim.gone_on.add((self.request.process, roster.token))
        if self.left or sim.random.random() < 0.7:
            try:
                way._record.apply(
                    lambda ledger: admission.Move(
                        admission.over(ledger, way._number, way._me, left=self.left)
                    )
                )
            except StoreUnreachableError as error:
                self.errors.append(error)


class Lives(Simulation):
    """`Simulation` of lives until `end`.

    Attributes:
        blind, deaf: probabilities, until `calm`, that a living process does not answer a probe, and that an answer of
            the store is lost.
        store_dies: simulated seconds, ascending.
    """

    def __init__(self, seed: int, *, end: float, blind: float = 0.0, deaf: float = 0.0) -> None:
        super().__init__(seed)
        self.end = end
        self.blind, self.deaf = blind, deaf
        self.calm = NEVER
        self.store_dies: list[float] = []
        self.epoch = 0
        self.failed: set[int] = set()
        self.gone_on: set[tuple[str, bytes]] = set()

    def life(self, request: JoinRequest, *, start: float = 0.0, timeout: float = 4.0) -> Life:
        made = Life(self, request, start, timeout)
        self.joiners.append(made)
        return made

    @property
    def lives(self) -> list[Life]:
        return [each for each in self.joiners if isinstance(each, Life)]

    def store_of(self, joiner: Joiner) -> MemoryStore:
        return _Mortal(joiner.before_call, self)

    def refresh(self) -> None:
        while self.store_dies and self.now >= self.store_dies[0]:
            self.store_dies.pop(0)
            self.epoch += 1
            self.keys = {}

    def probe(self, endpoints: Iterable[Endpoint], within: float) -> dict[Endpoint, bool | None]:
        gone = {each.request.endpoint for each in self.lives if each.dead or each.left}
        unseen = self.now < self.calm and self.random.random() < self.blind
        return {end: False if end in gone else None if unseen else True for end in endpoints}

    def lost(self, roster: Roster) -> tuple[int, ...]:
        """Ranks of members that died or left."""
        gone = {each.request.process for each in self.lives if each.dead or each.left}
        return tuple(member.rank for member in roster.members if member.process in gone)

    def over(self, roster: Roster) -> bool:
        """Whether a member that watches sees the generation end."""
        went_on = any((member.process, roster.token) in self.gone_on for member in roster.members)
        return bool(self.lost(roster)) or roster.generation in self.failed or went_on


class _Mortal(MemoryStore):
    """The store of the epoch in which it was opened."""

    def __init__(self, before: Callable[[], None], sim: Lives) -> None:
        super().__init__(before)
        sim.refresh()
        self.keys, self._epoch, self._sim = sim.keys, sim.epoch, sim

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        found = super().compare_set(key, expected, desired)
        sim = self._sim
        if found.decode() == desired and key.endswith("/record") and desired.startswith("{"):
            sim.written.append(decode(desired, "w"))
        if sim.now < sim.calm and sim.random.random() < sim.deaf:
            raise StoreUnreachableError("w", "the answer was lost")
        return found

    def _called(self) -> None:
        super()._called()
        self._sim.refresh()
        if self._epoch != self._sim.epoch:
            raise StoreUnreachableError("w", "the store died")
