"""Which worker is who: ranks, roles and the environment that says so. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from string import Template
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiworld.run.nodes.slots import Seating
    from multiworld.run.worldsfile.spec import WorldsPlan

__all__ = ["Place", "environment", "places", "prefixes"]


@dataclass(frozen=True)
class Place:
    """One worker's place; the same in every attempt.

    Attributes:
        local_rank: on this node.
        rank: among all workers.
        world_size: number of all workers.
        role, role_rank, role_size: of the worlds file; else --role, and the place among all workers.
    """

    local_rank: int
    rank: int
    world_size: int
    role: str
    role_rank: int
    role_size: int


def places(seating: Seating, capacity: int, role: str, plan: WorldsPlan | None) -> tuple[Place, ...]:
    """Return the places of this node's workers; none for a spare node.

    Args:
        seating: of this node.
        capacity: number of its workers.
        role: of --role, where there is no plan.
        plan: of the worlds file.
    """
    if seating.seat is None:
        return ()
    found = []
    for local_rank in range(capacity):
        rank = seating.base_rank + local_rank
        if plan is None:
            place = Place(local_rank, rank, seating.world_size, role, rank, seating.world_size)
        else:
            member = plan.member_at(rank)
            size = plan.role_size(member.role)
            place = Place(local_rank, rank, seating.world_size, member.role, member.index, size)
        found.append(place)
    return tuple(found)


def environment(place: Place, attempt: int) -> dict[str, str]:
    """Return what the worker's environment says other than torch's agent, which knows one role and one count."""
    return {
        "ROLE_NAME": place.role,
        "ROLE_RANK": str(place.role_rank),
        "ROLE_WORLD_SIZE": str(place.role_size),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }


def prefixes(template: str | None, place: Place) -> dict[int, str] | None:
    """Return what heads the worker's lines under --tee, by local rank; None: torch's default.

    Args:
        template: of TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE.
        place: the worker's.
    """
    if not template:
        return None
    said = {"role_name": place.role, "rank": place.rank, "local_rank": place.local_rank}
    return {place.local_rank: Template(template).safe_substitute(said)}
