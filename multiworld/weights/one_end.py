"""One end of some weights in each process: their worlds have two members, and a process is one of them."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Protocol

from multiworld.errors import InvalidJoinError

if TYPE_CHECKING:
    import threading

__all__ = ["begin", "is_forked", "require_own"]


class End(Protocol):
    """A publisher or a subscriber."""

    name: str
    _closed: threading.Event

    @property
    def _store(self) -> object: ...


_begun: weakref.WeakKeyDictionary[End, int] = weakref.WeakKeyDictionary()
"""Ends that have begun, and in which process: a forked child has its parent's here."""


def begin(end: End) -> None:
    """An end begins that joins worlds.

    Raises:
        InvalidJoinError: the other end is open in this process.
    """
    _begun[end] = os.getpid()  # first: of two threads that begin at once, one at least finds the other
    for reference in _begun.keyrefs():
        other = reference()
        if other not in {None, end} and _begun.get(other) == os.getpid() and _other_half(end, other):
            del _begun[end]
            raise InvalidJoinError(
                end.name,
                f"a {type(end).__name__} of weights {end.name!r} beside their {type(other).__name__}",
                rule="A process is the trainer of some weights or an engine, and not both",
                next_step="Run the engine in another process, or close the other one first",
            )


def is_forked(end: End) -> bool:
    """Whether this is a forked child of the process in which the end began: it has none of its threads."""
    return _begun.get(end, os.getpid()) != os.getpid()


def require_own(end: End) -> None:
    """Raise ValueError in a forked child of the process in which the end began."""
    if is_forked(end):
        raise ValueError(
            f"{type(end).__name__} {end.name!r} was made in process {_begun[end]}, of which this one was"
            " forked: its threads are there. Make another one in this process."
        )


def _other_half(end: End, other: End) -> bool:
    """Whether `other` is the open other end of the same weights: of the same name, in the same store."""
    same = other.name == end.name and other._store == end._store  # noqa: SLF001  (an end's own)
    return same and type(other) is not type(end) and not other._closed.is_set()  # noqa: SLF001  (an end's own)
