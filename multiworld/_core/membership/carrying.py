"""Values that members carry over from a store that is gone to the one that follows it. Pure.

Only where the store is a list of addresses (`serving`): a member brings what it has read last in the record
of its world, and its own claim. What is later counts. What members have said of one generation adds up,
whichever member brings it, in any order.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from multiworld._core.membership import assigned
from multiworld._core.membership.ledger import FAILURES_KEPT, Attempt, Claim, Ledger

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["carried"]


def carried(there: Ledger, mine: Ledger, me: str = "") -> Ledger:
    """Return the record of the present store with what a member knows of an older one.

    Args:
        there: the record; `there.epoch` is the store's.
        mine: as the member has read it last, in whichever store.
        me: the member's claim, which goes on; "" for none.
    """
    if mine.epoch > there.epoch:
        return there
    ledger = dataclasses.replace(
        there, number=max(there.number, mine.number), last=max(there.last, mine.last)
    )
    ledger = _without_failed(_with_attempts(ledger, there.last, mine), mine)
    return _with_claim(ledger, mine, me)


def _with_attempts(ledger: Ledger, last: int, mine: Ledger) -> Ledger:
    """With the later one of the sealed attempts, or with what both know of the same.

    Args:
        ledger: of the present store.
        last: the latest generation that was known there.
        mine: of the member.
    """
    ours = mine.current
    if ours is not None and ours.generation > last:
        waiting = ledger.waiting
        if waiting is not None and any(ours.has(each.id) for each in waiting.claims):
            left = tuple(each for each in waiting.claims if not ours.has(each.id))
            waiting = dataclasses.replace(waiting, claims=_ordered(left, waiting)) if left else None
        return dataclasses.replace(ledger, current=ours, before=mine.before, waiting=waiting)
    current, before = ledger.current, ledger.before
    for known in (mine.current, mine.before):
        current, before = _both(current, known), _both(before, known)
    if current is not None and current.active:
        before = None
    return dataclasses.replace(ledger, current=current, before=before)


def _both(there: Attempt | None, mine: Attempt | None) -> Attempt | None:
    if there is None or mine is None or there.generation != mine.generation or there == mine:
        return there
    sets: dict[str, Any] = {
        name: tuple(sorted({*getattr(there, name), *getattr(mine, name)}))
        for name in ("ready", "over", "lost", "leaving", "entered", "left")
    }
    if there.after == mine.after:
        return dataclasses.replace(there, limits=tuple(map(max, there.limits, mine.limits)), **sets)
    # One side is remembered (`assigned.remembered`) by a member that was in it: all had said their limits.
    whole = there if there.after else mine
    if not all(whole.limits):
        return dataclasses.replace(there, **(sets | {"after": 0, "limits": (), "entered": ()}))
    return dataclasses.replace(there, after=whole.after, limits=whole.limits, **sets)


def _without_failed(ledger: Ledger, mine: Ledger) -> Ledger:
    """Without a sealed attempt that has failed, as either side knows."""
    failures = ledger.failures + tuple(each for each in mine.failures if each not in ledger.failures)
    ledger = dataclasses.replace(ledger, failures=failures[-FAILURES_KEPT:])
    now = ledger.current
    if now is None or now.active or ledger.failure_of(now.number) is None:
        return ledger
    return dataclasses.replace(ledger, current=ledger.before, before=None)


def _with_claim(ledger: Ledger, mine: Ledger, me: str) -> Ledger:
    """With the member's own claim in the open attempt."""
    attempt = mine.waiting
    claim = None if attempt is None else attempt.of(me)
    waiting, now = ledger.waiting, ledger.current
    if attempt is None or claim is None or (now is not None and now.has(me)):
        return ledger
    if waiting is None:
        number = ledger.next_number
        opened = Attempt(number, attempt.terms, _ordered((claim,), attempt))
        return dataclasses.replace(ledger, number=number, waiting=opened)
    if waiting.terms != attempt.terms or waiting.at(claim.slot) is not None:
        return ledger
    joined = dataclasses.replace(waiting, claims=_ordered((*waiting.claims, claim), attempt))
    return dataclasses.replace(ledger, waiting=joined)


def _ordered(claims: Iterable[Claim], attempt: Attempt) -> tuple[Claim, ...]:
    if attempt.terms.assigned:
        return assigned.ranked(tuple(claims))
    return tuple(sorted(claims, key=lambda each: each.rank))
