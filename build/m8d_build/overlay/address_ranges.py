"""Address ranges: which code and symbols of a library come from which translation unit, without debug info.

The linker puts an object's .text in one piece, and names the source file before the local symbols it brought.
So the piece reaches at least from the first to the last of the unit's functions, and nothing else lies
between.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

from m8d_build.errors import CheckFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from m8d_build.elf.read import ObjectFile
    from m8d_build.elf.symbols import Symbol

__all__ = ["SymbolMap", "Window", "window_of"]

REACH = 1 << 20  # bytes; no unit is looked for farther away
USE_FULL = "Use --mode full for this wheel"


class SymbolMap:
    """A library's full symbol table, by name and by address.

    Args:
        symbols: of .symtab.

    Attributes:
        symbols: all of them.
    """

    def __init__(self, symbols: Sequence[Symbol]) -> None:
        self.symbols = symbols
        self._by_name: dict[str, list[Symbol]] = {}
        for symbol in symbols:
            if symbol.name and symbol.defined and symbol.kind not in {"FILE", "SECTION"}:
                self._by_name.setdefault(symbol.name, []).append(symbol)
        placed = [
            s for group in self._by_name.values() for s in group if s.kind in {"FUNC", "OBJECT", "IFUNC"}
        ]
        # Of several names for one place the strongest comes last, and is the one found.
        self._placed = sorted(placed, key=lambda s: (s.value, s.binding == "GLOBAL", s.size))
        self._addresses = [s.value for s in self._placed]

    def shared(self, name: str) -> Symbol | None:
        """Return the definition of a name that is not a file's own static."""
        return next((s for s in self._by_name.get(name, ()) if not s.group), None)

    def between(self, low: int, high: int) -> list[Symbol]:
        """Return the functions and objects that begin from address low up to before high."""
        return self._placed[bisect_left(self._addresses, low) : bisect_left(self._addresses, high)]

    def containing(self, address: int) -> Symbol | None:
        """Return what an address lies in, None if no symbol covers it."""
        at = bisect_left(self._addresses, address + 1)
        # Symbols overlap (aliases, parts): a few steps back are enough to find one that reaches here.
        for symbol in reversed(self._placed[max(0, at - 16) : at]):
            if symbol.value <= address < symbol.value + max(symbol.size, 1):
                return symbol
        return None


@dataclass(frozen=True)
class Window:
    """One unit's piece of a library's .text.

    Attributes:
        source: the unit's file name without folders.
        low: address of its first function.
        high: address after its last one; equal to ``low`` if it has none.
        group: number of the file symbol its statics stand under, 0 if it has none.
        foreign: what lies between and is of another file.
        unknown: functions between that the unit's object does not have.
    """

    source: str
    low: int
    high: int
    group: int
    foreign: tuple[Symbol, ...]
    unknown: tuple[Symbol, ...]


def window_of(unit: ObjectFile, library: SymbolMap) -> Window:
    """Find a unit's piece of a library.

    Raises:
        CheckFailed: of several files of one name it cannot be told which is the unit.
    """
    mine = _strong_in_text(unit)
    found = [s for name in mine if (s := library.shared(name)) is not None and s.kind == "FUNC"]
    if not found:
        return Window(unit.source, 0, 0, _only_group(unit.source, library), (), ())
    low, high = min(s.value for s in found), max(s.value + max(s.size, 1) for s in found)
    before, after = library.between(max(0, low - REACH), low), library.between(high, high + REACH)
    groups = _groups(library.between(low, high), unit.source)
    if len(groups) > 1:
        raise CheckFailed(
            f"statics of {len(groups)} files named {unit.source} are in one piece of code",
            rule="the library's own copy of each unit must be told apart to be compared",
            next_step=USE_FULL,
        )
    if not groups:  # statics right beside the piece are as good: they are part of it
        groups = _groups([*before[-1:], *after[:1]], unit.source)
    group = groups.pop() if len(groups) == 1 else _only_group(unit.source, library)
    if group:
        low, high = _with_statics(low, high, before, after, group)
    inside = [s for s in library.between(low, high) if not (group and s.group == group)]
    foreign = tuple(s for s in inside if s.group)
    unknown = tuple(s for s in inside if not s.group and s.name not in mine)
    return Window(unit.source, low, high, group, foreign, unknown)


def _strong_in_text(unit: ObjectFile) -> frozenset[str]:
    # Only .text itself: cold and startup parts are gathered elsewhere, and comdat functions follow after it.
    return frozenset(
        s.name for s in unit.symbols if s.kind == "FUNC" and s.strong and unit.section_of(s) == ".text"
    )


def _groups(symbols: Sequence[Symbol], source: str) -> set[int]:
    return {s.group for s in symbols if s.group and s.file == source}


def _with_statics(
    low: int, high: int, before: Sequence[Symbol], after: Sequence[Symbol], group: int
) -> tuple[int, int]:
    """Widen a piece by the unit's statics right before and after it.

    Not by all of them: some compilers give a static made from a template a section of its own, far away.
    """
    for symbol in reversed(before):
        if symbol.group != group:
            break
        low = symbol.value
    for symbol in after:
        if symbol.group != group:
            break
        high = symbol.value + symbol.size
    return low, high


def _only_group(source: str, library: SymbolMap) -> int:
    """The file symbol of a name, 0 if there are none or several: no static is then the unit's own."""
    groups = {s.number for s in library.symbols if s.kind == "FILE" and s.name == source}
    return groups.pop() if len(groups) == 1 else 0
