"""Relocation of hunks into another version of a file: same place, moved, or conflict. Never a guess.

A hunk goes where its old lines stand exactly once. Where they stand more than once, nothing but more lines
around them can tell which place is meant; those come from the version the patch was made for, if it is given.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from m8d_build.files.blobs import blob_id
from m8d_build.series.diffs import ABSENT, fit, split_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from m8d_build.series.diffs import FilePatch, Hunk

__all__ = ["Carried", "Conflict", "carry"]

WIDEST = 40  # lines of added context after which two places count as equal


@dataclass(frozen=True)
class Conflict:
    """A hunk that has no place of its own in the other version.

    Attributes:
        path: the file.
        hunk: which one; None where the file as a whole does not carry.
        reason: why.
        expected: the lines the patch expects.
        found: the most similar lines of the other version.
        found_at: line number of ``found``, from 1.
    """

    path: str
    hunk: Hunk | None
    reason: str
    expected: tuple[bytes, ...] = ()
    found: tuple[bytes, ...] = ()
    found_at: int = 0


@dataclass(frozen=True)
class Carried:
    """One file's changes, carried.

    Attributes:
        file: with the line numbers and blob ids of the other version; conflicting hunks are left out.
        content: the other version's bytes afterwards.
        shifts: by how many lines each hunk was moved, in order; 0 where it kept its place.
        conflicts: hunks that were left out.
    """

    file: FilePatch
    content: bytes | None
    shifts: tuple[int, ...]
    conflicts: tuple[Conflict, ...]

    @property
    def exact(self) -> int:
        """Number of hunks that kept their place."""
        return self.shifts.count(0)

    @property
    def moved(self) -> int:
        """Number of hunks that have another line number."""
        return len(self.shifts) - self.exact


def carry(file: FilePatch, content: bytes | None, origin: bytes | None = None) -> Carried:
    """Carry one file's changes to another version's bytes.

    Args:
        file: the changes, made for another version.
        content: the file in the new version; None if it is not there.
        origin: the file the changes were made for, to tell equal places apart.
    """
    if (content is None) != file.created:
        reason = f"{file.path} is there already" if file.created else f"{file.path} is not there"
        return Carried(file, content, (), (Conflict(file.path, None, reason),))
    lines = split_lines(content or b"")
    same = content is None or blob_id(content) == file.pre_blob
    placed: list[Hunk] = []
    conflicts: list[Conflict] = []
    shifts: list[int] = []
    shift = end = 0
    origin_lines = split_lines(origin) if origin is not None and blob_id(origin) == file.pre_blob else None
    for hunk in file.hunks:
        places = [hunk.old_index] if same else _places(hunk, lines, origin_lines)
        if len(places) != 1 or places[0] < end:
            conflicts.append(_conflict(file.path, hunk, places, lines))
            continue
        place = places[0]
        shifts.append(place - hunk.old_index)
        placed.append(_at(hunk, place, shift))
        shift += len(hunk.new) - len(hunk.old)
        end = place + len(hunk.old)
    pre = ABSENT if content is None else blob_id(content)
    carried = dataclasses.replace(file, pre_blob=pre, hunks=tuple(placed))
    after, misfits = fit(carried, content)
    conflicts += (Conflict(file.path, misfit.hunk, misfit.reason) for misfit in misfits if not conflicts)
    post = ABSENT if after is None else blob_id(after)
    return Carried(
        file=dataclasses.replace(carried, post_blob=post),
        content=after,
        shifts=tuple(shifts),
        conflicts=tuple(conflicts),
    )


def _places(hunk: Hunk, lines: Sequence[bytes], origin: Sequence[bytes] | None) -> list[int]:
    """Return the indices where the hunk's old lines stand.

    Where the original is known, the lines around them are taken in until they name one place there: only then
    does one place in the other version mean the same one.
    """
    start, end = _at_start(hunk), _at_end(hunk)
    if origin is None:
        return _matches(hunk.old, lines, at_start=start, at_end=end)
    low, high = hunk.old_index, hunk.old_index + len(hunk.old)
    for margin in range(WIDEST + 1):
        above, below = origin[max(low - margin, 0) : low], origin[high : high + margin]
        block = [*above, *hunk.old, *below]
        if len(_matches(block, origin, at_start=start, at_end=end)) == 1:
            return [place + len(above) for place in _matches(block, lines, at_start=start, at_end=end)]
    return []


def _at_start(hunk: Hunk) -> bool:
    """A hunk with no line above it stands at the start of the file."""
    return hunk.leading == 0 and (hunk.trailing > 0 or hunk.old_index == 0)


def _at_end(hunk: Hunk) -> bool:
    """A hunk with lines above it and none below stands at the end of the file."""
    return hunk.trailing == 0 and hunk.leading > 0


def _matches(block: Sequence[bytes], lines: Sequence[bytes], *, at_start: bool, at_end: bool) -> list[int]:
    if not block:  # an insertion with no context says nothing about its place
        return [0] if at_start and not lines else []
    last = len(lines) - len(block)
    wanted = list(block)
    return [
        index
        for index in range(last + 1)
        if lines[index] == wanted[0]
        and lines[index : index + len(wanted)] == wanted
        and (not at_start or index == 0)
        and (not at_end or index == last)
    ]


def _at(hunk: Hunk, place: int, shift: int) -> Hunk:
    return dataclasses.replace(
        hunk,
        old_start=place + 1 if hunk.old_count else place,
        new_start=place + shift + 1 if hunk.new_count else place + shift,
    )


def _conflict(path: str, hunk: Hunk, places: Sequence[int], lines: Sequence[bytes]) -> Conflict:
    at = places[0] if places else _nearest(hunk, lines)
    alike = _matches(hunk.old, lines, at_start=_at_start(hunk), at_end=_at_end(hunk))
    if len(places) > 1:
        where = ", ".join(str(place + 1) for place in places)
        reason = f"ambiguous: its lines stand at lines {where}; --from-source can tell them apart"
    elif places:
        reason = "its place overlaps or comes before that of the hunk before it"
    elif alike:
        where = ", ".join(str(place + 1) for place in alike)
        reason = f"its lines stand at {where}, but not with the lines around them that told its place"
    elif not hunk.old:
        reason = "it has no context to find its place by"
    elif len(_matches(hunk.new, lines, at_start=False, at_end=False)) == 1:
        at = _matches(hunk.new, lines, at_start=False, at_end=False)[0]
        reason = "what it makes of these lines is there already"
    else:
        reason = "its lines are not there"
    found = tuple(lines[at : at + max(len(hunk.old), 1)])
    return Conflict(path, hunk, reason, expected=hunk.old, found=found, found_at=at + 1)


def _nearest(hunk: Hunk, lines: Sequence[bytes]) -> int:
    """Return where most of the hunk's lines stand in line; only shown to people, never acted on."""
    numbers: dict[bytes, list[int]] = {}
    for number, line in enumerate(lines):
        numbers.setdefault(line, []).append(number)
    votes = Counter(
        number - offset
        for offset, line in enumerate(hunk.old)
        if line.strip()
        for number in numbers.get(line, ())
        if number >= offset
    )
    if not votes:
        return min(hunk.old_index, max(len(lines) - 1, 0))
    return max(votes, key=lambda place: (votes[place], -abs(place - hunk.old_index)))
