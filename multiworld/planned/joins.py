"""Several worlds joined at once: one thread each, in the order that they ask for; all of them or none."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from multiworld import joining
from multiworld.errors import JoinAbandonedError, JoinTimeoutError, StoreUnreachableError, UnknownWorldError
from multiworld.events import State
from multiworld.planned.healing import Healer
from multiworld.planned.link import Link
from multiworld.world import worlds

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Sequence

    from multiworld.joinplan import JoinPlan
    from multiworld.world import World

__all__ = ["UNDO_BUDGET", "Joins", "Wish", "close"]

ANSWER = 10.0
"""Seconds that the launcher has to answer; its process may be busy starting workers."""
AGAIN = 0.05
"""Seconds between two tries."""
UNDO_BUDGET = 5.0
"""Seconds that giving up may take."""
_LOOK_EVERY = 0.5

_RETRIED = (JoinTimeoutError, JoinAbandonedError, StoreUnreachableError)
"""What another member's fate, or deadline, can do to a join: worth another try while there is time."""


class Wish:
    """What a call of `join_all` asks for; `stop` is set when nobody wants it any more."""

    def __init__(
        self, rejoin: bool, timeout: float | dt.timedelta | None, gpu: int | None, stop: threading.Event
    ) -> None:
        self.rejoin = rejoin
        self.timeout = timeout
        self.gpu = gpu
        self.stop = stop
        self.fresh: list[World] = []


class Flight:
    """One world on its way: joined by one thread, waited for by whoever wants it."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.world: World | None = None
        self.fresh = False
        self.error: Exception | None = None


class Joins:
    """The worlds that this process was given, and those that it joins just now.

    Attributes:
        link: to the launcher.
    """

    def __init__(self) -> None:
        self.link = Link()
        self._lock = threading.Lock()
        self._flights: dict[str, Flight] = {}
        self._kept: dict[str, Healer] = {}

    def join(self, names: Sequence[str], wish: Wish) -> tuple[dict[str, World], list[World]]:
        """All that `names` says, active; and those of them that this call joined."""
        assigned = self.link.ask(ANSWER)
        for name in names:
            if name not in assigned:
                raise UnknownWorldError(
                    str(name),
                    f"this worker is in no world {name!r}",
                    rule=f"Its worlds are {', '.join(map(repr, assigned)) or 'none'}",
                    next_step="Name one of them, or make this worker a member in the worlds file",
                )
        wanted = tuple(dict.fromkeys(names)) or tuple(assigned)
        plans = {name: assigned[name].plan(wish.timeout, wish.gpu) for name in wanted}
        own: dict[str, Flight] = {}
        with self._lock:
            for name in wanted:
                if name not in self._flights:
                    own[name] = self._flights[name] = Flight()
            flights = {name: self._flights[name] for name in wanted}
        news = threading.Event()
        try:
            for name, flight in own.items():
                before = [flights[each] for each in assigned[name].after if each in flights]
                threading.Thread(
                    target=self._fly,
                    args=(plans[name], flight, before, wish, news),
                    daemon=True,
                    name=f"m8d-join-{name}",
                ).start()
            self._await(flights, wish, news)
        except BaseException:
            wish.stop.set()
            self._undo(own)
            raise
        worlds = {name: flight.world for name, flight in flights.items() if flight.world is not None}
        return worlds, [flight.world for flight in own.values() if flight.world is not None and flight.fresh]

    def _await(self, flights: dict[str, Flight], wish: Wish, news: threading.Event) -> None:
        """Wait until all have landed; each takes no longer than its own timeout, and those it waits for."""
        left = dict(flights)
        while left:
            for name, flight in tuple(left.items()):
                if flight.done.is_set():
                    del left[name]
                    if flight.error is not None:
                        raise flight.error
            if wish.stop.is_set():
                raise JoinAbandonedError(next(iter(flights)), "join_all was cancelled")
            if left:
                news.wait(_LOOK_EVERY)  # other calls' flights make no news here
                news.clear()

    def _undo(self, own: dict[str, Flight]) -> None:
        deadline = time.monotonic() + UNDO_BUDGET
        for name, flight in own.items():
            flight.done.wait(max(0.0, deadline - time.monotonic()))
            with self._lock:
                if self._flights.get(name) is flight:  # its thread never began, or is not through yet
                    del self._flights[name]
        close([flight.world for flight in own.values() if flight.world is not None and flight.fresh])

    # -- one world ----------------------------------------------------------------------------------------------

    def _fly(
        self, plan: JoinPlan, flight: Flight, before: list[Flight], wish: Wish, news: threading.Event
    ) -> None:
        try:
            for each in before:
                while not each.done.wait(_LOOK_EVERY) and not wish.stop.is_set():
                    continue
                if each.error is not None or wish.stop.is_set():
                    raise JoinAbandonedError(  # noqa: TRY301  (it is told as others are)
                        plan.name, f"world {plan.name!r} comes after one that could not be joined"
                    )
            flight.world, flight.fresh = self._bring(plan, wish)
            if wish.stop.is_set() and flight.fresh:
                flight.world.close(UNDO_BUDGET)
        except Exception as exc:  # noqa: BLE001  (raised by join_all)
            flight.error = exc
        finally:
            with self._lock:
                if self._flights.get(plan.name) is flight:
                    del self._flights[plan.name]
            flight.done.set()
            news.set()

    def _bring(self, plan: JoinPlan, wish: Wish) -> tuple[World, bool]:
        """The world, active, and whether this joined it."""
        world, kept = worlds().get(plan.name), self._kept.get(plan.name)
        if world is not None and (
            world.state in {State.ACTIVE, State.JOINING} or (kept is not None and kept.world is world)
        ):
            return world.wait_active(plan.timeout), False
        if world is not None:  # broken, and nobody joins it again
            return self._try(plan, wish, partial(_again, world)), False
        if kept is not None:  # closed, perhaps while it was joined again
            kept.wait_idle(plan.timeout)
        joined = self._try(plan, wish, joining.join_planned)
        if wish.rejoin:
            with self._lock:
                self._kept[plan.name] = Healer(joined, self.link)
        return joined, True

    def _try(
        self, plan: JoinPlan, wish: Wish, join: Callable[[JoinPlan, Callable[[], bool]], World]
    ) -> World:
        """Join until the plan's timeout: what ends an attempt may be another member's deadline, or its death."""
        deadline = time.monotonic() + plan.timeout
        last: Exception | None = None
        while True:
            try:
                made = replace(plan, store=self.link.store_of(plan))
                return join(made, self._giving_up(made, wish, deadline if last is not None else None))
            except _RETRIED as exc:
                out_of_time = time.monotonic() + AGAIN >= deadline
                if wish.stop.is_set() or (out_of_time and last is None):
                    raise
                if out_of_time:
                    # The present one says that this gave up; the one before says why there was no world.
                    raise last or exc from exc
                last = exc
            wish.stop.wait(AGAIN)

    def _giving_up(self, plan: JoinPlan, wish: Wish, deadline: float | None) -> Callable[[], bool]:
        def give_up() -> bool:
            late = deadline is not None and time.monotonic() >= deadline
            return wish.stop.is_set() or late or self.link.moved(plan.store, plan)

        return give_up


def _again(world: World, plan: JoinPlan, cancelled: Callable[[], bool]) -> World:
    return joining.rejoin(world, plan.timeout, plan.store, cancelled=cancelled)


def close(worlds: list[World]) -> None:
    """Close them, all together in `UNDO_BUDGET` seconds."""
    deadline = time.monotonic() + UNDO_BUDGET
    for world in worlds:
        world.close(max(0.1, deadline - time.monotonic()))
