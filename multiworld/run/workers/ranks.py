"""Ranks and roles of this node's workers, and their environment variables. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from string import Template
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiworld.run.nodes.slots import Assignment
    from multiworld.run.worldsfile.worlds_plan import WorldsPlan

__all__ = ["WorkerRank", "environment", "prefixes", "worker_ranks"]


@dataclass(frozen=True)
class WorkerRank:
    """Ranks and role of one worker; the same in every attempt.

    Attributes:
        local_rank: on this node.
        rank: among all workers.
        world_size: number of all workers.
        role, role_rank, role_size: of the worlds file; else --role, and the rank among the workers of all
            nodes with that role.
    """

    local_rank: int
    rank: int
    world_size: int
    role: str
    role_rank: int
    role_size: int


def worker_ranks(
    assignment: Assignment, capacity: int, role: str, plan: WorldsPlan | None
) -> tuple[WorkerRank, ...]:
    """Return the ranks of this node's workers; none for a spare node.

    Args:
        assignment: of this node.
        capacity: number of its workers.
        role: of --role, used without a worlds file.
        plan: of the worlds file.
    """
    if assignment.slot is None:
        return ()
    found = []
    for local_rank in range(capacity):
        rank = assignment.base_rank + local_rank
        if plan is None:
            role_rank = assignment.base_role_rank + local_rank
            place = WorkerRank(
                local_rank, rank, assignment.world_size, role, role_rank, assignment.role_world_size
            )
        else:
            member = plan.member_at(rank)
            size = plan.role_size(member.role)
            place = WorkerRank(local_rank, rank, assignment.world_size, member.role, member.index, size)
        found.append(place)
    return tuple(found)


def environment(place: WorkerRank, attempt: int) -> dict[str, str]:
    """Return the variables that differ from those of torch's agent, which has one role and restart count."""
    return {
        "ROLE_NAME": place.role,
        "ROLE_RANK": str(place.role_rank),
        "ROLE_WORLD_SIZE": str(place.role_size),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }


def prefixes(template: str | None, place: WorkerRank) -> dict[int, str] | None:
    """Return the prefix of the worker's lines under --tee, by local rank; None: torch's default.

    Args:
        template: of TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE.
        place: of the worker.
    """
    if not template:
        return None
    said = {"role_name": place.role, "rank": place.rank, "local_rank": place.local_rank}
    return {place.local_rank: Template(template).safe_substitute(said)}
