"""Checks of a call of `join_all`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiworld._join.arguments import is_same_state
from multiworld.errors import InvalidJoinError, UnknownWorldError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from multiworld._join.arguments import JoinPlan, StateLike
    from multiworld.joinall.launcher_client import AssignedWorld
    from multiworld.world import World

__all__ = ["check_names", "check_state"]


def check_names(
    wanted: Sequence[str], states: Mapping[str, StateLike], assigned: Mapping[str, AssignedWorld]
) -> None:
    """Refuse names of worlds that this worker is not in, and a state of one that is not wanted."""
    for name in (*wanted, *states):
        if name not in assigned:
            raise UnknownWorldError(
                str(name),
                f"this worker is in no world {name!r}",
                rule=f"Its worlds are {', '.join(map(repr, assigned)) or 'none'}",
                next_step="Name one of them, or make this worker a member in the worlds file",
            )
    for name in states:
        if name not in wanted:
            raise InvalidJoinError(
                name,
                f"a state for world {name!r}, which this call does not join",
                rule="A state is of a world that the call joins",
                next_step="Name that world, too, or leave its state out",
            )


def check_state(world: World, plan: JoinPlan) -> None:
    """Refuse a plan's state where `world` has another one, or none: it would be neither sent nor loaded."""
    if not is_same_state(world._plan.state, plan.state):  # noqa: SLF001  (joins make worlds)
        has = "no state" if world._plan.state is None else "another state"  # noqa: SLF001  (joins make worlds)
        raise InvalidJoinError(
            plan.name,
            f"a state for world {plan.name!r}, which this process has joined with {has}",
            rule="A world keeps the state that it was joined with until it breaks",
            next_step="Give the same objects, or none, or close the world first",
        )
