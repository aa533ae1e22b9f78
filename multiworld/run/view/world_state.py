"""State of a world, decided from what its members said of it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["OVER", "range_state", "world_state"]

OVER = frozenset({"closed", "gone"})
"""States of members that are in the world no more."""


def world_state(reports: Iterable[tuple[str, int]]) -> tuple[str, int]:
    """Return a world's state and generation from its members' (state, generation); "gone": a dead member.

    The first rule that holds:

    - no member is left: "closed" if all closed it, else "gone";
    - a member reports "broken", and no other one is active in a later generation: "broken";
    - a member's join failed: "failed";
    - a member is gone and none is joining: "broken", though the others have yet to report it;
    - a member joins, is gone, or members are active in different generations (a report is under way):
      "joining";
    - else "active".
    """
    told = list(reports)
    live = [(state, generation) for state, generation in told if state not in OVER]
    newest = max((generation for _, generation in live or told), default=0)
    states = {state for state, _ in live}
    gone = any(state == "gone" for state, _ in told)
    if not live:
        return ("closed" if told and not gone else "gone"), newest
    reached = {generation for state, generation in live if state == "active"}
    if any(state == "broken" and generation >= max(reached, default=0) for state, generation in live):
        return "broken", newest
    if "failed" in states:
        return "failed", newest
    if gone and "joining" not in states:
        return "broken", newest
    if states != {"active"} or gone or len(reached) > 1:
        return "joining", newest
    return "active", newest


def range_state(reports: Iterable[tuple[str, int]]) -> tuple[str, int]:
    """Return the state and generation of a world of a range of sizes, as `world_state` does for one size.

    It goes on without members that are gone, once another one is active in a later generation; those that
    join meanwhile are candidates.
    """
    told = list(reports)
    reached = max((generation for state, generation in told if state == "active"), default=0)
    ended = {"broken", "gone"}
    if not reached or any(state in ended and generation >= reached for state, generation in told):
        return world_state(told)
    return "active", reached
