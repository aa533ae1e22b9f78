"""Symbol sets: the overlay defines exactly the symbols that the wheel has from the same units."""

from __future__ import annotations

from typing import TYPE_CHECKING

from m8d_build.elf.names import Entity, entity_of, scope_of
from m8d_build.errors import CheckFailed
from m8d_build.overlay.address_ranges import REACH, SymbolMap, window_of
from m8d_build.overlay.graft import merge_definitions

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from m8d_build.elf.read import ObjectFile
    from m8d_build.elf.symbols import Symbol

__all__ = ["strong_symbols_equal", "symbol_differences"]

SHOWN = 20
# Parts of a mangled name that say "constructor" or "destructor": only a class has those.
_STRUCTORS = ("C1", "C2", "C3", "D0", "D1", "D2")


def strong_symbols_equal(
    units: Sequence[ObjectFile],
    symtab: Sequence[Symbol],
    exports: Mapping[str, Symbol],
    *,
    additions: Collection[str] = (),
) -> None:
    """Check that the overlay's objects and the library's own copy of them define the same strong symbols.

    Args:
        units: the overlay's objects.
        symtab: the library's full symbol table.
        exports: what the library exports.
        additions: names the patches add; each must be there.

    Raises:
        CheckFailed: a difference; the first names are listed, each with what it means.
    """
    differences = symbol_differences(units, symtab, exports, additions=additions)
    if not differences:
        return
    shown = "; ".join(differences[:SHOWN])
    more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    raise CheckFailed(
        f"the overlay is no drop-in: {shown}{more}",
        rule="its units define the same strong symbols, of the same size and visibility, as the wheel's own "
        "copy",
        next_step="Compare the target's units and their defines with how the wheel was built, or use --mode "
        "full",
    )


def symbol_differences(
    units: Sequence[ObjectFile],
    symtab: Sequence[Symbol],
    exports: Mapping[str, Symbol],
    *,
    additions: Collection[str] = (),
) -> list[str]:
    """Return every difference, as text; empty if there is none. Arguments as :func:`strong_symbols_equal`.

    Looked for: strong symbols we define and the library does not, or with another kind, visibility or (data,
    vtables) size; functions that lie in the library's code of a unit and that we lack; and exported members
    of the classes defined here that we lack, which covers data and what lies at a unit's very edge. Not seen:
    a hidden variable that we lack, or a hidden function that is the very first or last of its unit; only the
    library's own code could use either, and :mod:`m8d_build.overlay.stale` looks at that.
    """
    if not symtab:
        return ["the library has no .symtab, so its own copy cannot be compared"]
    library = SymbolMap(symtab)
    ours = merge_definitions(unit.definitions for unit in units)
    strong = {name: symbol for name, symbol in ours.items() if symbol.strong}
    differences = [
        f"{name} is to be added by a patch, but is not there"
        for name in sorted(set(additions) - strong.keys())
    ]
    for name, symbol in sorted(strong.items()):
        if name not in additions:
            differences += _compare(name, symbol, library.shared(name), exports)
    differences += _table_sizes(ours, exports)
    known = strong.keys() | set(additions)
    for unit in units:
        window = window_of(unit, library)
        differences += [f"{s.name} of {s.file} lies inside the wheel's {unit.source}" for s in window.foreign]
        differences += [f"{s.name} is in the wheel's {unit.source}, not in ours" for s in window.unknown]
        differences += [
            f"{s.name} is beside the wheel's {unit.source}, not in ours"
            for s in _neighbours(window.low, window.high, library)
            if s.name not in known and scope_of(s.name)[:-1] in {scope_of(n)[:-1] for n in unit.definitions}
        ]
    differences += [f"{name} is in the wheel, not in ours" for name in _lacking_members(ours, known, exports)]
    return list(dict.fromkeys(differences))


def _compare(name: str, ours: Symbol, theirs: Symbol | None, exports: Mapping[str, Symbol]) -> Iterable[str]:
    if theirs is None:
        return [f"{name} is in ours, not in the wheel"]
    found = []
    if theirs.kind != ours.kind:
        found.append(f"{name} is {ours.kind} in ours, {theirs.kind} in the wheel")
    elif ours.kind != "FUNC" and theirs.size != ours.size:
        found.append(f"{name} has {ours.size} bytes in ours, {theirs.size} in the wheel")
    hidden = ours.visibility in {"HIDDEN", "INTERNAL"}
    if hidden == (name in exports):
        found.append(f"{name} is {'hidden' if hidden else 'exported'} in ours, and not so in the wheel")
    return found


def _table_sizes(ours: Mapping[str, Symbol], exports: Mapping[str, Symbol]) -> Iterable[str]:
    """A vtable of another size is a class with other virtual functions."""
    for name, symbol in sorted(ours.items()):
        theirs = exports.get(name)
        if theirs is not None and entity_of(name) is Entity.TABLE and theirs.size != symbol.size:
            yield f"{name} has {symbol.size} bytes in ours, {theirs.size} in the wheel"


def _neighbours(low: int, high: int, library: SymbolMap) -> Iterable[Symbol]:
    """Strong functions right before and after a unit's code, with nothing weak or of another file between."""
    if low == high:
        return
    for side in (reversed(library.between(max(0, low - REACH), low)), library.between(high, high + REACH)):
        for symbol in side:
            if symbol.binding != "GLOBAL" or symbol.kind != "FUNC":
                break
            yield symbol


def _lacking_members(
    ours: Mapping[str, Symbol], known: Collection[str], exports: Mapping[str, Symbol]
) -> Iterable[str]:
    """Exported members we lack, of the classes whose other members we define."""
    classes = {scope_of(name) for name in ours if _is_structor(name) or entity_of(name) is Entity.TABLE}
    homes = (classes & {scope_of(name)[:-1] for name in known}) - {()}
    for name, symbol in sorted(exports.items()):
        if symbol.strong and name not in known and name.startswith("_Z") and entity_of(name) is Entity.PLAIN:
            scope = scope_of(name)
            if scope in homes or scope[:-1] in homes:
                yield name


def _is_structor(name: str) -> bool:
    if not name.startswith("_ZN"):
        return False
    rest = name[3:]
    for part in scope_of(name):
        rest = rest.removeprefix(f"{len(part)}{part}")
    return rest.startswith(_STRUCTORS)
