"""Who may make the next generation where there may be two stores: a majority of the last one's members. Pure.

A world of which nothing is known begins only where its store says that it may: others may know it elsewhere.
A store that is a list of addresses may be served twice while its hosts do not reach each other. Of the
members of one generation at most one part has a majority, so at most one part goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiworld._core.membership.ledger import Claim, Ledger

__all__ = ["elsewhere", "may_follow", "voters"]


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


def may_follow(ledger: Ledger, dead: frozenset[str] = frozenset(), *, begins: bool = True) -> bool:
    """Whether the claims of the open attempt may make the next generation.

    They are a majority of the last one's members that may go on, or half of them with the first.

    Args:
        ledger: with an open attempt whose ranks are assigned.
        dead: see `voters`.
        begins: whether a world of which nothing is known may begin here.
    """
    waiting = ledger.waiting
    if waiting is None:
        return True
    if ledger.current is None and ledger.before is None:
        return begins
    if not ledger.listed:
        return True
    votes = voters(ledger, dead)
    given = _given(ledger, votes)
    return not votes or 2 * sum(given) > len(given) or (2 * sum(given) == len(given) and given[0])


def elsewhere(ledger: Ledger) -> int:
    """Return how many members may go on without the open attempt's, where these are no majority; else 0."""
    votes = voters(ledger)
    return 0 if may_follow(ledger) else _given(ledger, votes).count(False)


def _given(ledger: Ledger, votes: tuple[Claim, ...]) -> list[bool]:
    """For each member whether it is in the open attempt, and knows that it was one."""
    there = () if ledger.waiting is None else ledger.waiting.claims
    here = {each.member.process for each in there if each.was}
    return [each.member.process in here for each in votes]
