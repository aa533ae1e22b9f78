"""The scope a mangled C++ name belongs to, read from the front of the name (Itanium C++ ABI, 5.1).

Only the leading source names are read: that is all it takes to tell whose a symbol is, and it needs no
demangler.
"""

from __future__ import annotations

import re
from enum import Enum

__all__ = ["Entity", "entity_of", "is_own", "scope_of"]

# PyTorch's namespaces that the overlay's units are the home of.
OWN_SCOPES = (("c10d",), ("torch", "cuda", "nccl"))

_TABLES = re.compile(r"T[VTIS]|TC")
_THUNK = re.compile(r"T(?:h(?:n?\d+)_|v(?:n?\d+)_(?:n?\d+)_|c(?:hn?\d+_|vn?\d+_n?\d+_){2})")
_STATE = re.compile(r"G[VR]|T[HW]")
_QUALIFIERS = re.compile(r"^N[rVK]*[RO]?")
_STD = re.compile(r"S[tabsiod]")
_LENGTH = re.compile(r"[1-9]\d*")


class Entity(Enum):
    """What kind of thing a mangled name stands for."""

    PLAIN = "plain"  # a function, a variable, or a C name
    TABLE = "table"  # vtable, VTT, typeinfo, typeinfo name, construction vtable
    GUARD = "guard"  # guard variable, lifetime-extended temporary, thread-local wrapper
    THUNK = "thunk"


def entity_of(mangled: str) -> Entity:
    """Return what a mangled name stands for."""
    return _split(mangled)[0]


def scope_of(mangled: str) -> tuple[str, ...]:
    """Return the leading source names of a mangled C++ name, namespaces first, its own name included.

    A template's arguments, a constructor or an operator end it. Entities local to a function have the scope
    of the function. Names in ``std`` begin with "std"; C names give one part.

    Example: ``_ZTVN4c10d8NCCLCommE`` gives ("c10d", "NCCLComm").
    """
    _, rest = _split(mangled)
    if rest is None:
        return (mangled,)
    while rest.startswith("Z"):
        rest = rest[1:]
    if rest.startswith("N"):
        rest = _QUALIFIERS.sub("", rest, count=1)
    parts: list[str] = []
    if _STD.match(rest):
        parts.append("std")
        rest = rest[2:]
    while True:
        rest = rest.removeprefix("L")
        length = _LENGTH.match(rest)
        if length is None:
            return tuple(parts)
        size = int(length.group())
        parts.append(rest[length.end() : length.end() + size])
        rest = rest[length.end() + size :]
        while rest.startswith("B") and (tag := _LENGTH.match(rest, 1)):  # ABI tags: B5cxx11
            rest = rest[tag.end() + int(tag.group()) :]


def is_own(mangled: str) -> bool:
    """Return whether a name lies in one of the namespaces the overlay's units are the home of."""
    scope = scope_of(mangled)
    return mangled.startswith("_Z") and any(scope[: len(own)] == own for own in OWN_SCOPES)


def _split(mangled: str) -> tuple[Entity, str | None]:
    if not mangled.startswith("_Z"):
        return Entity.PLAIN, None
    rest = mangled[2:]
    for pattern, entity in ((_THUNK, Entity.THUNK), (_STATE, Entity.GUARD), (_TABLES, Entity.TABLE)):
        match = pattern.match(rest)
        if match:
            return entity, rest[match.end() :]
    return Entity.PLAIN, rest
