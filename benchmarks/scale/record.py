"""The record of the simulated curves, `docs/scale.json`: tables of rows of plain numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"
RECORD = DOCS / "scale.json"
Row = dict[str, Any]
Tables = dict[str, list[Row]]


def load(path: Path) -> Tables:
    """The tables."""
    tables: Tables = json.loads(path.read_text(encoding="utf-8"))
    return tables


def put(path: Path, table: str, row: Row) -> None:
    """Put a row in its place: that of the row whose first value is the same."""
    tables = load(path) if path.exists() else {}
    key = next(iter(row))
    rows = [each for each in tables.get(table, []) if each[key] != row[key]]
    rows.append({name: _short(value) for name, value in row.items()})
    tables[table] = sorted(rows, key=lambda each: each[key])
    path.write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")


def by_rule(loss: float) -> float:
    """False verdicts a second of one member about one other: a beat a second, lost five times each."""
    return loss**5


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
