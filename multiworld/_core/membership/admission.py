"""Membership protocol: pure steps on a world's `Ledger`.

An attempt makes a generation. Members claim their ranks in the open attempt; the claim that completes the
attempt seals it, which fixes members, generation and token; once every member has reported ready, the
generation is active. A failed attempt is closed with its reason, which all its members raise; the next join
opens another.

- An attempt may fill up while a generation is active. It is sealed only once that generation is known to be
  over: one of its members reported so or claims anew, or none of its processes lives.
- A claim on a claimed rank closes the attempt for all members, with three exceptions. A member of the
  generation before takes precedence over newcomers. A claim whose process gives no sign of life is taken over
  (a crashed process that was started again). A claim on a rank of an active generation waits, unnoticed by
  the active members.
- An attempt is sealed only after the processes of all members have been seen: the claim of a member that died
  while it waited is dropped, and its rank is waited for.
- Members that have all received a state in part only, from one that is lost, wait for one that has a state.
- A generation's number exceeds all that the store or any member knows. Sealing uses it up: if the attempt
  fails after that, no other roster has it.

Where ranks are assigned (`multiworld._core.membership.assigned`), members claim seats, a member that gives up
leaves the open attempt to the others, and a newcomer that disagrees is refused alone.

The store is trusted: every process that can write to it can join and can read the tokens.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

from multiworld._core.membership import assigned, majority, refusals
from multiworld._core.membership.ledger import FAILURES_KEPT, Attempt, Claim, Failure, Ledger
from multiworld._core.membership.request import JoinRequest
from multiworld._core.membership.roster import Roster
from multiworld._core.membership.state_sources import outdated

__all__ = [
    "ClaimState",
    "JoinRequest",
    "Move",
    "Phase",
    "claim",
    "claim_state",
    "drop",
    "expire",
    "fail",
    "fenced",
    "may_seal",
    "over",
    "over_for",
    "ready",
    "refuse",
    "roster",
    "seal",
    "withdraw",
]  # fmt: skip


class Phase(enum.Enum):
    """Phase of a claim."""

    OPEN = "open"
    SEALED = "sealed"
    ACTIVE = "active"
    CLOSED = "closed"


@dataclass(frozen=True)
class ClaimState:
    """State of a claim, according to the ledger.

    Attributes:
        phase: of its attempt, as far as this claim is concerned.
        attempt: the attempt, unless it is closed for this claim.
        failure: why it is closed.
    """

    phase: Phase
    attempt: Attempt | None = None
    failure: Failure | None = None


@dataclass(frozen=True)
class Move:
    """Result of a step.

    Attributes:
        ledger: the new one; the same object where there is nothing to write.
        attempt: number of the attempt concerned; 0 for none.
        refusal: failure for the caller to raise, once `ledger` is written.
        holder: claim that holds the requested rank; the caller checks whether its process lives.
    """

    ledger: Ledger
    attempt: int = 0
    refusal: Failure | None = None
    holder: Claim | None = None


def fenced(ledger: Ledger, request: JoinRequest) -> Failure | None:
    """Return the failure of a process that holds an older generation; None where it may claim.

    Its rank belongs to another process in a later, active generation.
    """
    now = ledger.current
    if now is None or not now.active or now.over or request.held_rank != request.rank or request.assigned:
        return None
    holder = now.at(request.slot)
    if (
        holder is None
        or holder.member.process == request.process
        or now.generation <= request.last_generation
    ):
        return None
    return refusals.stale(now, holder.member, request)


def claim(
    ledger: Ledger,
    request: JoinRequest,
    me: str,
    token: str,
    *,
    dead: frozenset[str] = frozenset(),
    seen: frozenset[str] = frozenset(),
    living: str = "",
    begins: bool = True,
) -> Move:
    """Claim the rank or seat that `request` asks for in the open attempt; open one if there is none.

    The claim that completes the attempt seals it, if the processes of the others are known to exist.

    Args:
        ledger: the current one.
        request: validated.
        me: id of the claim.
        token: for the generation, should this claim seal it.
        dead: ids of claims, of the open attempt or the one before, whose processes are gone, or silent for
            too long.
        seen: ids of claims whose processes exist.
        living: id of a claim that gave a sign of life.
        begins: see `majority.may_follow`.
    """
    if (stale := fenced(ledger, request)) is not None:
        return Move(ledger, refusal=stale)
    now = ledger.current
    if now is not None and now.has(me) and not now.active:
        # Another member has written this claim (`letters`), and the attempt was sealed.
        return Move(ledger, now.number)
    if not request.working:
        ledger = over_for(ledger, request.process)
    mine = Claim(me, request.member, request.last_generation)
    if request.assigned:
        ledger = assigned.remembered(ledger, request)
        settled = assigned.settled(ledger, request)
        if settled is None:
            return Move(ledger, refusal=refusals.not_working(request))
        ledger = settled
        mine = dataclasses.replace(
            mine, was=request.past_generation, step=request.step, working=request.working, torn=request.torn
        )
    ledger = _yielding(ledger, request)
    waiting = ledger.waiting
    if waiting is None:
        opened = Attempt(
            ledger.next_number, request.terms, assigned.ranked((mine,)) if request.assigned else (mine,)
        )
        ledger = dataclasses.replace(ledger, number=opened.number, waiting=opened)
        return Move(seal(ledger, opened.number, me, token, dead=dead, begins=begins), opened.number)
    waiting = _without(waiting, dead)
    if waiting.claims and waiting.terms != request.terms:
        failure = refusals.mismatch(waiting, request)
        if waiting.terms.assigned and request.assigned:
            return Move(ledger, waiting.number, refusal=failure)
        return _close(ledger, waiting, failure)
    holder = waiting.at(request.slot)
    if holder is not None and holder.id == me:
        return Move(ledger, waiting.number)
    if holder is not None:
        ours, theirs = _incumbent(ledger, mine), _incumbent(ledger, holder)
        if theirs and not ours:
            return Move(ledger, waiting.number, refusal=refusals.contested(waiting.number, request, holder))
        if ours == theirs:
            if holder.id == living and request.assigned:
                return Move(
                    ledger, waiting.number, refusal=refusals.contested(waiting.number, request, holder)
                )
            if holder.id == living:
                return _close(ledger, waiting, refusals.contested(waiting.number, request, holder))
            return Move(ledger, waiting.number, holder=holder)
    others = tuple(each for each in waiting.claims if each.slot != request.slot)
    if request.assigned:
        claims = assigned.with_claim(waiting, mine)
    else:
        claims = tuple(sorted((*others, mine), key=lambda each: each.rank))
    filled = dataclasses.replace(waiting, terms=request.terms, claims=claims)
    claimed = dataclasses.replace(ledger, waiting=filled)
    if {each.id for each in others} <= seen:
        claimed = seal(claimed, filled.number, me, token, dead=dead, begins=begins)
    return Move(claimed, filled.number)


def drop(ledger: Ledger, number: int, me: str, dead: frozenset[str]) -> Ledger:
    """Remove the claims of dead processes from the open attempt, as one of its members."""
    waiting = ledger.waiting
    if waiting is None or waiting.number != number or not waiting.has(me):
        return ledger
    left = _without(waiting, dead - {me})
    return ledger if left is waiting else dataclasses.replace(ledger, waiting=left)


def may_seal(ledger: Ledger, gone: int = 0) -> bool:
    """Whether the open attempt can be sealed once its members are complete.

    Args:
        ledger: the current one.
        gone: number of an attempt all of whose processes are dead, as the caller found.
    """
    now, waiting = ledger.current, ledger.waiting
    if now is None or now.number == gone or waiting is None:
        return waiting is not None
    if any(each.rank in now.over for each in now.holders):
        return True
    before = {each.member.process for each in now.holders}
    return any(each.member.process in before for each in waiting.claims)


def seal(
    ledger: Ledger,
    number: int,
    me: str,
    token: str,
    *,
    gone: int = 0,
    dead: frozenset[str] = frozenset(),
    last_call: bool = False,
    begins: bool = True,
) -> Ledger:
    """Seal the open attempt if it is complete and the previous generation is over.

    Sealing fixes members, their ranks, and number.

    Args:
        ledger: the current one.
        number: of the attempt.
        me: the calling member's claim.
        token: for the generation.
        gone: see `may_seal`.
        dead: see `assigned.complete`.
        last_call: see `assigned.complete`.
        begins: see `majority.may_follow`.
    """
    waiting, before = ledger.waiting, ledger.current
    if waiting is None or waiting.number != number or not waiting.has(me):
        return ledger
    if waiting.missing or not may_seal(ledger, gone):
        return ledger
    claims, rest = waiting.claims, tuple[Claim, ...]()
    if waiting.terms.assigned:
        if not assigned.complete(ledger, dead=dead, last_call=last_call):
            return ledger
        if not majority.may_follow(ledger, dead, begins=begins):
            return ledger
        claims, rest = assigned.choose(ledger, waiting)
        if all(each.torn for each in claims):
            return ledger
    known = (each.last for each in waiting.claims)
    generation = max(ledger.last, ledger.epoch, *known) + 1
    failures = ledger.failures
    if before is not None and not before.active:
        failures = _kept(
            failures, refusals.abandoned(before.number, "All its members joined anew before it was active")
        )
    sealed = dataclasses.replace(waiting, claims=claims, generation=generation, token=token)
    if before is not None and assigned.working(waiting):
        sealed = dataclasses.replace(sealed, after=before.generation, limits=(0,) * before.size)
    ledger = dataclasses.replace(ledger, last=generation, current=sealed, waiting=None, failures=failures)
    if not waiting.terms.assigned:
        return ledger
    if before is not None and before.active:
        ledger = dataclasses.replace(ledger, before=before)
    if rest:
        left = dataclasses.replace(waiting, number=ledger.next_number, claims=rest)
        ledger = dataclasses.replace(ledger, number=left.number, waiting=left)
    return ledger


def claim_state(ledger: Ledger, number: int, me: str, request: JoinRequest) -> ClaimState:
    """Return the state of the claim `me` in attempt `number`, or in the one that it was moved on to."""
    waiting, now = ledger.waiting, ledger.current
    if waiting is not None and waiting.has(me):
        return ClaimState(Phase.OPEN, waiting)
    if now is not None and _is_in(now, number, me, ledger):
        return ClaimState(Phase.ACTIVE if now.active else Phase.SEALED, now)
    if waiting is not None and waiting.number == number:
        return ClaimState(Phase.CLOSED, failure=refusals.replaced(waiting, request))
    if now is not None and now.number == number:
        return ClaimState(Phase.CLOSED, failure=refusals.replaced(now, request))
    failure = ledger.failure_of(number)
    return ClaimState(
        Phase.CLOSED,
        failure=failure or refusals.abandoned(number, "It was closed, and the store knows no more"),
    )


def ready(ledger: Ledger, number: int, me: str) -> Ledger:
    """Report the member ready; the last one makes the generation active."""
    now = ledger.current
    mine = None if now is None or now.number != number else now.of(me)
    if now is None or mine is None or mine.rank in now.ready:
        return ledger
    said = dataclasses.replace(now, ready=tuple(sorted((*now.ready, mine.rank))))
    return dataclasses.replace(ledger, current=said, before=None if said.active else ledger.before)


def fail(ledger: Ledger, number: int, me: str, failure: Failure, *, left: bool = False) -> Ledger:
    """Close the attempt with a reason; an active generation, or another attempt, is left unchanged.

    Where ranks are assigned, an open attempt goes on without this member.

    Args:
        ledger: the current one.
        number: of the attempt, or of the one that the claim was moved on from.
        me: id of the claim.
        failure: the reason.
        left: whether this member will not try again, so that the others need not wait for it.
    """
    waiting, now = ledger.waiting, ledger.current
    if waiting is not None and _is_in(waiting, number, me, ledger):
        if waiting.terms.assigned:
            return withdraw(ledger, waiting.number, me)
        return _close(ledger, waiting, failure).ledger
    if now is not None and _is_in(now, number, me, ledger) and not now.active:
        failures = _kept(ledger.failures, dataclasses.replace(failure, attempt=now.number))
        before = ledger.before
        if left and before is not None and (mine := now.of(me)) is not None:
            before = assigned.without_process(before, mine.member.process)
        return dataclasses.replace(ledger, current=before, before=None, failures=failures)
    return ledger


def withdraw(ledger: Ledger, number: int, me: str) -> Ledger:
    """Remove a claim from the open attempt, which continues without it."""
    waiting = ledger.waiting
    if waiting is None or waiting.number != number or not waiting.has(me):
        return ledger
    left = _without(waiting, frozenset({me}))
    return dataclasses.replace(ledger, waiting=left if left.claims else None)


def refuse(ledger: Ledger, failure: Failure) -> Ledger:
    """Close the open attempt, if any, because of a process that cannot claim a rank.

    Where ranks are assigned, the others do not need that process, and the attempt stays.
    """
    waiting = ledger.waiting
    return ledger if waiting is None or waiting.terms.assigned else _close(ledger, waiting, failure).ledger


def over(ledger: Ledger, number: int, me: str, *, left: bool = False) -> Ledger:
    """Report the generation over for this member; once it is for all, only its number is kept.

    Where ranks are assigned, a generation is kept until all its members are known to be lost or to have left.

    Args:
        ledger: the current one.
        number: of the attempt, or of the one that the claim was moved on from.
        me: id of the claim.
        left: whether the member will not come to the next generation.
    """
    now = ledger.current
    mine = None if now is None or not _is_in(now, number, me, ledger) else now.of(me)
    if now is None or mine is None or (mine.rank in now.over and not left):
        return ledger
    said = dataclasses.replace(now, over=tuple(sorted({*now.over, mine.rank})))
    ended = said.over
    if now.terms.assigned:
        mine_too = (mine.rank,) if left else ()
        ended = tuple(sorted({*now.lost, *mine_too}))
        said = dataclasses.replace(said, lost=ended, left=tuple(sorted({*now.left, *mine_too})))
    if said == now:
        return ledger
    if ledger.listed:  # a member that is only taken for lost may go on elsewhere
        ended = said.left if now.terms.assigned else ended
    return dataclasses.replace(ledger, current=None if len(ended) == now.size else said)


def over_for(ledger: Ledger, process: str) -> Ledger:
    """Report the active generation over for a process that claims its place in the next one."""
    now = ledger.current
    mine = None if now is None or not now.active else now.of_process(process)
    return ledger if now is None or mine is None else over(ledger, now.number, mine.id)


def expire(
    ledger: Ledger,
    number: int,
    me: str,
    request: JoinRequest,
    *,
    timeout: float,
    gone: int = 0,
    held: str = "",
    given: float = 0.0,
) -> Move:
    """Time the member's join out: close its attempt, or only withdraw where an active generation blocks it.

    Args:
        ledger: the current one.
        number: of the attempt, or of the one that the claim was moved on from.
        me: id of the claim.
        request: of the claim.
        timeout: of the join, seconds.
        gone: see `may_seal`.
        held: see `refusals.awaited`.
        given: see `refusals.late`.
    """
    state = claim_state(ledger, number, me, request)
    attempt, now = state.attempt, ledger.current
    if attempt is None or state.phase is Phase.ACTIVE:
        return Move(ledger, number)
    if state.phase is Phase.OPEN and now is not None and not may_seal(ledger, gone):
        holder = now.at(request.slot)
        refusal = fenced(ledger, request) or refusals.held(now, request, holder, timeout)
        return Move(withdraw(ledger, attempt.number, me), attempt.number, refusal=refusal)
    late = refusals.late(attempt, request, timeout, majority.elsewhere(ledger), held, given)
    return Move(fail(ledger, attempt.number, me, late), attempt.number, refusal=late)


def roster(attempt: Attempt, request: JoinRequest, me: str) -> Roster:
    """Return the roster of the sealed attempt for the member with the claim `me`."""
    mine = attempt.of(me)
    return Roster(
        world=request.world,
        generation=attempt.generation,
        rank=request.rank if mine is None else mine.rank,
        members=tuple(each.member for each in attempt.claims),
        token=bytes.fromhex(attempt.token),
        hang_timeout=request.hang_timeout,
        steps=tuple(each.step if each.was else outdated(each.step) for each in attempt.claims)
        if request.assigned
        else (),
        torn=tuple(each.rank for each in attempt.claims if each.torn),
    )


def _is_in(attempt: Attempt, number: int, me: str, ledger: Ledger) -> bool:
    """Whether the claim `me` of attempt `number` is in this one: the same, or one to which it was moved on.

    That one may have a lower number where the store is a list: a claim is counted anew at another server,
    until a member brings the attempt that was sealed with it.
    """
    return attempt.has(me) and (attempt.number >= number or ledger.listed)


def _without(attempt: Attempt, dead: frozenset[str]) -> Attempt:
    claims = tuple(each for each in attempt.claims if each.id not in dead)
    if len(claims) == len(attempt.claims):
        return attempt
    left = assigned.ranked(claims) if attempt.terms.assigned else claims
    return dataclasses.replace(attempt, claims=left)


def _yielding(ledger: Ledger, request: JoinRequest) -> Ledger:
    """The ledger without an open attempt of newcomers that disagree with the world as it is.

    It yields to members of that world, and where ranks are assigned to newcomers that agree with it.
    """
    waiting, now = ledger.waiting, ledger.current
    if waiting is None or now is None or waiting.terms == request.terms or now.terms != request.terms:
        return ledger
    members = {each.member.process for each in now.claims}
    if not request.assigned and request.process not in members:
        return ledger
    if any(each.member.process in members for each in waiting.claims):
        return ledger
    return _close(ledger, waiting, refusals.mismatch(waiting, request)).ledger


def _close(ledger: Ledger, waiting: Attempt, failure: Failure) -> Move:
    closed = dataclasses.replace(failure, attempt=waiting.number)
    new = dataclasses.replace(ledger, waiting=None, failures=_kept(ledger.failures, closed))
    return Move(new, closed.attempt, refusal=closed)


def _kept(failures: tuple[Failure, ...], new: Failure) -> tuple[Failure, ...]:
    return (*failures, new)[-FAILURES_KEPT:]


def _incumbent(ledger: Ledger, one: Claim) -> bool:
    holder = ledger.current.at(one.slot) if ledger.current is not None else None
    return holder is not None and holder.member.process == one.member.process
