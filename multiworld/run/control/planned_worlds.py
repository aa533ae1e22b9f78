"""`planned_worlds`: the worlds of one worker, as its `join_all` is told them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from multiworld.run.worldsfile.worlds_plan import LAUNCHER

if TYPE_CHECKING:
    from multiworld.run.worldsfile.worlds_plan import WorldsPlan

__all__ = ["planned_worlds"]


def planned_worlds(plan: WorldsPlan | None, rank: int, address: str) -> dict[str, Any]:
    """Return the answer to a worker that asks for its worlds.

    Args:
        plan: of the worlds file; None: there is none.
        rank: of the worker, in the run.
        address: of the store that planned worlds meet at, at present.
    """
    answer: dict[str, Any] = {"worlds": [], "store": address}
    if plan is None:
        return {**answer, "error": "this run has no worlds file"}
    if not 0 <= rank < plan.world_size:
        return {
            **answer,
            "error": f"{plan.path} has ranks 0 to {plan.world_size - 1}, not {rank}",
        }
    member = plan.member_at(rank)
    answer["worlds"] = [
        {
            "name": world.name,
            "rank": None if world.assigned else world.members.index(member),
            "world_size": f"{world.least}:{world.most}" if world.assigned else len(world.members),
            "backend": world.backend,
            "store": address if world.store == LAUNCHER else world.store,
            "launcher": world.store == LAUNCHER,
            "timeout": world.timeout,
            "hang_timeout": world.hang_timeout,
            "device": world.device,
            "after": list(world.after),
            "members": [[each.role, each.index] for each in world.members],
            **({"seat": str(member), "last_call": world.last_call} if world.assigned else {}),
        }
        for world in plan.worlds_of(rank)
    ]
    return answer
