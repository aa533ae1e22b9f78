"""What was run on hardware, as a JSON file: read, merged, written."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from matrix.cells import Target
from matrix.outcome import Row

from hardware.selection import ORDER
from m8d_build.files.digests import MIXED, UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["SCHEMA", "Check", "Column", "Figure", "Records", "Run", "read", "write"]

SCHEMA = 1
RIGHT = "right"


@dataclass(frozen=True)
class Figure:
    """Something that was measured.

    Attributes:
        name: what.
        unit: "us", "MiB".
        value: a median.
        plain: the same of plain torch, in the same processes; None where it has nothing of the kind.
    """

    name: str
    unit: str
    value: float
    plain: float | None = None


@dataclass(frozen=True)
class Check:
    """Something whose result is right or not: values, worlds.

    Attributes:
        name: what was looked at.
        outcome: "right", or what was wrong.
        done: how many things were compared, or went through.
        refused: how many torch has no NCCL type for.
        ms: from a loss to the exception, of each.
        defects: what torch is known to do wrong, which is not counted as done: "name: issue".
        figures: what was measured.
    """

    name: str
    outcome: str
    done: int = 0
    refused: int = 0
    ms: tuple[int, ...] = ()
    defects: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()

    @property
    def right(self) -> bool:
        """Whether nothing was wrong."""
        return self.outcome == RIGHT


@dataclass(frozen=True)
class Column:
    """Where and with what something was run.

    Attributes:
        target: build and backend.
        placement: id of how the ranks shared the GPUs.
        gpu: the GPUs, in words.
        driver: of NVIDIA, its version.
        torch: "2.14.1+cu130".
        cuda: that torch was built for.
        nccl: the library's version.
        topics: of the patches in the build; empty for a stock one.
        date: of the last run, ISO.
        sources, series: digests of what it was made from (`m8d_build.files.digests`); "" if not recorded.
    """

    target: Target
    placement: str
    gpu: str
    driver: str
    torch: str
    cuda: str
    nccl: str
    topics: tuple[str, ...]
    date: str
    sources: str = UNKNOWN
    series: str = UNKNOWN

    @property
    def key(self) -> tuple[str, ...]:
        """What must be the same for figures to belong together."""
        return (self.gpu, self.driver, self.target.name, self.torch, self.nccl, self.placement)


@dataclass(frozen=True)
class Run:
    """A column and what came of it.

    Attributes:
        column: its head.
        rows: of scenarios.
        checks: of values and worlds.
        lacking: scenarios this machine has too few GPUs for.
        left_out: why anything else was left out ("--only lost.*"); () if that was not recorded.
    """

    column: Column
    rows: tuple[Row, ...] = ()
    checks: tuple[Check, ...] = ()
    lacking: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def merged(self, newer: Run) -> Run:
        """Put newer results in place of older ones of the same; what was not run again stays."""
        rows = {row.key: row for row in self.rows} | {row.key: row for row in newer.rows}
        checks = {check.name: check for check in self.checks} | {check.name: check for check in newer.checks}
        known = [row for row in rows.values() if (row.scenario, row.mode) in ORDER]
        known.sort(key=lambda row: (ORDER[row.scenario, row.mode], row.repeat))
        lacking = tuple(dict.fromkeys((*self.lacking, *newer.lacking)))
        left_out = tuple(dict.fromkeys((*self.left_out, *newer.left_out)))
        column = newer.column
        if len(known) > len({row.key for row in newer.rows}) or len(checks) > len(newer.checks):
            mixed = {
                name: MIXED
                for name in ("sources", "series")
                if getattr(self.column, name) != getattr(column, name)
            }
            column = replace(column, **mixed)
        return replace(
            newer,
            column=column,
            rows=tuple(known),
            checks=tuple(checks.values()),
            lacking=lacking,
            left_out=left_out,
        )


@dataclass(frozen=True)
class Records:
    """All that is known.

    Attributes:
        since: ISO date of the file's beginning.
        runs: one for each column.
    """

    since: str
    runs: tuple[Run, ...] = ()

    def merged(self, runs: Iterable[Run]) -> Records:
        """Add runs; those of a column that is there are put into it."""
        found = {run.column.key: run for run in self.runs}
        for run in runs:
            found[run.column.key] = found.get(run.column.key, Run(run.column)).merged(run)
        return replace(self, runs=tuple(found.values()))


def read(path: Path, *, today: str) -> Records:
    """Read a file; one that is not there, or of another schema, is an empty one that begins today.

    Raises:
        ValueError: it is no JSON.
    """
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if data.get("schema") != SCHEMA:
        return Records(today)
    return Records(data["since"], tuple(map(_run, data["runs"])))


def _run(data: dict[str, Any]) -> Run:
    head = dict(data["column"])
    column = Column(**{**head, "target": Target(**head["target"]), "topics": tuple(head["topics"])})
    checks = tuple(
        Check(
            **{
                **each,
                "ms": tuple(each["ms"]),
                "defects": tuple(each.get("defects", ())),
                "figures": tuple(Figure(**figure) for figure in each.get("figures", ())),
            }
        )
        for each in data["checks"]
    )
    rows = tuple(map(Row.from_json, data["rows"]))
    return Run(column, rows, checks, tuple(data["lacking"]), tuple(data.get("left_out", ())))


def write(path: Path, records: Records) -> None:
    """Write them, a row a line: a file that a diff can be read of."""

    def lines(items: Iterable[Any]) -> str:
        found = ",\n".join(f"  {json.dumps(item, ensure_ascii=False)}" for item in items)
        return f"[\n{found}\n ]" if found else "[]"

    runs = ",\n".join(
        f'{{"column": {json.dumps(asdict(run.column), ensure_ascii=False)},\n'
        f' "lacking": {json.dumps(run.lacking)}, "left_out": {json.dumps(run.left_out)},\n'
        f' "checks": {lines(asdict(each) for each in run.checks)},\n'
        f' "rows": {lines(row.as_json() for row in run.rows)}}}'
        for run in records.runs
    )
    text = f'{{\n"schema": {SCHEMA},\n"since": {json.dumps(records.since)},\n"runs": [' + runs + "]\n}\n"
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
