"""A run as a JSON file: time, versions, machine, figures.

Kept records lie in benchmarks/results/; others in out/benchmarks/, which git ignores.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figures.figure import Figure, from_json, to_json
from benchmarks.figures.machine import same_kind

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "benchmarks" / "results"
OUT = ROOT / "out" / "benchmarks"
FORMAT = 1


class BadRecord(Exception):
    """A file is no record of this version; the message says which and why."""


@dataclass(frozen=True)
class PartRun:
    """How a part went.

    Attributes:
        form: "quick" or "full".
        seconds: it took.
        remarks: what it said beside its figures.
        missing: why figures are missing: it could not run here, or failed; "" if none are.
    """

    form: str
    seconds: float = 0.0
    remarks: tuple[str, ...] = ()
    missing: str = ""


@dataclass(frozen=True)
class Record:
    """One run.

    Attributes:
        when: it began; UTC, ISO 8601, seconds.
        multiworld: its version.
        commit: "+" behind it if files differed; "" outside a repository.
        machine: see `benchmarks.figures.machine.describe`, and "load_before", "load_after".
        options: the command line.
        parts: how each went, in the order they ran.
        figures: of all of them, in order.
        sources: digest of the code that was measured and measured with (`m8d_build.files.digests`); "" if not
            recorded.
    """

    when: str
    multiworld: str
    commit: str
    machine: dict[str, Any]
    options: tuple[str, ...]
    parts: dict[str, PartRun]
    figures: tuple[Figure, ...] = field(default=())
    sources: str = ""

    @property
    def name(self) -> str:
        """For a file: its time, and which parts if not many."""
        stamp = self.when[:19].replace(":", "").replace("T", "-")
        return f"{stamp}-{'-'.join(self.parts) if len(self.parts) <= 2 else 'all'}"

    def of(self, part: str) -> tuple[Figure, ...]:
        """The figures of a part."""
        return tuple(figure for figure in self.figures if figure.part == part)


def dump(record: Record) -> str:
    """JSON with a figure in each line: a difference between two files is readable. Six digits are kept."""
    head: dict[str, Any] = {"format": FORMAT}
    for each in dataclasses.fields(record):
        if each.name not in {"parts", "figures"}:
            head[each.name] = getattr(record, each.name)
    head["parts"] = {name: dataclasses.asdict(part) for name, part in record.parts.items()}
    head = _short(head)
    lines = [f"  {_line(name)}: {_line(value)}" for name, value in head.items() if name != "parts"]
    lines.append(
        _block("parts", [f"{_line(name)}: {_line(part)}" for name, part in head["parts"].items()], "{}")
    )
    lines.append(_block("figures", [_line(_short(to_json(figure))) for figure in record.figures], "[]"))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def parse(text: str) -> Record:
    """What `dump` wrote.

    Raises:
        BadRecord: it is none.
    """
    try:
        data = json.loads(text)
        if data.pop("format") != FORMAT:
            raise BadRecord(f"not of format {FORMAT}")
        parts = {
            name: PartRun(**{**part, "remarks": tuple(part["remarks"])})
            for name, part in data["parts"].items()
        }
        figures = tuple(from_json(each) for each in data["figures"])
        return Record(**{**data, "options": tuple(data["options"]), "parts": parts, "figures": figures})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadRecord(f"not a record: {type(error).__name__}: {error}") from error


def save(record: Record, folder: Path) -> Path:
    """Write a record into a folder; the path of its file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record.name}.json"
    path.write_text(dump(record), encoding="utf-8")
    return path


def load(path: Path) -> Record:
    """Read a record.

    Raises:
        BadRecord: the file is none.
        OSError: it cannot be read.
    """
    try:
        return parse(path.read_text(encoding="utf-8"))
    except BadRecord as error:
        raise BadRecord(f"{path}: {error}") from error


def stored(*folders: Path) -> tuple[list[Record], list[str]]:
    """Every record in some folders, the oldest first; and what is wrong with the other JSON files there."""
    found: list[Record] = []
    wrong: list[str] = []
    for path in sorted({path.resolve() for folder in folders for path in folder.glob("*.json")}):
        record = _try(path)
        if isinstance(record, Record):
            found.append(record)
        else:
            wrong.append(record)
    return sorted(found, key=lambda record: record.when), wrong


def _try(path: Path) -> Record | str:
    try:
        return load(path)
    except BadRecord as error:
        return str(error)


def previous(new: Record, older: Iterable[Record]) -> dict[str, Record]:
    """For each part the last earlier run of it, in the same form, on the same kind of machine."""
    found: dict[str, Record] = {}
    for record in older:
        if record.when >= new.when or not same_kind(record.machine, new.machine):
            continue
        for part in new.parts:
            if record.of(part) and record.parts[part].form == new.parts[part].form:
                best = found.get(part)
                if best is None or best.when < record.when:
                    found[part] = record
    return found


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _short(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_short(each) for each in value]
    return value


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _block(name: str, lines: list[str], brackets: str) -> str:
    if not lines:
        return f"  {_line(name)}: {brackets}"
    inside = ",\n".join(f"    {line}" for line in lines)
    return f"  {_line(name)}: {brackets[0]}\n{inside}\n  {brackets[1]}"
