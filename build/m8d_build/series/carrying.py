"""A whole series carried to another version's files, in memory: what became of each topic. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from m8d_build.series.claims import Claims, claims_of, restate
from m8d_build.series.diffs import fit, render
from m8d_build.series.read import SERIES
from m8d_build.series.relocate import carry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from m8d_build.series.read import Patch, Series
    from m8d_build.series.relocate import Conflict

__all__ = ["CarriedSeries", "CarriedTopic", "carry_series", "counts", "shown"]


@dataclass(frozen=True)
class CarriedTopic:
    """What became of one patch.

    Attributes:
        topic: its topic.
        patch: its file's name.
        shifts: by how many lines each hunk that has a place was moved, in the order of the patch.
        adapted: whether what it adds was changed (the version that the marker names).
        refused: hunks, or whole files, that have no one place.
    """

    topic: str
    patch: str
    shifts: tuple[int, ...]
    adapted: bool
    refused: tuple[Conflict, ...]

    @property
    def state(self) -> str:
        """Return "refused", "adapted", "moved" or "exact"."""
        if self.refused:
            return "refused"
        return "adapted" if self.adapted else "moved" if any(self.shifts) else "exact"

    @property
    def says(self) -> str:
        """Return the same for people, with numbers."""
        moved = [shift for shift in self.shifts if shift]
        by = f", {len(moved)} of them moved by {_range(moved)} lines" if moved else ""
        count = len(self.shifts) + len(self.refused)
        hunks = f"{count} hunk{'s' * (count != 1)}{by}"
        return hunks + (f", {len(self.refused)} REFUSED" if self.refused else "")

    def as_json(self) -> dict[str, Any]:
        """Return it as values that JSON knows."""
        return {
            "topic": self.topic,
            "patch": self.patch,
            "state": self.state,
            "hunks": len(self.shifts) + len(self.refused),
            "moved_by_lines": list(self.shifts),
            "adapted": self.adapted,
            "refused": [_plain(conflict) for conflict in self.refused],
        }


@dataclass(frozen=True)
class CarriedSeries:
    """What became of a series.

    Attributes:
        contents: the new folder's files, by name; of no use where a topic is refused.
        topics: in the order of the series.
    """

    contents: dict[str, bytes]
    topics: tuple[CarriedTopic, ...]


def carry_series(
    series: Series,
    kept: Sequence[Patch],
    to: str,
    before: Mapping[str, bytes],
    origin: Mapping[str, bytes] | None,
) -> CarriedSeries:
    """Carry every patch.

    Args:
        series: made for another version.
        kept: its patches without those that are left out.
        to: the version it is carried to.
        before: that version's files, by path.
        origin: the files it was made for, to tell equal places apart.
    """
    contents = {SERIES: _listing(series, kept, to)}
    claims = Claims(to, tuple(patch.topic for patch in kept))
    state: dict[str, bytes | None] = dict(before)
    origins: dict[str, bytes | None] = dict(origin or {})
    topics = []
    for patch in series.patches:
        diffs, adapted = b"", False
        shifts: list[int] = []
        refused: list[Conflict] = []
        for file in patch.files:
            stated = restate(file, claims) if claims_of(file) else file
            if patch in kept:
                done = carry(stated, state.get(file.path), origins.get(file.path))
                shifts += done.shifts
                refused += done.conflicts
                adapted = adapted or stated != file
                state[file.path] = done.content
                diffs += render(done.file)
            if file.path in origins or file.created:
                origins[file.path] = fit(file, origins.get(file.path))[0]
        if patch in kept:
            contents[patch.name] = patch.header_text.encode() + diffs
            topics.append(CarriedTopic(patch.topic, patch.name, tuple(shifts), adapted, tuple(refused)))
    return CarriedSeries(contents, tuple(topics))


def counts(topics: Sequence[CarriedTopic]) -> tuple[int, int]:
    """Return how many hunks kept their place, and how many have another line number."""
    shifts = [shift for topic in topics for shift in topic.shifts]
    return shifts.count(0), len(shifts) - shifts.count(0)


def shown(version: str, to: str, patch: str, conflict: Conflict) -> str:
    """Return a conflict with both sides, for people.

    Args:
        version: the series' version.
        to: the version it is carried to.
        patch: the patch's file name.
        conflict: of that patch.
    """
    if conflict.hunk is None:
        return f"{patch}: {conflict.reason} in {to}"

    def side(name: str, at: int, lines: Sequence[bytes]) -> list[str]:
        body = [f"    | {line}" for line in _text(lines)]
        return [f"  {name}, line {at}:", *(body or ["    (nothing)"])]

    head = f"{patch}:{conflict.hunk.at}: {conflict.path}: {conflict.reason}"
    expected = side(f"expected ({version})", conflict.hunk.old_start, conflict.expected)
    return "\n".join([head, *expected, *side(f"there ({to})", conflict.found_at, conflict.found)])


def _listing(series: Series, kept: Sequence[Patch], to: str) -> bytes:
    """The ``series`` file, its comments kept, dropped patches left out, the version in it renamed."""
    names = {patch.name for patch in series.patches} - {patch.name for patch in kept}
    lines = (series.text or b"").decode().split("\n")
    renamed = (line.replace(series.version, to) if line.startswith("#") else line for line in lines)
    return "\n".join(line for line in renamed if line not in names).encode()


def _plain(conflict: Conflict) -> dict[str, Any]:
    hunk = conflict.hunk
    return {
        "file": conflict.path,
        "reason": conflict.reason,
        "line_of_patch": hunk.at if hunk else 0,
        "expected_at": hunk.old_start if hunk else 0,
        "expected": _text(conflict.expected),
        "there_at": conflict.found_at,
        "there": _text(conflict.found),
        "becomes": _text(hunk.new) if hunk else [],
    }


def _range(shifts: Sequence[int]) -> str:
    least, most = min(shifts), max(shifts)
    return f"{least:+}" if least == most else f"{least:+} to {most:+}"


def _text(lines: Sequence[bytes]) -> list[str]:
    return [line.decode(errors="replace").rstrip() for line in lines]
