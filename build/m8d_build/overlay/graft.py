"""The graft: every caller binds to the overlay instead of the old definitions, in any load order.

The library asks for the overlay (one more DT_NEEDED), and its own definitions of what the overlay exports
become unfindable. It has to be both: the dynamic linker searches breadth-first, so while the old ones could
be found they would come before the overlay. It fails closed: without the overlay the library does not load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from m8d_build.elf.edit import Edit, Editor, apply_to_file
from m8d_build.elf.image import open_image
from m8d_build.elf.names import Entity, entity_of, is_own, scope_of
from m8d_build.elf.read import Library, facts_of, read_library
from m8d_build.elf.symbols import LINKER_SYMBOLS
from m8d_build.errors import AlreadyGrafted, CheckFailed, ElfInvalid

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    from m8d_build.elf.symbols import Symbol

__all__ = [
    "ExportNames",
    "GraftPlan",
    "GraftResult",
    "export_names",
    "graft",
    "graft_edits",
    "plan_graft",
    "version_script",
]

SHOWN = 20
RELINK = "This is a fault of the overlay's link step; report it with the log"


@dataclass(frozen=True)
class GraftPlan:
    """What the graft changes.

    Attributes:
        needed: file name of the overlay, which the library will ask for.
        hide: names the library keeps, but which no lookup will find in it, sorted.
    """

    needed: str
    hide: tuple[str, ...]


@dataclass(frozen=True)
class GraftResult:
    """A graft that was made and held its checks.

    Attributes:
        plan: what was to change.
        edits: the bytes that changed, by offset.
    """

    plan: GraftPlan
    edits: tuple[Edit, ...]

    @property
    def changed_bytes(self) -> int:
        """How many bytes differ from the official library."""
        return sum(a != b for edit in self.edits for a, b in zip(edit.old, edit.new, strict=True))


@dataclass(frozen=True)
class ExportNames:
    """What the overlay's version script says.

    Attributes:
        exported: names others may bind to, sorted.
        private: names of default visibility that stay inside, sorted.
    """

    exported: tuple[str, ...]
    private: tuple[str, ...]


def export_names(
    definitions: Mapping[str, Symbol], old: Mapping[str, Symbol], constructed: Collection[str] = ()
) -> ExportNames:
    """Decide what the overlay exports.

    Exported: strong definitions; every static there must be one of in the whole process (unique symbols, weak
    variables and the guards that belong to them); weak definitions of our own namespaces and weak tables
    (vtable, typeinfo) outside ``std`` that the old library exports too. The rest stays private: a function
    instantiated from ``std`` by this compiler must not take the place of the wheel's own.

    Args:
        definitions: what the overlay's objects define (:meth:`merge_definitions` of several), any visibility.
        old: what the library they replace exports.
        constructed: variables that are constructed when their unit is loaded (``constructed_at_load``). They
            stay private: the old library's copy of the unit constructs and destroys its own, and would do so
                to ours.
    """
    exported: list[str] = []
    private: list[str] = []
    for name, symbol in definitions.items():
        if symbol.visibility in {"HIDDEN", "INTERNAL"}:
            continue
        shown = name not in constructed and _exports(name, symbol, old)
        (exported if shown else private).append(name)
    return ExportNames(tuple(sorted(exported)), tuple(sorted(private)))


def version_script(names: ExportNames) -> str:
    """Return the linker version script that exports exactly these names."""
    lines = "".join(f'  "{name}";\n' for name in names.exported)
    return f"{{\n  global:\n{lines}  local: *;\n}};\n" if lines else "{ local: *; };\n"


def plan_graft(library: Library, overlay: Library, filename: str) -> GraftPlan:
    """Decide what to hide, and that the two fit each other.

    Args:
        library: the official library (libtorch_cuda.so).
        overlay: the new one.
        filename: the overlay's file name beside the library.

    Raises:
        AlreadyGrafted: the library asks for the overlay already, or hides symbols.
        ElfInvalid: the library cannot find or bind to the overlay.
        CheckFailed: the overlay is not one for this library.
    """
    if filename in library.needed or library.unfindable:
        found = (
            f"asks for {filename}"
            if filename in library.needed
            else f"hides {len(library.unfindable)} symbols"
        )
        raise AlreadyGrafted(
            f"{library.name} {found} already",
            rule="a library is grafted once",
            next_step="Start again from the official wheel's own file",
        )
    search = (library.runpath or library.rpath).split(":")
    if "$ORIGIN" not in search:
        raise ElfInvalid(
            f"{library.name} looks for libraries in {':'.join(search)!r}",
            rule="it finds the overlay beside itself only with $ORIGIN",
            next_step="Use --mode full for this wheel",
        )
    _check_overlay(library, overlay, filename)
    hide = sorted(
        name for name, new in overlay.exports.items() if _hides(name, new, library.exports.get(name))
    )
    if not hide:
        raise CheckFailed(
            f"{overlay.name} replaces nothing of {library.name}",
            rule="the overlay exports what the library's own copy of its units exports",
            next_step=RELINK,
        )
    return GraftPlan(needed=filename, hide=tuple(hide))


def graft_edits(library: Path, overlay: Path) -> GraftResult:
    """Return the graft as changes to make while the library is copied elsewhere; nothing is written.

    The checks are made on the changed library in memory (two seconds for 900 MB, of which only the tables are
    read).

    Raises:
        AlreadyGrafted, ElfInvalid, CheckFailed: as :func:`plan_graft`; CheckFailed too if a check does not
            hold.
    """
    new = read_library(overlay)
    with open_image(library, scratch=True) as image:
        before = facts_of(image)
        plan = plan_graft(before, new, overlay.name)
        editor = Editor(image)
        editor.add_needed(plan.needed)
        editor.hide_symbols(plan.hide)
        result = GraftResult(plan, editor.edits)
        for edit in result.edits:
            image.overwrite(edit.offset, edit.new)
        check_graft(before, facts_of(image), new, plan)
    return result


def graft(library: Path, target: Path, overlay: Path) -> GraftResult:
    """Write a grafted copy of a library; it appears only if every check holds.

    Args:
        library: the official library.
        target: where the grafted one goes; may be ``library``.
        overlay: the new library; its file name is the one the grafted library will ask for.

    Raises:
        AlreadyGrafted, ElfInvalid, CheckFailed: as :func:`graft_edits`.
        DiskFull, OutputUnwritable: the copy cannot be written.
    """
    result = graft_edits(library, overlay)
    apply_to_file(library, target, result.edits)
    return result


def check_graft(before: Library, after: Library, overlay: Library, plan: GraftPlan) -> None:
    """Check a grafted library against the one it was made from.

    Raises:
        CheckFailed: it does not ask for the overlay last; a hidden name is still found, or not exported by
            the overlay; another name is no longer found; or a symbol differs.
    """
    if after.needed != (*before.needed, plan.needed):
        raise _failed(
            f"{after.name} asks for {', '.join(after.needed)}",
            "it asks for the overlay and what it did before",
        )
    hidden = set(plan.hide)
    _expect(f"{after.name} still finds", hidden - after.unfindable, "the old definitions are unfindable")
    _expect(f"{overlay.name} lacks", hidden - overlay.exports.keys(), "the overlay exports what is hidden")
    _expect(
        f"{overlay.name} does not find its own",
        hidden & overlay.unfindable,
        "the overlay exports what is hidden",
    )
    _expect(f"{after.name} no longer finds", after.unfindable - hidden, "all other names are found as before")
    if after.symbols != before.symbols:
        raise _failed(f"{after.name} has other dynamic symbols than before", "only the hash table changes")


def merge_definitions(objects: Iterable[Mapping[str, Symbol]]) -> dict[str, Symbol]:
    """Return what several objects define together, as the linker picks: a strong definition before a weak one."""
    merged: dict[str, Symbol] = {}
    for definitions in objects:
        for name, symbol in definitions.items():
            if name not in merged or (symbol.strong and not merged[name].strong):
                merged[name] = symbol
    return merged


def _exports(name: str, symbol: Symbol, old: Mapping[str, Symbol]) -> bool:
    if symbol.binding in {"GLOBAL", "UNIQUE"}:
        return True
    kind = entity_of(name)
    if symbol.kind in {"OBJECT", "TLS"} and kind is not Entity.TABLE:
        return True  # a variable: private, it would have a second value, or a guard that is not its own
    if name not in old:
        return False
    return is_own(name) or (kind is Entity.TABLE and scope_of(name)[:1] != ("std",))


def _hides(name: str, new: Symbol, old: Symbol | None) -> bool:
    if old is None or name in LINKER_SYMBOLS:
        return False
    return new.binding == "GLOBAL" or (is_own(name) and old.binding != "UNIQUE")


def _check_overlay(library: Library, overlay: Library, filename: str) -> None:
    problems = [
        (
            overlay.soname != filename,
            f"has soname {overlay.soname!r}",
            f"it must be its file name, {filename!r}",
        ),
        (
            library.soname not in overlay.needed,
            f"does not ask for {library.soname}",
            "it is linked against it",
        ),
        (overlay.symbolic, "was linked with -Bsymbolic", "statics must stay one in the whole process"),
        (not overlay.gnu_hash, "has no .gnu.hash", "the dynamic linker must find its names"),
    ]
    for wrong, what, rule in problems:
        if wrong:
            raise CheckFailed(f"{overlay.name} {what}", rule=rule, next_step=RELINK)
    versioned = [name for name, symbol in overlay.exports.items() if symbol.version]
    _expect(f"{overlay.name} gives versions to", versioned, "callers ask for the old names without a version")


def _expect(what: str, names: Iterable[str], rule: str) -> None:
    listed = sorted(names)
    if listed:
        more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
        raise _failed(f"{what} {', '.join(listed[:SHOWN])}{more}", rule)


def _failed(value: str, rule: str) -> CheckFailed:
    return CheckFailed(value, rule=rule, next_step="Nothing was written. Report it with the wheel's name")
