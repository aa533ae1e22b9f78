"""Overlaps: lines that several patches of a series touch, found without any source.

A file is a row of spans: lines some patch has shown us, and stretches nothing is known of. Laying patch after
patch over it shows where two change the same lines, and where one counts on lines an earlier one has changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from m8d_build.series.diffs import FilePatch, Hunk

__all__ = ["Clash", "Sketch"]

ENDLESS = 1 << 40


@dataclass(frozen=True)
class _Unknown:
    count: int


@dataclass(frozen=True)
class _Known:
    text: bytes
    owner: str  # the patch that added the line; "" for a line of PyTorch's


@dataclass(frozen=True)
class Clash:
    """Two patches that meet in one place.

    Attributes:
        hunk: the later patch's hunk.
        owner: the earlier patch's name; "" where the line is one the earlier patch only showed as context.
        spoiled: the later patch expects other lines than the earlier one leaves (else: it changes its lines).
    """

    hunk: Hunk
    owner: str
    spoiled: bool


class Sketch:
    """What is known of one file while patches are laid over it in order."""

    def __init__(self) -> None:
        self._spans: list[_Unknown | _Known] = [_Unknown(ENDLESS)]

    def lay(self, name: str, file: FilePatch) -> tuple[Clash, ...]:
        """Lay one patch's changes over the file and return where it meets an earlier patch."""
        if file.created:
            self._spans = []
        clashes: dict[tuple[int, str, bool], Clash] = {}
        done: list[_Unknown | _Known] = []
        position = 0
        rest = _Spans(self._spans)
        for hunk in file.hunks:
            while position < hunk.old_index:
                span = rest.take(hunk.old_index - position)
                if span is None:
                    break
                done.append(span)
                position += span.count if isinstance(span, _Unknown) else 1
            for line in hunk.lines:
                if line.tag == "+":
                    owner = _enclosing(done, rest.peek(), name)
                    if owner:
                        clashes[hunk.at, owner, False] = Clash(hunk, owner, spoiled=False)
                    done.append(_Known(line.text, name))
                    continue
                span = rest.take(1)
                position += 1
                if isinstance(span, _Known) and span.text != line.text:
                    clashes[hunk.at, span.owner, True] = Clash(hunk, span.owner, spoiled=True)
                elif isinstance(span, _Known) and line.tag == "-" and span.owner:
                    clashes[hunk.at, span.owner, False] = Clash(hunk, span.owner, spoiled=False)
                if line.tag == " ":
                    owner = span.owner if isinstance(span, _Known) else ""
                    done.append(_Known(line.text, owner))
        self._spans = [*done, *rest.remaining()]
        return tuple(clashes.values())


def _enclosing(done: list[_Unknown | _Known], after: _Unknown | _Known | None, name: str) -> str:
    """Return the earlier patch whose added lines stand on both sides of this place, "" if there is none.

    A place at the edge of another patch's lines is nobody's.
    """
    before = next((s for s in reversed(done) if not (isinstance(s, _Known) and s.owner == name)), None)
    if isinstance(before, _Known) and isinstance(after, _Known) and before.owner == after.owner:
        return before.owner
    return ""


class _Spans:
    """Takes spans from the front, cutting unknown stretches where asked."""

    def __init__(self, spans: list[_Unknown | _Known]) -> None:
        self._spans = list(reversed(spans))

    def take(self, limit: int) -> _Unknown | _Known | None:
        """Return the next span, of ``limit`` lines at most; None at the end."""
        if not self._spans:
            return None
        span = self._spans.pop()
        if isinstance(span, _Unknown) and span.count > limit:
            self._spans.append(_Unknown(span.count - limit))
            return _Unknown(limit)
        return span

    def peek(self) -> _Unknown | _Known | None:
        """Return the next span without taking it."""
        return self._spans[-1] if self._spans else None

    def remaining(self) -> Iterator[_Unknown | _Known]:
        """Return what was not taken."""
        return reversed(self._spans)
