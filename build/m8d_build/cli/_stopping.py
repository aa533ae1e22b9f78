"""SIGTERM and SIGHUP in the toolchain: exceptions, as Ctrl-C is, so that what it started is ended too."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Stop", "stopping"]

# What `kill`, CI and systemd send, and a terminal that is closed.
SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@dataclass
class Stop:
    """The signal that stops a run.

    Attributes:
        number: of the signal; 0 if none came.
    """

    number: int = 0

    @property
    def by(self) -> str:
        """Its name, "Ctrl-C" without one."""
        return signal.Signals(self.number).name if self.number else "Ctrl-C"

    def exit_code(self, otherwise: int) -> int:
        """Return 128 and the signal's number, as a shell does; ``otherwise`` if none came."""
        return 128 + self.number if self.number else otherwise


@contextmanager
def stopping() -> Iterator[Stop]:
    """Raise KeyboardInterrupt at the first SIGTERM or SIGHUP; the handlers before are put back afterwards.

    A program that is run is in a session of its own and hears of neither. A handler of a caller, and a signal
    that is ignored (nohup), are left alone; so is everything outside the main thread.
    """
    stop = Stop()

    def arrived(number: int, _frame: object) -> None:
        if not stop.number:  # the next one would break off what ends the programs
            stop.number = number
            raise KeyboardInterrupt

    ours: list[signal.Signals] = []
    try:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    ours.append(number)
                    signal.signal(number, arrived)
        yield stop
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
