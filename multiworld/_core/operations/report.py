"""Report of one member: what it has done and is doing in a world, as a record and as JSON.

The members' clocks differ, so times are ages: seconds before the report was made.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "MAX_REPORT", "MAX_STACK", "MemberReport", "Operation", "as_dict", "calls_of_collectives", "from_dict",
    "from_json", "to_json", "whole",
]  # fmt: skip

MAX_REPORT = 64 << 10
"""Bytes of a report as JSON."""

MAX_STACK = 16 << 10
"""Characters of a report's stacks; what is longer is cut at its beginning: the innermost calls stand last."""


@dataclass(frozen=True)
class Operation:
    """One operation of a member.

    Attributes:
        group: number of the process group; 0 for the world's own.
        ranks: of the group's members, as ranks of the world.
        kind: "all_reduce", "send", "recv", ...
        number: of a collective among those of its group, from 1 on; None for messages.
        size: bytes of the tensor that was given.
        peer: a collective's root or a message's other end, as rank of the world; None: none, or any.
        tag: of a message; None for collectives.
        began: seconds ago.
        ended: seconds ago; None where it is not over, or where that was not seen.
        pending: whether it is not over.
    """

    group: int
    ranks: tuple[int, ...]
    kind: str
    number: int | None
    size: int
    peer: int | None
    tag: int | None
    began: float
    ended: float | None = None
    pending: bool = False

    @property
    def name(self) -> str:
        """The kind, with what tells it from others: "all_reduce #7", "send to 3 (tag 5)"."""
        if self.number is not None:
            return f"{self.kind} #{self.number}"
        where = {"send": f" to {self.peer}", "recv": f" from {self.peer}"}.get(self.kind, "")
        if self.kind == "recv" and self.peer is None:
            where = " from any rank"
        return f"{self.kind}{where}" + (f" (tag {self.tag})" if self.tag else "")


@dataclass(frozen=True)
class MemberReport:
    """What a member has done and is doing.

    Attributes:
        rank: of the member.
        begun: number of the last collective that it began, by the number of the group.
        operations: the last ones, in the order in which they began.
        stack: of its Python threads, innermost call last; "" where that was not asked for.
    """

    rank: int
    begun: dict[int, int] = field(default_factory=dict)
    operations: tuple[Operation, ...] = ()
    stack: str = ""

    @property
    def pending(self) -> tuple[Operation, ...]:
        """Those that are not over."""
        return tuple(each for each in self.operations if each.pending)


def calls_of_collectives(
    reports: Mapping[int, MemberReport | None],
) -> dict[tuple[int, int], dict[int, Operation]]:
    """Return the members' calls of each collective: (group, number) -> rank -> call."""
    found: dict[tuple[int, int], dict[int, Operation]] = {}
    for rank, report in reports.items():
        for each in () if report is None else report.operations:
            if each.number is not None:
                found.setdefault((each.group, each.number), {})[rank] = each
    return found


def to_json(report: MemberReport) -> bytes:
    """Return a report as JSON, at most `MAX_REPORT` bytes.

    Where it is longer, operations that are over are left out, and half of the others, until it fits.
    """
    stack = report.stack[-MAX_STACK:]
    operations = list(report.operations)
    while True:
        part = replace(report, operations=tuple(operations), stack=stack)
        data = json.dumps(as_dict(part), separators=(",", ":")).encode()
        if len(data) <= MAX_REPORT or not operations:
            return data[:MAX_REPORT]
        operations = [each for each in operations[len(operations) // 2 + 1 :] if each.pending]
        stack = stack[-MAX_STACK // 4 :]


def from_json(data: bytes) -> MemberReport | None:
    """Return the report; None where these bytes are none."""
    try:
        return from_dict(json.loads(data))
    except (ValueError, RecursionError):
        return None


def as_dict(report: MemberReport) -> dict[str, Any]:
    """Return a report as what JSON has."""
    return {
        "rank": report.rank,
        "begun": [[number, count] for number, count in report.begun.items()],
        "groups": [[each.group, list(each.ranks)] for each in _first_of_groups(report.operations)],
        "operations": [_row(each) for each in report.operations],
        "stack": report.stack,
    }


def from_dict(fields: Any) -> MemberReport | None:
    """Return the report of `as_dict`; None where it is none."""
    try:
        ranks = {int(number): tuple(map(int, each)) for number, each in fields["groups"]}
        return MemberReport(
            int(fields["rank"]),
            {int(number): int(count) for number, count in fields["begun"]},
            tuple(_operation(row, ranks) for row in fields["operations"]),
            str(fields["stack"]),
        )
    except (ValueError, TypeError, KeyError, OverflowError):
        return None


def _first_of_groups(operations: Iterable[Operation]) -> list[Operation]:
    return list({each.group: each for each in operations}.values())


def _row(each: Operation) -> list[Any]:
    ended = None if each.ended is None else round(each.ended, 4)
    return [
        each.group, each.kind, each.number, each.size, each.peer, each.tag, round(each.began, 4), ended,
        int(each.pending),
    ]  # fmt: skip


def _operation(row: Any, ranks: dict[int, tuple[int, ...]]) -> Operation:
    group, kind, number, size, peer, tag, began, ended, pending = row
    return Operation(
        int(group), ranks[int(group)], str(kind), whole(number), int(size), whole(peer), whole(tag),
        float(began), None if ended is None else float(ended), bool(pending),
    )  # fmt: skip


def whole(value: Any) -> int | None:
    """Return an int of any kind of whole number, as numpy has them, too; None of None."""
    return None if value is None else int(value)
