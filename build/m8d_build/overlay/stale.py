"""Stale code: whether remaining code reaches old definitions directly, past any graft.

Exported functions are reached through names, and those are grafted. Hidden ones are called directly. Code
outside the units that calls one keeps running the wheel's code beside the overlay's, on variables of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from m8d_build.elf.image import open_image
from m8d_build.elf.names import Entity, entity_of, is_own
from m8d_build.elf.operands import is_operand
from m8d_build.elf.references import Reference, code_references, pointer_references
from m8d_build.errors import CheckFailed
from m8d_build.overlay.address_ranges import USE_FULL, SymbolMap, window_of
from m8d_build.overlay.graft import merge_definitions

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from m8d_build.elf.image import Image
    from m8d_build.elf.read import ObjectFile
    from m8d_build.elf.symbols import Symbol

__all__ = ["StaleUse", "no_stale_uses", "stale_uses"]

SHOWN = 20
# TORCH_WARN_ONCE's flag: with two of them a warning can come twice, and nothing else.
_WARN_ONCE = re.compile(r"\d+torch_warn_once_\d+(?:_\d+)?$")
MAX_ROUNDS = 12  # of following hidden inline functions outward


@dataclass(frozen=True, order=True)
class StaleUse:
    """One way from code that stays to an old definition.

    Attributes:
        user: the function or table that refers to it ("address 0x..." if no symbol covers it).
        target: what it refers to.
        root: the unit's definition that is reached in the end; ``target`` itself, or what it leads to.
    """

    user: str
    target: str
    root: str


def no_stale_uses(
    library: Path,
    symtab: Sequence[Symbol],
    units: Sequence[ObjectFile],
    hide: Collection[str],
    *,
    accepted: Mapping[str, str],
) -> None:
    """Check that nothing outside the units reaches their old definitions directly.

    Args:
        library: the official library.
        symtab: its full symbol table.
        units: the overlay's objects.
        hide: exported names the graft hides.
        accepted: old definitions that may go on being used, each with the reason.

    Raises:
        CheckFailed: something does; the first are listed.
        ElfInvalid: the library is damaged.
    """
    uses = stale_uses(library, symtab, units, hide, accepted=accepted)
    if uses:
        lines = [
            f"{u.user} uses {u.target}" + (f" (and so {u.root})" if u.root != u.target else "") for u in uses
        ]
        more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        raise CheckFailed(
            "code outside the overlay's units reaches their old definitions: "
            f"{'; '.join(lines[:SHOWN])}{more}",
            rule="only what is looked up by name can be turned to the overlay",
            next_step="Add the unit that uses it to the target's units, or use --mode full",
        )


def stale_uses(
    library: Path,
    symtab: Sequence[Symbol],
    units: Sequence[ObjectFile],
    hide: Collection[str],
    *,
    accepted: Mapping[str, str],
) -> list[StaleUse]:
    """Return direct uses of the units' old definitions from outside. Arguments: :func:`no_stale_uses`."""
    if not symtab:
        raise CheckFailed(
            f"{library} has no .symtab", rule="hidden functions can only be found by name", next_step=USE_FULL
        )
    search = _Search(SymbolMap(symtab), units, frozenset(hide), frozenset(accepted), library.parent)
    with open_image(library) as image:
        return search.run(image)


