"""Waits-for relation of a world's members, from their reports.

The reports are not of the same moment: an operation that moves may seem to wait. What counts is an operation
that waits for seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiworld._core.operations.report import calls_of_collectives
from multiworld.pending import PendingOperation

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from multiworld._core.operations.report import MemberReport, Operation

__all__ = ["pending_operations"]

_SILENT = "does not answer"

_MOVES = 1.0
"""Seconds: a member whose operations are younger than this goes on with its work."""

_NAMED = 3
"""Operations that are named of a member that is in more."""

_GIVEN_BY_ROOT = frozenset({"broadcast", "scatter"})
"""Collectives in which all others only receive from the root."""


def pending_operations(
    reports: Mapping[int, MemberReport | None], silent: Mapping[int, str] | None = None
) -> tuple[PendingOperation, ...]:
    """Return the operations that are not over, those first that have been waited for longest.

    Args:
        reports: by rank, of all members; None of one that does not answer.
        silent: what is known of those, by rank: "is stopped".
    """
    known = {} if silent is None else silent
    resting = _resting(reports)
    found = [*_collectives(reports, known, resting), *_messages(reports, known, resting)]
    return tuple(sorted(found, key=lambda each: -each.seconds))


def _collectives(
    reports: Mapping[int, MemberReport | None], silent: Mapping[int, str], resting: Collection[int]
) -> Iterator[PendingOperation]:
    for (group, number), every in calls_of_collectives(reports).items():
        calls = {rank: each for rank, each in every.items() if each.pending}
        if not calls:
            continue
        first = max(calls.values(), key=lambda each: each.began)
        waiting = {rank: each.began for rank, each in calls.items() if _alike(each, first)}
        missing = {
            rank: silent.get(rank, _SILENT)
            if (report := reports.get(rank)) is None
            else _instead_of(number, group, every.get(rank), report, first)
            for rank in first.ranks
            if rank not in waiting
            and not _has_ended(reports.get(rank), group, number, every.get(rank), first)
        }
        root = first.peer
        idle = first.kind in _GIVEN_BY_ROOT and list(missing) == [root] and root in resting
        yield PendingOperation(
            first.kind, number, first.size, first.ranks, root, None, waiting, missing, idle
        )


def _alike(one: Operation, other: Operation) -> bool:
    return (one.kind, one.peer, one.size) == (other.kind, other.peer, other.size)


def _has_ended(
    report: MemberReport | None, group: int, number: int, call: Operation | None, first: Operation
) -> bool:
    """Whether a member was in a collective, and is not any more: a root may be done before the others.

    Where calls are in another order, one may have ended with what another call had sent: that is no end.
    """
    if report is None or call is None:
        return report is not None and report.begun.get(group, 0) >= number
    return not call.pending and (call.kind, call.peer) == (first.kind, first.peer)


def _instead_of(
    number: int, group: int, call: Operation | None, report: MemberReport, first: Operation
) -> str:
    if call is None:
        return f"is at #{report.begun.get(group, 0)}, {_doing(report)}"
    if call.pending:
        said = f"is in {call.kind} #{number} since {call.began:.1f} s, another call"
    else:
        said = f"was in {call.kind} #{number}, another call"
    if call.kind != first.kind:
        return said
    if call.peer != first.peer:
        return f"{said}: its root is {call.peer}, and not {first.peer}"
    return f"{said}: it gave {call.size} bytes, and not {first.size}"


def _doing(report: MemberReport) -> str:
    named = [f"{each.name} since {each.began:.1f} s" for each in report.pending[-_NAMED:]]
    if named:
        return f"in {' and '.join(named)}"
    if not report.operations:
        return "in no operation of this world, and has called none"
    last = report.operations[-1]
    since = "" if last.ended is None else f", over since {last.ended:.1f} s"
    return f"in no operation of this world (its last: {last.name}{since})"


def _messages(
    reports: Mapping[int, MemberReport | None], silent: Mapping[int, str], resting: Collection[int]
) -> Iterator[PendingOperation]:
    for rank, report in reports.items():
        for each in () if report is None else report.pending:
            if each.number is None:
                yield _message(rank, each, reports, silent, resting)


def _message(
    rank: int,
    each: Operation,
    reports: Mapping[int, MemberReport | None],
    silent: Mapping[int, str],
    resting: Collection[int],
) -> PendingOperation:
    others = _others(rank, each)
    missing = {}
    for other in others:
        report = reports.get(other)
        if report is None:
            missing[other] = silent.get(other, _SILENT)
        elif not any(_meet(rank, each, other, theirs) for theirs in report.pending):
            missing[other] = f"is {_doing(report)}"
    ranks = each.ranks if each.peer is None else tuple(sorted((rank, each.peer)))
    return PendingOperation(
        each.kind, None, each.size, ranks, each.peer, each.tag, {rank: each.began},
        missing if len(missing) == len(others) else {},
        each.kind == "recv" and bool(missing) and any(other in resting for other in others),
    )  # fmt: skip


def _meet(rank: int, one: Operation, other_rank: int, other: Operation) -> bool:
    """Whether two messages' ends belong together."""
    return (
        {one.kind, other.kind} == {"send", "recv"}
        and one.group == other.group
        and one.peer in {None, other_rank}
        and other.peer in {None, rank}
        and one.tag == other.tag
    )


def _others(rank: int, each: Operation) -> list[int]:
    """Return those that an operation of the member `rank` may be ended by: its peer, or any other."""
    return [other for other in each.ranks if other != rank] if each.peer is None else [each.peer]


def _resting(reports: Mapping[int, MemberReport | None]) -> frozenset[int]:
    """Return the members that are in no operation, or only wait, in the end, for one that is in none.

    Those of a circle, in which none can go on, are not among them, nor are those that wait for one of it.
    Each operation is looked at once, as often as it has members that may give what it waits for.
    """
    held: dict[int, set[int]] = {}  # by rank: operations that no resting member is known to end
    given_by: dict[int, list[tuple[int, int]]] = {}
    for rank, report in reports.items():
        if report is None:
            continue
        old = [each for each in report.pending if each.began >= _MOVES]
        held[rank] = set(range(len(old)))
        for place, each in enumerate(old):
            if each.kind == "recv" or (each.kind in _GIVEN_BY_ROOT and each.peer != rank):
                waits = rank, place
                for source in _others(rank, each):
                    given_by.setdefault(source, []).append(waits)
    resting = [rank for rank, places in held.items() if not places]
    for source in resting:  # grows meanwhile
        for rank, place in given_by.get(source, ()):
            if place in held[rank]:
                held[rank].remove(place)
                if not held[rank]:
                    resting.append(rank)
    return frozenset(resting)
