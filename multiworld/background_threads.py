"""This package's threads, when the last world is closed and when the program ends.

Python ends a daemon thread that comes back from C++ after the interpreter has ended. Where it comes back
from a scope that had released the GIL, which most calls into torch do, that ends the process by SIGABRT. So
the end of the program waits for them.

NCCL waits without bound for a member that never comes to a group, in a thread that cannot be ended, and
comes back when the process of another member ends. So members that gave up such a group end one after the
other: one that still waits here sees its thread come back.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multiworld.logs.source import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["GRACE", "call", "dismiss", "end"]

GRACE = 3.0
"""Seconds that the program's end waits for them at most, beyond the time for its worlds: on a host without a
free core, or while an abort of NCCL hangs."""

_CONNECTING = "m8d-nccl-connect-"
"""What the names of threads that connect a group of NCCL begin with; the member's rank follows."""

_NATIVE = "pt_nccl_init"
"""The name of a thread of a patched build that connects a group (patches/*/0005-init-release.patch)."""

_APART = 4.0
"""Seconds between the ends of two members that gave up a group: more than the end of the interpreter takes
where as many programs want to run as there are cores. The wait ends once the thread is back."""

_BUSIEST = 8.0
"""Programs for each core up to which the end of another member is waited for as much longer."""

_TURNS = 8
"""Members that end one after the other; the others among them."""

_IN_TORCH = (
    "m8d-abort", "m8d-advance", "m8d-close", "m8d-connect", "m8d-destroy", "m8d-free", "m8d-join", "m8d-lane",
    "m8d-mesh", _CONNECTING, "m8d-read", "m8d-release", "m8d-rendezvous", "m8d-waiter",
)  # fmt: skip
"""What the names of threads that call torch begin with, its stores too, and that end when the last world is
closed and the last join given up."""

_POOLS = (
    ("multiworld._c10d.waiter_pool", "pool"),
    ("multiworld._c10d.waiter_pool", "ending"),
    ("multiworld._net.lane.background", "background"),
)
"""What has threads of its own that end with the last world."""

_STEPS = (
    ("multiworld._c10d.last_holder", "last_holder"),
    ("multiworld._generation.background_release", "releaser"),
    ("multiworld._join.preparing", "watcher"),
)
"""What takes steps in the background."""

_log = logger(__name__)


def call(function: Callable[[], object], name: str) -> None:
    """Call `function` in a daemon thread of that name; in this one where the process gets no other."""
    try:
        threading.Thread(target=function, daemon=True, name=name).start()
    except RuntimeError:
        function()


def _loaded(names: tuple[tuple[str, str], ...]) -> Iterator[Any]:
    return (getattr(sys.modules[module], name) for module, name in names if module in sys.modules)


def dismiss() -> None:
    """End threads that have nothing to do; new ones are started when needed."""
    for each in _loaded(_POOLS):
        each.dismiss()


def end(deadline: float) -> None:
    """Take no more steps in the background, and wait for threads that may be in torch; all worlds are closed.

    Args:
        deadline: ``time.monotonic()`` seconds; threads may take `GRACE` more.
    """
    for each in _loaded(_STEPS):
        each.stop(deadline)
    while left := _left():
        if time.monotonic() >= deadline + GRACE + _turn(left):
            _log.debug("threads are left that may be in torch")
            return
        dismiss()
        time.sleep(0.002)


def _left() -> list[str]:
    """Return the names of threads that are left: Python's, and those in which patched builds connect."""
    found = [each.name for each in threading.enumerate() if each.name.startswith(_IN_TORCH)]
    backend = sys.modules.get("multiworld._c10d.nccl.backend")
    abandoned = () if backend is None else backend.abandoned
    if abandoned and any(_name_of(task) == _NATIVE for task in Path("/proc/self/task").glob("*")):
        found += [f"{_CONNECTING}{rank}" for rank in abandoned]
    return found


def _name_of(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except OSError:  # it has ended
        return ""


def _turn(names: list[str]) -> float:
    """Return the seconds that this member waits longer than the first one, for threads of these names."""
    ranks = [int(name.removeprefix(_CONNECTING)) for name in names if name.startswith(_CONNECTING)]
    return max((rank % _TURNS for rank in ranks), default=0) * _APART * _crowd()


def _crowd() -> float:
    """Return how many programs want to run for each core; from 1 to `_BUSIEST`."""
    try:
        return min(_BUSIEST, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))
    except OSError:  # the system does not tell
        return 1.0
