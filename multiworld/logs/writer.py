"""Writes lines to a stream in a thread of its own: a paused terminal or a full pipe holds up no caller."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

__all__ = ["LineWriter"]

_log = logging.getLogger(__name__)

_MOST_WAITING = 10_000
_IDLE = 60.0


class LineWriter:
    """Writes lines in a thread of its own; never blocks who puts them.

    Lines that find no room are counted, and the count is written later. After a broken pipe or a closed file
    the rest is left out.

    Args:
        stream: to write to; each line is flushed.
        lost: returns the line, without its end, that says how many were left out.
        name: of the thread.
    """

    def __init__(self, stream: TextIO, lost: Callable[[int], str], *, name: str) -> None:
        self._stream = stream
        self._lost = lost
        self._name = name
        self._ready = threading.Condition()
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def put(self, line: str) -> None:
        """Have a line written, with its end."""
        with self._ready:
            if self._closed:
                return
            if len(self._lines) >= _MOST_WAITING:
                self._dropped += 1
                return
            self._lines.append(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, name=self._name, daemon=True)
                self._thread.start()
            self._ready.notify()

    def close(self, timeout: float) -> None:
        """Write the waiting lines, for at most `timeout` seconds; later ones are left out."""
        with self._ready:
            self._closed = True
            self._ready.notify()
            thread = self._thread
        if thread is not None:
            thread.join(timeout)

    def _write(self) -> None:
        while True:
            with self._ready:
                while not self._lines and not self._closed:
                    self._ready.wait(_IDLE)
                lines, dropped = list(self._lines), self._dropped
                self._lines.clear()
                self._dropped = 0
                if not lines:
                    return
            if dropped:
                lines.append(self._lost(dropped) + "\n")
            if not self._written(lines):
                with self._ready:
                    self._closed = True
                    self._lines.clear()
                return

    def _written(self, lines: list[str]) -> bool:
        for line in lines:
            try:
                self._stream.write(line)
                self._stream.flush()
            except BlockingIOError:  # noqa: PERF203  (each line has its own fate)
                with self._ready:
                    self._dropped += 1
            except (OSError, ValueError) as error:
                _log.debug("the log cannot be written any more: %s", error)
                return False
        return True
