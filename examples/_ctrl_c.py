"""Ctrl-C ends an example without a traceback. Imported first: to load torch takes seconds, and Ctrl-C may come in them."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["CODE", "ends_at_once", "kept_back", "raises"]

CODE = 130
"""Exit code after Ctrl-C, as shells have it."""


def ends_at_once() -> None:
    """From here on Ctrl-C ends this process in the kernel, also inside of torch's C++."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def raises() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt: this process has others to end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def kept_back() -> Iterator[None]:
    """Hold Ctrl-C back while processes are started or ended; then this one ends with `CODE`.

    A started process holds it back, too, until it imports this module: the start of Python prints a traceback.
    """
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
        if came:  # whatever else has happened, by the same Ctrl-C
            raise SystemExit(CODE) from None


def _of_an_example() -> bool:
    """Whether this process is an example, or one that multiprocessing started: another program keeps its own handler."""
    mains = [sys.modules.get(name) for name in ("__main__", "__mp_main__")]
    return any(Path(getattr(main, "__file__", None) or "").parent == Path(__file__).parent for main in mains)


if _of_an_example():
    ends_at_once()
