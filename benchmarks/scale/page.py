"""The tables and pictures of `docs/scale.md`, from its record: ``python -m benchmarks.scale.page``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from benchmarks.scale.record import DOCS, RECORD, by_rule, load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from benchmarks.scale.record import Row, Tables

PAGE = DOCS / "scale.md"
_YEAR = 365.25 * 86400
_UNITS = (
    ("y", _YEAR), ("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 0.1), ("ms", 1e-3), ("µs", 1e-6),
)  # fmt: skip
_SOONEST = 5.0
"""Seconds: `hang_timeout` of the simulated worlds, before which no silence is judged."""
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def with_tables(text: str, tables: Tables) -> str:
    """The page's text with the tables that the record gives."""
    return _BLOCK.sub(lambda found: found[1] + TABLES[found[2]](tables) + found[4], text)


def seconds(value: float | None) -> str:
    """A time for people: 340 µs, 5.1 ms, 0.34 s, 12 min; nothing for none."""
    if value is None:
        return ""
    if value >= 1000 * _YEAR:
        return "> 1,000 y"
    for unit, size in _UNITS:
        if value >= (2 * size if size >= 60 else size):
            short = f"{value / (1.0 if unit == 's' else size):.2g}"
            return f"{float(short):g} {unit}"
    return "0"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _share(value: float) -> str:
    return f"{float(f'{100 * value:.2g}'):g} %"


def _grid(columns: dict[str, Callable[[Row], str]], rows: Iterable[Row]) -> str:
    """A table: for each column its head, and what it says of a row."""
    lines = [[*columns], ["---:"] * len(columns), *([say(row) for say in columns.values()] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _time(name: str) -> Callable[[Row], str]:
    return lambda row: seconds(row.get(name))


def _number(name: str) -> Callable[[Row], str]:
    return lambda row: _count(row[name])


def _part(name: str) -> Callable[[Row], str]:
    return lambda row: _share(row[name])


def _megabytes(row: Row) -> str:
    return _count(row["bytes"] / 1e6)


def _watching(tables: Tables) -> str:
    columns = {
        "members": _number("members"),
        "connections of each": _number("connections"),
        "of all": _number("pairs"),
        "signs of life a second, of each": _number("sent"),
        "of all ": _number("all"),
        "CPU of the watchdog's thread": _part("cpu"),
        "of it looking at every peer": _part("scan"),
        "to connect all": _time("join"),
    }
    return _grid(columns, tables["watching"])


def _verdicts(tables: Tables) -> str:
    columns = {
        "members": _number("members"),
        "killed: all know after": _time("crash"),
        "and all is said after": _time("settled"),
        "stopped: all know after": _time("stop"),
        "host cut off: all others know after": _time("host"),
    }
    return _grid(columns, tables["watching"])


def _reforming(tables: Tables) -> str:
    alone = {row["members"]: row for row in tables["alone"]}

    def without(say: Callable[[Row], str]) -> Callable[[Row], str]:
        return lambda row: say(alone[row["members"]]) if row["members"] in alone else ""

    columns = {
        "members": _number("members"),
        "agreed after": _time("agreed"),
        "active after": _time("active"),
        "compare-and-sets": _number("tries"),
        "MB through the store": _megabytes,
        "without letters: active after": without(_time("active")),
        "compare-and-sets ": without(_number("tries")),
        "MB ": without(_megabytes),
    }
    return _grid(columns, tables["reforming"])


def _losses(tables: Tables) -> str:
    def world(size: int) -> Callable[[Row], str]:
        def say(row: Row) -> str:
            between = 1 / (size * (size - 1) * by_rule(row["loss"]))
            return seconds(between) if between > _SOONEST else "at once"

        return say

    columns = {
        "packets lost": _part("loss"),
        "one member of one other, simulated: once in": lambda row: seconds(
            row.get("rate") and 1 / row["rate"]
        ),
        "by the rule": lambda row: seconds(1 / by_rule(row["loss"])),
        "a world of 64": world(64),
        "of 1,000": world(1000),
        "of 10,000": world(10_000),
    }
    more: list[Row] = [{"loss": loss} for loss in (0.05, 0.02, 0.01, 0.001)]
    return _grid(columns, sorted((*tables["losses"], *more), key=lambda row: -row["loss"]))


def _blackouts(tables: Tables) -> str:
    columns = {"a host is cut off for": _time("seconds"), "worlds that break": _part("broken")}
    return _grid(columns, tables["blackouts"])


def _real(tables: Tables) -> str:
    columns = {"members": _number("members")}
    for name, head, say in (
        ("join", "to connect all", _time),
        ("cpu", "CPU of the watchdog's thread", _part),
        ("crash", "killed: all know after", _time),
        ("agreed", "reform: agreed after", _time),
        ("active", "active after", _time),
    ):
        columns |= {head: say(name), f"{head}, simulated": say(f"{name}_sim")}
    columns["load"] = _number("load")
    return _grid(columns, tables["real"])


def _hosts(tables: Tables) -> str:
    def since_known(loss: str, what: str) -> Callable[[Row], str]:
        return lambda row: seconds(row[f"{loss}_{what}"] - row[f"{loss}_known"])

    columns = {
        "members": _number("members"),
        "hosts": _number("hosts"),
        "all have joined after": _time("join"),
        "a member is killed: all know after": _time("kill_known"),
        "from there: active again": since_known("kill", "active"),
        "first all_reduce": since_known("kill", "first"),
        "a host is cut off: the others know after": _time("host_known"),
        "from there: active again ": since_known("host", "active"),
        "first all_reduce ": since_known("host", "first"),
        "load": _number("load"),
    }
    return _grid(columns, tables["hosts"])


TABLES = {
    "watching": _watching, "verdicts": _verdicts, "reforming": _reforming, "losses": _losses,
    "blackouts": _blackouts, "real": _real, "hosts": _hosts,
}  # fmt: skip


def main() -> None:
    """Write the pictures and the tables."""
    from benchmarks.scale.pictures import draw_all  # noqa: PLC0415  (only this needs matplotlib)

    tables = load(RECORD)
    draw_all(tables, DOCS / "scale")
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), tables), encoding="utf-8")


if __name__ == "__main__":
    main()
