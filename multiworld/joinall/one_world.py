"""One world that the launcher assigned: joined, tried again in time, joined again after it broke."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from multiworld._core.reraise import as_new
from multiworld._join import join as joining
from multiworld._join.rejoining import Rejoiner
from multiworld.errors import JoinAbandonedError, JoinTimeoutError, StoreUnreachableError
from multiworld.events import State
from multiworld.world import worlds

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld._join.arguments import JoinPlan
    from multiworld.joinall.launcher_client import LauncherClient
    from multiworld.world import World

__all__ = ["ASKING", "WorldJoiner"]

ASKING = 2.0
"""Seconds that the launcher has to tell its store's address before a world is joined again; else the last
one is used."""
AGAIN = 0.05
"""Seconds between two tries."""
FIRST_CALL = 5.0
"""Seconds for which a world of a range waits in its first generation for more than its smallest size."""

_RETRIED = (JoinTimeoutError, JoinAbandonedError, StoreUnreachableError)
"""Errors that another member's end, or its deadline, can cause: retried while there is time."""


class WorldJoiner:
    """Joins worlds of this process, each in the thread that asks for it.

    Args:
        launcher: tells the address of its store, and whether this worker is to retire.
    """

    def __init__(self, launcher: LauncherClient) -> None:
        self._launcher = launcher
        self._kept: dict[str, Rejoiner] = {}

    def bring(self, plan: JoinPlan, again: bool, stopped: Callable[[], bool]) -> tuple[World, bool]:
        """Return the world, active, and whether it was joined; `again`: a `Rejoiner` does it from now on."""
        world, kept = worlds().get(plan.name), self._kept.get(plan.name)
        if world is not None and (
            world.state in {State.ACTIVE, State.JOINING} or (kept is not None and kept.world is world)
        ):
            return world.wait_active(plan.timeout), False
        if world is None and kept is not None:  # closed, perhaps while it was joined again
            kept.wait_idle(plan.timeout)
        closes = 0 if world is None else world._closes  # noqa: SLF001  (joins make worlds)

        def closed() -> bool:
            return world is not None and world._closes != closes  # noqa: SLF001  (a close() by the program wins)

        join = _first if world is None else partial(_again, world)  # that one broke, without a `Rejoiner`
        joined = self._try(plan, lambda: stopped() or closed(), join)
        if closed():  # in the last moment of the join
            joined.close()
            raise JoinAbandonedError(plan.name, f"world {plan.name!r} was closed while it was joined again")
        if again and joined._plan.state is None:  # noqa: SLF001  (a state is sent while the program stands still)
            self._kept[plan.name] = Rejoiner(joined, self._rejoin)
        return joined, world is None

    def _rejoin(self, world: World, closed: Callable[[], bool]) -> None:
        """Join a world again that broke, at the launcher's present store."""
        self._launcher.ask(ASKING)
        plan = world._plan  # noqa: SLF001  (it has the store address of the join)
        store = self._launcher.store_of(plan)
        joining.rejoin(
            world, store=store, planned=True, cancelled=lambda: closed() or self._launcher.moved(store, plan)
        )

    def _try(
        self,
        plan: JoinPlan,
        stopped: Callable[[], bool],
        join: Callable[[JoinPlan, Callable[[], bool]], World],
    ) -> World:
        """Join, and retry until the plan's timeout: another member's deadline, or end, fails an attempt."""
        deadline = time.monotonic() + plan.timeout
        last: Exception | None = None
        while True:
            try:
                made = replace(plan, store=self._launcher.store_of(plan))
                return join(made, self._giving_up(made, stopped, deadline if last is not None else None))
            except _RETRIED as exc:
                if plan.assigned and self._launcher.retirement.begun:
                    raise
                out_of_time = time.monotonic() + AGAIN >= deadline
                if stopped() or (out_of_time and last is None):
                    raise
                if out_of_time:
                    # `exc` only says that this attempt was given up; the error before it says why the join
                    # failed.
                    raise exc if last is None else as_new(last) from exc
                last = as_new(exc)  # without its frames, of which this is one
            time.sleep(AGAIN)

    def _giving_up(
        self, plan: JoinPlan, stopped: Callable[[], bool], deadline: float | None
    ) -> Callable[[], bool]:
        def give_up() -> bool:
            late = deadline is not None and time.monotonic() >= deadline
            retires = plan.assigned and self._launcher.retirement.begun
            return stopped() or late or retires or self._launcher.moved(plan.store, plan)

        return give_up


def _first(plan: JoinPlan, cancelled: Callable[[], bool]) -> World:
    """Join; a world of a range begins soon with those that were started, and lets others in later."""
    begun = joining.join_planned(replace(plan, last_call=min(plan.last_call, FIRST_CALL)), cancelled)
    begun._plan = replace(begun._plan, last_call=plan.last_call)  # noqa: SLF001  (of later generations)
    return begun


def _again(world: World, plan: JoinPlan, cancelled: Callable[[], bool]) -> World:
    return joining.rejoin(
        world, plan.timeout, plan.store, planned=True, state=plan.state, cancelled=cancelled
    )
