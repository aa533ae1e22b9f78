"""Majority rule for the next generation where there may be two stores: of the last one's members. Pure.

A world of which nothing is known begins only where its store says that it may: others may know it elsewhere.
A store that is a list of addresses may be served twice while its hosts do not reach each other. Of the
members of one generation at most one part has a majority, so at most one part goes on. Members that have died
count, since they may have gone on with others before: unless none of those is left, or all of them are
reached, and have had the time to say so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiworld._core.membership.ledger import Claim, Ledger

__all__ = ["elsewhere", "may_follow", "rests_on_store", "voters"]


def voters(ledger: Ledger, dead: frozenset[str] = frozenset()) -> tuple[Claim, ...]:
    """Return the claims in the world's last active generation of members that may go on elsewhere.

    Args:
        ledger: of a world whose ranks are assigned.
        dead: ids of claims whose processes are gone for certain: their hosts answer, and say so.
    """
    base = ledger.before or ledger.current
    if base is None:
        return ()
    return tuple(each for each in base.holders if each.rank not in base.left and each.id not in dead)


def rests_on_store(ledger: Ledger, dead: frozenset[str] = frozenset()) -> bool:
    """Whether `may_follow` depends on its `begins`; see there."""
    if ledger.current is None and ledger.before is None:
        return True
    return ledger.listed and len(voters(ledger, dead)) < len(voters(ledger))


def may_follow(ledger: Ledger, dead: frozenset[str] = frozenset(), *, begins: bool = True) -> bool:
    """Whether the claims of the open attempt may make the next generation.

    They are a majority of the last one's members that may go on, or half of them with the first. Where
    members are dead, those that have neither come nor died may have gone on with them before.

    Args:
        ledger: with an open attempt whose ranks are assigned.
        dead: see `voters`.
        begins: whether all that know of the world must have told the store. A world of which nothing is known
            begins only then, and only then dead members do not count.
    """
    if ledger.waiting is None:
        return True
    if ledger.current is None and ledger.before is None:
        return begins
    if not ledger.listed or _enough(given := _given(ledger, voters(ledger))):
        return True
    left = _given(ledger, voters(ledger, dead))
    return all(left) or (begins and len(left) < len(given) and _enough(left))


def elsewhere(ledger: Ledger) -> int:
    """Return how many members may go on without the open attempt's, where these are no majority; else 0."""
    return 0 if may_follow(ledger) else _given(ledger, voters(ledger)).count(False)


def _enough(given: list[bool]) -> bool:
    """Whether these are most of them, or half of them with the first."""
    return 2 * sum(given) > len(given) or (2 * sum(given) == len(given) and (not given or given[0]))


def _given(ledger: Ledger, votes: tuple[Claim, ...]) -> list[bool]:
    """For each member whether it is in the open attempt, and knows that it was one."""
    there = () if ledger.waiting is None else ledger.waiting.claims
    here = {each.member.process for each in there if each.was}
    return [each.member.process in here for each in votes]
