"""Worlds whose ranks are assigned: who makes the next generation, in which order, and when it is complete.

Their size may change from one generation to the next, between `Terms.least` and `Terms.size`. Members claim
seats; ranks follow when the attempt is sealed: survivors of the generation before in their old order, then
newcomers in the order of their claims. Newcomers for whom there is no room wait for the next generation.

An attempt is complete when it has enough members and

- all members of the generation before are there that can come: the others are known to be lost, have left, or
  their processes are gone; or
- it has as many members as the world may have; or
- the last call is over: someone has waited for `last_call` seconds since there were enough.

The first of these needs a survivor: an attempt of newcomers alone is filled up, or waits for its last call.

A store that is started anew knows nothing of the world. Each survivor brings its last generation along
(`remembered`), so that numbers never go back and survivors wait for each other.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from multiworld._core.membership.ledger import Attempt, Claim, Ledger

if TYPE_CHECKING:
    from multiworld._core.membership.request import JoinRequest

__all__ = [
    "choose",
    "complete",
    "expected",
    "ranked",
    "remembered",
    "survives",
    "with_claim",
    "without_process",
]

_NO_TOKEN = "0" * 32  # of a generation that a survivor remembers: nobody joins it any more


def remembered(ledger: Ledger, request: JoinRequest) -> Ledger:
    """Return the ledger with what the claimant knows of its last generation: the members, and who is lost."""
    if not request.past:
        return ledger
    number, lost = request.past_generation, set(request.lost)
    if ledger.last < number or (ledger.last == number and ledger.current is None):
        claims = tuple(
            Claim(member.process[:16], member, number, number, member.rank) for member in request.past
        )
        everyone = tuple(member.rank for member in request.past)
        past = Attempt(
            0, request.terms, claims, number, _NO_TOKEN,
            ready=everyone, over=(request.past_rank,), lost=tuple(sorted(lost)),
        )  # fmt: skip
        return dataclasses.replace(ledger, last=number, current=past, before=None)
    if (now := _with_lost(ledger.current, number, lost)) is not ledger.current:
        return dataclasses.replace(ledger, current=now)
    if (before := _with_lost(ledger.before, number, lost)) is not ledger.before:
        return dataclasses.replace(ledger, before=before)
    return ledger


def _with_lost(attempt: Attempt | None, generation: int, lost: set[int]) -> Attempt | None:
    if attempt is None or attempt.generation != generation or lost <= set(attempt.lost):
        return attempt
    known = tuple(sorted(rank for rank in lost | set(attempt.lost) if rank < attempt.size))
    return dataclasses.replace(attempt, lost=known)


def without_process(attempt: Attempt, process: str) -> Attempt:
    """Return the attempt with the member of this process among the lost."""
    gone = {each.rank for each in attempt.claims if each.member.process == process}
    return dataclasses.replace(attempt, lost=tuple(sorted(gone | set(attempt.lost))))


def survives(ledger: Ledger, generation: int) -> bool:
    """Whether a member of this generation is a survivor of the world's last active one."""
    base = ledger.before or ledger.current
    return base is not None and base.generation == generation


def with_claim(waiting: Attempt, mine: Claim) -> tuple[Claim, ...]:
    """Return the attempt's claims with `mine`: in its seat's place, or last.

    An older claim of the same process is dropped: of a join that could not withdraw it.
    """
    claims = [
        mine if each.slot == mine.slot else each
        for each in waiting.claims
        if each.slot == mine.slot or each.member.process != mine.member.process
    ]
    return ranked(tuple(claims if mine in claims else (*claims, mine)))


def ranked(claims: tuple[Claim, ...]) -> tuple[Claim, ...]:
    """Return the claims with the ranks of their order."""
    return tuple(
        claim
        if claim.rank == rank
        else dataclasses.replace(claim, member=dataclasses.replace(claim.member, rank=rank))
        for rank, claim in enumerate(claims)
    )


def expected(ledger: Ledger, dead: frozenset[str] = frozenset()) -> tuple[Claim, ...]:
    """Return the claims in the present attempt of members that may still come to the open one.

    Args:
        ledger: with an open attempt, or none.
        dead: ids of claims whose processes are gone.
    """
    now, waiting = ledger.current, ledger.waiting
    if now is None or not now.terms.assigned:
        return ()
    there = () if waiting is None else waiting.claims
    processes = {each.member.process for each in there}
    return tuple(
        each
        for each in now.claims
        if each.rank not in now.lost and each.id not in dead and each.member.process not in processes
    )


def complete(ledger: Ledger, *, dead: frozenset[str] = frozenset(), last_call: bool = False) -> bool:
    """Whether the open attempt has all the members that it is to have.

    Args:
        ledger: the current one.
        dead: ids of claims, of the open attempt or the one before, whose processes are gone.
        last_call: whether its last call is over.
    """
    waiting = ledger.waiting
    if waiting is None or waiting.missing:
        return False
    if last_call:
        return True
    if expected(ledger, dead):
        return False
    return len(waiting.claims) >= waiting.terms.size or any(
        survives(ledger, each.was) for each in waiting.claims
    )


def choose(ledger: Ledger, waiting: Attempt) -> tuple[tuple[Claim, ...], tuple[Claim, ...]]:
    """Return the claims that make the generation, with their ranks, and those that wait for the next one."""
    survivors = sorted(
        (each for each in waiting.claims if survives(ledger, each.was)), key=lambda each: each.held
    )
    order = (*survivors, *(each for each in waiting.claims if not survives(ledger, each.was)))
    size = waiting.terms.size
    return ranked(order[:size]), ranked(order[size:])
