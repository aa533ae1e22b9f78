"""The matrix as a JSON file: read, merged, written."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from m8d_build.files.digests import MIXED, UNKNOWN
from matrix.cells import Target
from matrix.outcome import Row

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["SCHEMA", "Column", "Results", "read", "write"]

SCHEMA = 1


@dataclass(frozen=True)
class Column:
    """A target and what is known of its build.

    Attributes:
        target: build and backend.
        facts: "torch", "cuda", "nccl", and, patched, "topics"; "sources" and "series": digests of what it was made from
            (`m8d_build.files.digests`).
        date: of its last run, ISO.
    """

    target: Target
    facts: dict[str, str]
    date: str


@dataclass(frozen=True)
class Results:
    """All that is known.

    Attributes:
        columns: in the order of the page.
        rows: by column, scenario, mode, run.
    """

    columns: tuple[Column, ...] = ()
    rows: tuple[Row, ...] = field(default=())

    @property
    def targets(self) -> tuple[Target, ...]:
        """The columns' targets."""
        return tuple(column.target for column in self.columns)

    def of(self, target: Target) -> list[Row]:
        """Return the rows of a column."""
        return [row for row in self.rows if (row.build, row.backend) == (target.build, target.backend)]

    def merged(
        self, columns: Iterable[Column], rows: Iterable[Row], *, order: Iterable[tuple[str, str]]
    ) -> Results:
        """Put newer rows in place of older ones; what was not run again stays.

        Args:
            columns: of the builds that were run.
            rows: of this run.
            order: (scenario, mode) as they come on the page; a row of a cell that is no more falls away.
        """
        place = {key: number for number, key in enumerate(order)}
        together = {column.target.name: column for column in self.columns}
        together |= {column.target.name: column for column in columns}
        sorted_columns = sorted(together.values(), key=lambda each: _rank(each.target))
        ranks = {
            (column.target.build, column.target.backend): number
            for number, column in enumerate(sorted_columns)
        }
        newer = {row.key: row for row in rows}
        kept = {row.key: row for row in self.rows} | newer
        stayed = {(row.build, row.backend) for key, row in kept.items() if key not in newer}
        older = {column.target.name: column for column in self.columns}
        sorted_columns = [
            _mixed(older[each.target.name], each)
            if each.target.name in older and (each.target.build, each.target.backend) in stayed
            else each
            for each in sorted_columns
        ]
        known = [
            row
            for row in kept.values()
            if (row.build, row.backend) in ranks and (row.scenario, row.mode) in place
        ]
        known.sort(key=lambda row: (ranks[row.build, row.backend], place[row.scenario, row.mode], row.repeat))
        return Results(tuple(sorted_columns), tuple(known))


def _mixed(older: Column, newer: Column) -> Column:
    """Return the newer column, which keeps rows of the older: what they were made from may differ."""
    facts = {
        name: value if older.facts.get(name, UNKNOWN) == value or name not in {"sources", "series"} else MIXED
        for name, value in newer.facts.items()
    }
    return Column(newer.target, facts, newer.date)


def _rank(target: Target) -> tuple[tuple[int, ...], bool, str]:
    version = tuple(int(part) for part in target.torch.split(".") if part.isdecimal())
    return version, target.patched, target.backend


def read(path: Path) -> Results:
    """Read a file; one that is not there, or of another schema, is no results.

    Raises:
        ValueError: it is no JSON.
    """
    if not path.is_file():
        return Results()
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if data.get("schema") != SCHEMA:
        return Results()
    columns = tuple(Column(Target(**each["target"]), each["facts"], each["date"]) for each in data["columns"])
    return Results(columns, tuple(map(Row.from_json, data["rows"])))


def write(path: Path, results: Results) -> None:
    """Write them, a row a line: a file that a diff can be read of."""

    def lines(items: Iterable[Any]) -> str:
        return ",\n".join(f"  {json.dumps(item, ensure_ascii=False)}" for item in items)

    text = (
        f'{{\n"schema": {SCHEMA},\n"columns": [\n'
        + lines(asdict(column) for column in results.columns)
        + '\n],\n"rows": [\n'
        + lines(row.as_json() for row in results.rows)
        + "\n]\n}\n"
    )
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
