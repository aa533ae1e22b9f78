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

A generation that works is succeeded without a breakage where newcomers wait or members want to leave (`due`):
all its members but those that leave claim again, as ``working``, and only with all of them is the attempt
complete. It is active once all are ready and have agreed at which of their advances they enter it: each says
one that it will not pass before it knows of all others (`Attempt.limits`), and the highest of these is taken.
Until then a failure leaves the generation before as it was.

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
    "all_entered",
    "choose",
    "complete",
    "due",
    "enter",
    "expected",
    "leave",
    "leaves",
    "limit",
    "ranked",
    "remembered",
    "settled",
    "survives",
    "with_claim",
    "without_process",
    "working",
]

_NO_TOKEN = "0" * 32  # of a generation that a survivor remembers: nobody joins it any more


def remembered(ledger: Ledger, request: JoinRequest) -> Ledger:
    """Return the ledger with what the claimant knows of its last generation: the members, and who is lost."""
    if not request.past:
        return ledger
    number, lost = request.past_generation, set(request.lost)
    if ledger.last < number or (ledger.last == number and ledger.current is None):
        claims = tuple(Claim(member.process[-16:], member, number, number) for member in request.past)
        everyone = tuple(member.rank for member in request.past)
        past = Attempt(
            0, request.terms, claims, number, _NO_TOKEN,
            ready=everyone, over=() if request.working else (request.past_rank,), lost=tuple(sorted(lost)),
            left=tuple(sorted(request.left)),
        )  # fmt: skip
        return dataclasses.replace(ledger, last=number, current=past, before=None)
    if (now := _with_lost(ledger.current, number, lost, request.left)) is not ledger.current:
        return dataclasses.replace(ledger, current=now)
    if (before := _with_lost(ledger.before, number, lost, request.left)) is not ledger.before:
        return dataclasses.replace(ledger, before=before)
    return ledger


def _with_lost(
    attempt: Attempt | None, generation: int, lost: set[int], left: tuple[int, ...]
) -> Attempt | None:
    if attempt is None or attempt.generation != generation or lost <= set(attempt.lost):
        return attempt
    known, parted = (
        tuple(sorted(rank for rank in more | set(had) if rank < attempt.size))
        for more, had in ((lost, attempt.lost), (set(left), attempt.left))
    )
    return dataclasses.replace(attempt, lost=known, left=parted)


def without_process(attempt: Attempt, process: str) -> Attempt:
    """Return the attempt with the member of this process, which has left, among the lost."""
    gone = {each.rank for each in attempt.claims if each.member.process == process}
    return dataclasses.replace(
        attempt,
        lost=tuple(sorted(gone | set(attempt.lost))),
        left=tuple(sorted(gone | set(attempt.left))),
    )


def survives(ledger: Ledger, claim: Claim) -> Claim | None:
    """Return the claim of the same process in the world's last active generation; None for a newcomer.

    A process that was in that generation, and came back without what it knew of it, is a newcomer. One that
    had not entered it when it broke is a survivor: it was in the one beside which that was prepared.
    """
    base = ledger.before or ledger.current
    if base is None or not claim.was or claim.was not in {base.generation, base.after}:
        return None
    return next((each for each in base.holders if each.member.process == claim.member.process), None)


def due(ledger: Ledger, generation: int, dead: frozenset[str] = frozenset()) -> bool:
    """Whether this generation, which works, is to be succeeded by one with other members.

    Args:
        ledger: the current one.
        generation: the active one's number.
        dead: ids of claims whose processes are gone.
    """
    now, waiting = ledger.current, ledger.waiting
    if now is None or now.generation != generation or not now.active or now.over or not now.terms.assigned:
        return False
    staying = _staying(now)
    coming = 0
    if waiting is not None and waiting.terms == now.terms:
        taken = {each.slot for each in staying}
        coming = sum(
            each.slot not in taken and each.id not in dead and now.of_process(each.member.process) is None
            for each in waiting.claims
        )
    size = min(len(staying) + coming, now.terms.size)
    return size >= now.terms.least and (size > len(staying) or len(staying) < now.size)