class _Search:
    """Follows direct references outward from the units' definitions, a round of scanning at a time."""

    def __init__(
        self,
        library: SymbolMap,
        units: Sequence[ObjectFile],
        hide: frozenset[str],
        accepted: frozenset[str],
        scratch: Path,
    ) -> None:
        self.library = library
        self.ours = merge_definitions(unit.definitions for unit in units)
        self.groups = {window.group for unit in units if (window := window_of(unit, library)).group}
        self.hide = hide
        self.accepted = accepted
        self.scratch = scratch
        self.roots: dict[str, str] = {}  # what was followed -> the definition it leads to
        self.uses: set[StaleUse] = set()

    def run(self, image: Image) -> list[StaleUse]:
        frontier = self._definitions()
        self.roots = {symbol.name: symbol.name for symbol in frontier}
        got = image.section(".got")
        for _ in range(MAX_ROUNDS):
            if not frontier:
                return sorted(self.uses)
            frontier = self._round(
                image, _addresses(frontier), (got.addr, got.addr + got.size) if got else (0, 0)
            )
        raise CheckFailed(
            f"{image.name}: old definitions are reached through more than {MAX_ROUNDS} inline functions",
            rule="every way to them is followed to its end",
            next_step=USE_FULL,
        )

    def _definitions(self) -> list[Symbol]:
        found = []
        for name, ours in self.ours.items():
            theirs = self.library.shared(name)
            if theirs is None or name in self.accepted or _WARN_ONCE.search(name):
                continue
            if ours.kind == "TLS" and ours.strong and theirs.binding == "LOCAL":
                raise CheckFailed(
                    f"{name} is a hidden thread-local variable",
                    rule="who else uses one cannot be seen",
                    next_step=USE_FULL,
                )
            variable = ours.kind == "OBJECT" and entity_of(name) is not Entity.TABLE
            hidden_state = variable and is_own(name) and theirs.binding == "LOCAL"
            if ours.strong or name in self.hide or hidden_state:
                found.append(theirs)
        return [symbol for symbol in found if symbol.kind != "TLS"]

    def _round(self, image: Image, targets: Mapping[int, Symbol], got: tuple[int, int]) -> list[Symbol]:
        following: dict[str, Symbol] = {}
        for reference, user in self._users_outside(image, targets, got):
            target = targets[reference.target]
            root = self.roots[target.name]
            if (
                user is not None
                and not user.group
                and user.binding == "LOCAL"
                and self._ours_to_follow(user.name)
            ):
                following[user.name] = user
                self.roots[user.name] = root
                continue
            where = user.name if user is not None else f"address {reference.at:#x}"
            self.uses.add(StaleUse(where, target.name, root))
        return list(following.values())

    def _users_outside(
        self, image: Image, targets: Mapping[int, Symbol], got: tuple[int, int]
    ) -> Iterable[tuple[Reference, Symbol | None]]:
        slots: dict[int, int] = {}
        for reference in pointer_references(image, targets):
            if got[0] <= reference.at < got[1]:
                slots[reference.at] = reference.target  # who uses the slot uses the target
                continue
            user = self.library.containing(reference.at)
            if not self._known(user):
                yield reference, user
        for reference in code_references(image, {**targets, **dict.fromkeys(slots)}):
            user = self.library.containing(reference.at)
            if self._known(user) or _by_chance(image, reference, user, self.scratch):
                continue
            yield Reference(reference.at, slots.get(reference.target, reference.target)), user

    def _known(self, user: Symbol | None) -> bool:
        return user is not None and (self._inside(user) or user.name in self.roots)

    def _inside(self, user: Symbol) -> bool:
        if user.group:
            return user.group in self.groups
        return user.name in self.hide or (user.name in self.ours and self.ours[user.name].strong)

    def _ours_to_follow(self, name: str) -> bool:
        # Hidden inline code of the units: reached by direct references alone, so following those is enough.
        return name in self.ours or is_own(name)


def _by_chance(image: Image, reference: Reference, user: Symbol | None, scratch: Path) -> bool:
    """Return whether bytes look like a reference and are none; slow, asked about few."""
    if user is None or user.kind != "FUNC":
        return False
    code = image.bytes_at(image.offset_of(user.value, user.size), user.size)
    return not is_operand(reference, code, user.value, scratch)


def _addresses(symbols: Iterable[Symbol]) -> dict[int, Symbol]:
    """Every address a reference to one of these can name: a function's first, all of a variable's."""
    addresses: dict[int, Symbol] = {}
    for symbol in symbols:
        width = max(symbol.size, 1) if symbol.kind == "OBJECT" else 1
        addresses.update(dict.fromkeys(range(symbol.value, symbol.value + width), symbol))
    return addresses
