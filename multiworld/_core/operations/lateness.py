"""Lateness of members in collectives: for how long the others have waited for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiworld._core.operations.report import calls_of_collectives

if TYPE_CHECKING:
    from collections.abc import Mapping

    from multiworld._core.operations.report import MemberReport

__all__ = ["NOTHING", "waited_for"]

NOTHING = 0.02
"""Seconds of waiting in one collective that say nothing; members that have time for it answer within 5 ms."""


def waited_for(reports: Mapping[int, MemberReport | None]) -> dict[int, float]:
    """Return the seconds that the members have waited for each other's calls of the last collectives.

    In each collective the member that called it last is the one that the others waited for, each since its
    own call. Counted are those that all members of their group have in their reports. Ages of different
    members are compared, which have answered at different moments: less than `NOTHING` does not count, and a
    member that answers late, as one whose threads hold the GIL does, seems to have called so much earlier.

    Args:
        reports: by rank, of all members; None of one that does not answer.

    Returns:
        By rank, of all members that answer; 0.0 for one that never was the last.
    """
    found = {rank: 0.0 for rank, report in reports.items() if report is not None}
    for together in calls_of_collectives(reports).values():
        if all(set(each.ranks) == together.keys() for each in together.values()):
            last = min(together, key=lambda rank: together[rank].began)
            waits = (each.began - together[last].began for each in together.values())
            found[last] += sum(seconds for seconds in waits if seconds >= NOTHING)
    return found
