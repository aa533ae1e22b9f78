"""The tables and pictures of docs/paper.md from the newest record: `python -m benchmarks.paper.page`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from benchmarks.figures import records
from benchmarks.figures.figure import quantile
from benchmarks.figures.machine import words
from benchmarks.figures.sizes import size_name
from benchmarks.figures.table import number, spread
from benchmarks.paper.layout import CAUGHT, FORMS, TOPOLOGIES, WORDS
from benchmarks.paper.theirs import ELEMENTS, SECONDS, lost, mb_per_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.figures.figure import Figure
    from benchmarks.figures.records import Record

PART = "paper"
DOCS = records.ROOT / "docs"
PAGE = DOCS / "paper.md"
HEADS = {**WORDS, CAUGHT: "torch.distributed, a thread and a handler for each sender"}
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def newest(found: Iterable[Record]) -> Record | None:
    """The last record that has figures of this part, a full run before a quick one."""
    own = [record for record in found if record.of(PART)]
    return max(own, key=lambda record: (record.parts[PART].form == "full", record.when), default=None)


def with_tables(text: str, record: Record) -> str:
    """The page's text with the tables that the record gives.

    Raises:
        KeyError: the text asks for a table that there is not.
    """
    return _BLOCK.sub(lambda found: found[1] + TABLES[found[2]](record) + found[4], text)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _run(record: Record) -> str:
    run = record.parts[PART]
    load = ", ".join(number(record.machine[name]) for name in ("load_before", "load_after"))
    commit = f", commit {record.commit}" if record.commit else ""
    when = record.when[:16].replace("T", " ")
    text = (
        f"- {when} UTC ({run.form}), multiworld {record.multiworld}{commit}, "
        f"sources {record.sources or 'not recorded'}\n"
        f"- on {words(record.machine)}; the measured processes: torch 2.4.0\n"
        f"- load before and after: {load} on {record.machine['cores']} cores\n"
        f"- record: [{record.name}.json](../benchmarks/results/{record.name}.json)\n"
    )
    return text + "".join(f"- {each}\n" for each in run.remarks)


def _told(figures: Iterable[Figure], **what: object) -> list[Figure]:
    return [each for each in figures if all(each.series.get(key) == value for key, value in what.items())]


def _values(figures: Iterable[Figure], key: str) -> list[int]:
    return sorted({each.series[key] for each in figures if key in each.series})


def _cell(found: Sequence[Figure]) -> str:
    if not found:
        return ""
    (figure,) = found
    if figure.unit != "ratio":
        return number(figure.value)
    return f"{number(figure.absolute or 0.0)} ({number(figure.value)})"


def _throughput(record: Record) -> str:
    figures = [each for each in record.of(PART) if each.name.startswith("throughput/")]
    text = ""
    for senders in _values(figures, "senders"):
        own = _told(figures, senders=senders)
        rows = [
            [
                size_name(size),
                topology,
                *(_cell(_told(own, bytes=size, topology=topology, form=form)) for form in FORMS),
            ]
            for size in _values(own, "bytes")
            for topology in TOPOLOGIES
            if _told(own, bytes=size, topology=topology)
        ]
        head = [f"{senders} sender{'s' if senders > 1 else ''}", "way", *(WORDS[form] for form in FORMS)]
        text += _table(head, rows) + "\n"
    return text


def _kept(record: Record) -> str:
    figures = [each for each in record.of(PART) if each.name.startswith("kept/")]
    rows = []
    for topology in TOPOLOGIES[1:]:
        for senders in _values(figures, "senders"):
            for size in _values(figures, "bytes"):
                own = _told(figures, kept=topology, senders=senders, bytes=size)
                cells = [_told(own, form=form) for form in FORMS]
                if any(cells):
                    said = [f"{number(each[0].value)} ({spread(each[0])})" if each else "" for each in cells]
                    rows.append([f"{topology}, {senders}, {size_name(size)}", *said])
    return _table(["way, senders, size", *(WORDS[form] for form in FORMS)], rows)


def _over_time(record: Record, what: str) -> dict[str, Figure]:
    return {
        each.series["form"]: each
        for each in record.of(PART)
        if each.name.startswith(f"{what}/") and "event" in each.series
    }


def _named(record: Record) -> dict[str, Figure]:
    return {each.name: each for each in record.of(PART)}


def _with_spread(figure: Figure | None) -> str:
    return "" if figure is None else f"{number(figure.value)} ({spread(figure)})"


def _fault(record: Record) -> str:
    named = _named(record)
    rows = []
    for form, figure in _over_time(record, "fault").items():
        error, stays = figure.series["error"], figure.series["stays_error"]
        ended = stays or ([] if quantile(figure.series["after"], 0.5) else ["", "nothing: the loop ended"])
        rows.append(
            [
                HEADS[form], number(figure.baseline or 0.0), number(figure.absolute or 0.0),
                _with_spread(figure), _with_spread(named.get(f"fault/{form}/noticed")),
                f"`{error[1]}`" if error else "nothing",
                ended[1] if ended else "goes on",
            ]
        )  # fmt: skip
    head = [
        "", "messages/s of the other before", "after", "after/before", "noticed after, ms",
        "its receive raised", "the other",
    ]  # fmt: skip
    return _table(head, rows)


def _join(record: Record) -> str:
    named = _named(record)
    rows = [
        [
            HEADS[form], _with_spread(figure), _with_spread(named.get(f"join/{form}/rate")),
            _with_spread(named.get(f"join/{form}/gap")),
        ]
        for form, figure in _over_time(record, "join").items()
    ]  # fmt: skip
    return _table(["", "join, ms", "rate of the first meanwhile, over before", "longest gap in it, ms"], rows)


def _theirs(_record: Record) -> str:
    head = ["bytes", *(f"{backend}, {hosts}: single, multi, lost" for backend, hosts in SECONDS)]
    rows = []
    for place, elements in enumerate(ELEMENTS):
        cells = []
        for both in SECONDS.values():
            single, multi = both["single"][place], both["multi"][place]
            rates = [number(mb_per_s(elements, each)) for each in (single, multi)]
            cells.append(f"{', '.join(rates)}, {lost(single, multi):.1f} %")
        rows.append([f"{4 * elements:,}", *cells])
    return _table(head, rows)


TABLES = {
    "run": _run, "throughput": _throughput, "kept": _kept, "fault": _fault, "join": _join, "theirs": _theirs,
}  # fmt: skip


def write() -> None:
    """Write the pictures and the tables.

    Raises:
        FileNotFoundError: no kept record has figures of this part.
    """
    from benchmarks.paper.pictures import draw_all  # noqa: PLC0415  (only this needs matplotlib)

    kept, _ = records.stored(records.KEPT)
    record = newest(kept)
    if record is None:
        raise FileNotFoundError(
            f"{records.KEPT} has no record of {PART}: run python -m benchmarks.paper --keep"
        )
    draw_all(record, DOCS / "paper")
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    write()