def leave(ledger: Ledger, generation: int, rank: int) -> Ledger:
    """Note that a member of the active generation wants to leave at an advance."""
    now = ledger.current
    if now is None or now.generation != generation or not now.terms.assigned or rank in now.leaving:
        return ledger
    leaving = tuple(sorted((*now.leaving, rank)))
    return dataclasses.replace(ledger, current=dataclasses.replace(now, leaving=leaving))


def leaves(ledger: Ledger, generation: int, rank: int) -> bool:
    """Whether a member of the active generation is not to be in the next one, as it wanted."""
    now = ledger.current
    return (
        now is not None and now.generation == generation and all(each.rank != rank for each in _staying(now))
    )


def _staying(attempt: Attempt) -> tuple[Claim, ...]:
    """The members that prepare the next generation; where all want to leave, they first let newcomers in."""
    staying = tuple(each for each in attempt.claims if each.rank not in attempt.leaving)
    return staying or attempt.claims


def limit(ledger: Ledger, after: int, rank: int, advance: int) -> Ledger:
    """Say for a member of the generation `after` which advance it will not pass before all have said theirs.

    The last one makes the generation that is prepared beside it active. Nothing changes unless all members of
    that are ready.
    """
    now = ledger.current
    if now is None or now.after != after or now.unready or now.limits[rank]:
        return ledger
    limits = (*now.limits[:rank], advance, *now.limits[rank + 1 :])
    said = dataclasses.replace(now, limits=limits)
    return dataclasses.replace(ledger, current=said, before=None if said.active else ledger.before)


def enter(ledger: Ledger, after: int, rank: int) -> Ledger:
    """Note that a member of the generation `after` has left it for the one that was prepared beside it."""
    now = ledger.current
    if now is None or not after or now.after != after or rank in now.entered:
        return ledger
    entered = tuple(sorted((*now.entered, rank)))
    return dataclasses.replace(ledger, current=dataclasses.replace(now, entered=entered))


def all_entered(ledger: Ledger, after: int) -> bool:
    """Whether no member is in the generation `after` any more, as far as the ledger knows."""
    now = ledger.current
    return now is None or now.after != after or len(now.entered) == len(now.limits)


def settled(ledger: Ledger, request: JoinRequest) -> Ledger | None:
    """Return the ledger in which a claimant of the present generation may claim; None where it may not.

    Members say in different moments that their generation broke. The first that does so ends the preparation
    of the next one: claims of members for which it still works are dropped. After that it works for none.
    """
    now, waiting = ledger.current, ledger.waiting
    mine = None if now is None else now.of_process(request.process)
    if now is None or mine is None:
        return None if request.working else ledger
    there = () if waiting is None else waiting.claims
    members = {each.member.process for each in now.claims}
    if request.working:
        works = now.active and not now.over and now.generation == request.past_generation
        reforming = any(each.member.process in members and not each.working for each in there)
        return ledger if works and not reforming else None
    if waiting is None or not working(waiting):
        return ledger
    left = ranked(tuple(each for each in there if not each.working))
    waiting = dataclasses.replace(waiting, claims=left) if left else None
    return dataclasses.replace(ledger, waiting=waiting)


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
    waiting, now = ledger.waiting, ledger.current
    if waiting is None or waiting.missing:
        return False
    if working(waiting):
        there = {each.member.process for each in waiting.claims if each.working}
        return (
            now is not None
            and due(ledger, now.generation, dead)
            and all(each.member.process in there for each in _staying(now))
        )
    if last_call:
        return True
    if expected(ledger, dead):
        return False
    return len(waiting.claims) >= waiting.terms.size or any(
        survives(ledger, each) is not None for each in waiting.claims
    )


def working(attempt: Attempt) -> bool:
    """Whether an attempt is that of a generation which is prepared beside one that works."""
    return any(each.working for each in attempt.claims)


def choose(ledger: Ledger, waiting: Attempt) -> tuple[tuple[Claim, ...], tuple[Claim, ...]]:
    """Return the claims that make the generation, with their ranks, and those that wait for the next one."""
    held = {each.id: past.rank for each in waiting.claims if (past := survives(ledger, each)) is not None}
    survivors = sorted((each for each in waiting.claims if each.id in held), key=lambda each: held[each.id])
    newcomers = [dataclasses.replace(each, was=0) for each in waiting.claims if each.id not in held]
    order, size = (*survivors, *newcomers), waiting.terms.size
    return ranked(order[:size]), ranked(order[size:])
