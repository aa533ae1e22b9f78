"""Loads the modules of public names when they are first used; a program's end waits for threads that do.

A daemon thread that is loading modules when the interpreter ends may hold a lock for good which the end
needs, that of `logging` for one, or come back from C++ while the interpreter ends, which ends the process
by SIGABRT.
"""

from __future__ import annotations

import sys
import threading
import time
from importlib import import_module
from typing import TYPE_CHECKING

from multiworld.exiting import before_threads_are_joined

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["LONGEST", "load"]

LONGEST = 4.0
"""Seconds that the program's end waits at most: as long as for joins (`registry.EXIT_BUDGET` and
`background_threads.GRACE`)."""

_loading: list[threading.Thread] = []
"""Who loads; a thread may stand here more than once."""

_hooked: list[bool] = []
"""Whether the end waits: one entry once it does."""


def load(name: str) -> ModuleType:
    """Import the module of that full name, and have the program's end wait meanwhile; return the module.

    Raises:
        ImportError: it is missing, or something that it needs.
    """
    thread = threading.current_thread()
    if name in sys.modules or thread is threading.main_thread():  # the main thread is not gone before the end
        return import_module(name)
    _loading.append(thread)
    try:
        if not _hooked:
            _hooked.append(before_threads_are_joined(_wait))
        return import_module(name)
    finally:
        _loading.remove(thread)


def _wait() -> None:
    deadline = time.monotonic() + LONGEST
    # In a forked child the parent's other threads are not alive.
    while any(each.is_alive() for each in tuple(_loading)) and time.monotonic() < deadline:
        time.sleep(0.002)
