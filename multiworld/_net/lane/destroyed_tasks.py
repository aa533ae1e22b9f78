"""Undoing of a task that is destroyed, as its event loop was closed while it waited.

Such a task ends where its last reference goes, or where garbage is collected: in any thread, at any moment,
perhaps in one that holds the very lock that is needed. So it is done in a thread of its own, whose start
takes no lock of Python's.
"""

from __future__ import annotations

import _thread
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["run"]


def run(call: Callable[[], object]) -> None:
    """Have `call`, which raises nothing, made soon; not if the process ends, or gets no other thread."""
    with contextlib.suppress(RuntimeError):
        _thread.start_new_thread(call, ())
