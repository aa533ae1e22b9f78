"""Who waits for whom in a world, from the reports of its members.

The reports are not of the same moment: an operation that moves may seem to wait. What counts is an operation
that waits for seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiworld._core.operations.report import calls_of_collectives
from multiworld.pending import PendingOperation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
    found = [*_collectives(reports, known), *_messages(reports, known)]
    return tuple(sorted(found, key=lambda each: -each.seconds))


def _collectives(
    reports: Mapping[int, MemberReport | None], silent: Mapping[int, str]
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
            else _instead_of(number, group, calls.get(rank), report, first)
            for rank in first.ranks
            if rank not in waiting and not _has_ended(reports.get(rank), group, number, calls.get(rank))
        }
        root = first.peer
        idle = (
            first.kind in _GIVEN_BY_ROOT and list(missing) == [root] and _rests(root, reports, set(waiting))
        )
        yield PendingOperation(
            first.kind, number, first.size, first.ranks, root, None, waiting, missing, idle
        )


def _alike(one: Operation, other: Operation) -> bool:
    return (one.kind, one.peer, one.size) == (other.kind, other.peer, other.size)


def _has_ended(report: MemberReport | None, group: int, number: int, call: Operation | None) -> bool:
    """Whether a member was in a collective, and is not any more: a root may be done before the others."""
    return report is not None and call is None and report.begun.get(group, 0) >= number


def _instead_of(
    number: int, group: int, call: Operation | None, report: MemberReport, first: Operation
) -> str:
    if call is None:
        return f"is at #{report.begun.get(group, 0)}, {_doing(report)}"
    said = f"is in {call.kind} #{number} since {call.began:.1f} s, another call"
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
    reports: Mapping[int, MemberReport | None], silent: Mapping[int, str]
) -> Iterator[PendingOperation]:
    for rank, report in reports.items():
        for each in () if report is None else report.pending:
            if each.number is None:
                yield _message(rank, each, reports, silent)


def _message(
    rank: int, each: Operation, reports: Mapping[int, MemberReport | None], silent: Mapping[int, str]
) -> PendingOperation:
    others = [other for other in each.ranks if other != rank] if each.peer is None else [each.peer]
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
        each.kind == "recv" and bool(missing) and _source_rests(rank, each, reports, {rank}),
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


def _source_rests(
    rank: int, each: Operation, reports: Mapping[int, MemberReport | None], seen: set[int]
) -> bool:
    """Whether what a member waits to be given comes from one that rests."""
    if each.peer is not None:
        return _rests(each.peer, reports, seen)
    return any(_rests(other, reports, seen) for other in each.ranks if other != rank)


def _rests(rank: int | None, reports: Mapping[int, MemberReport | None], seen: set[int]) -> bool:
    """Whether a member is in no operation, or only waits, in the end, for one that is in none.

    Args:
        rank: of the member.
        reports: of all.
        seen: ranks of the members that wait for it; one of them again is a circle, in which none can go on.
    """
    report = None if rank is None else reports.get(rank)
    if rank is None or report is None or rank in seen:
        return False
    return all(
        (each.kind == "recv" or (each.kind in _GIVEN_BY_ROOT and each.peer != rank))
        and _source_rests(rank, each, reports, {*seen, rank})
        for each in report.pending
        if each.began >= _MOVES
    )
