"""One end of some weights in each process: their worlds have two members, and a process is one of them."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Protocol

from multiworld.errors import InvalidJoinError

if TYPE_CHECKING:
    import threading

__all__ = ["begin"]


class End(Protocol):
    """A publisher or a subscriber."""

    name: str
    _closed: threading.Event


_begun: weakref.WeakKeyDictionary[End, int] = weakref.WeakKeyDictionary()
"""Ends that have begun, and in which process: a forked child has its parent's here."""


def begin(end: End) -> None:
    """An end begins that joins worlds.

    Raises:
        InvalidJoinError: the other end is open in this process.
    """
    for other, process in list(_begun.items()):
        same = other.name == end.name and process == os.getpid()
        if same and type(other) is not type(end) and not other._closed.is_set():  # noqa: SLF001  (the other half)
            raise InvalidJoinError(
                end.name,
                f"a {type(end).__name__} of weights {end.name!r} beside their {type(other).__name__}",
                rule="A process is the trainer of some weights or an engine, and not both",
                next_step="Run the engine in another process, or close the other one first",
            )
    _begun[end] = os.getpid()
