"""Log writer in a thread of its own: a paused terminal or a full pipe holds up no caller."""

from __future__ import annotations

import errno
import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

__all__ = ["Backlog", "LineWriter"]

_log = logging.getLogger(__name__)

_MOST_WAITING = 10_000
_IDLE = 60.0
_GONE = frozenset({errno.EBADF, errno.EIO})
"""What writing to a descriptor that was closed raises, and to a terminal that is gone."""

T = TypeVar("T")


class LostError(Exception):
    """A thing could not be handled; the next one may be."""


class Backlog(Generic[T]):
    """Handles things in a thread of its own, in their order; never blocks the caller that puts them.

    Those that find no room are counted, and the count is handled later.

    Args:
        name: of the thread.
        idle: seconds without anything after which the thread ends; None: it stays until `close`.
    """

    def __init__(self, name: str, *, idle: float | None = None) -> None:
        self._name = name
        self._ends_after = idle
        self._ready = threading.Condition()
        self._waiting: deque[T] = deque()
        self._dropped = 0
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def _handle(self, thing: T) -> bool:
        """Handle one, in the thread; False: no more can be handled. Raises LostError for a lost one."""
        raise NotImplementedError

    def _lost(self, number: int) -> T:
        """What says that so many were left out."""
        raise NotImplementedError

    def put(self, thing: T) -> None:
        """Have it handled.

        Raises:
            RuntimeError: there can be no thread; it waits for the next one that comes.
        """
        with self._ready:
            if self._closed:
                return
            if len(self._waiting) >= _MOST_WAITING:
                self._dropped += 1
                return
            self._waiting.append(thing)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            self._ready.notify_all()

    def flush(self, timeout: float) -> None:
        """Wait until all that waits is handled, for at most `timeout` seconds."""
        with self._ready:
            self._ready.wait_for(lambda: self._thread is None or not (self._waiting or self._busy), timeout)

    def close(self, timeout: float) -> None:
        """Handle what waits, for at most `timeout` seconds; what comes later is left out."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout)

    def _run(self) -> None:
        try:
            self._loop()
        finally:  # whatever a handler raised: the next thing has a thread again
            with self._ready:
                if self._thread is threading.current_thread():  # else it idled, and another may have followed
                    self._thread, self._busy = None, False
                    self._ready.notify_all()

    def _loop(self) -> None:
        while True:
            with self._ready:
                self._busy = False
                self._ready.notify_all()
                while not self._waiting and not self._closed:
                    if not self._ready.wait(self._ends_after or _IDLE) and self._ends_after is not None:
                        break
                things, dropped = list(self._waiting), self._dropped
                self._waiting.clear()
                self._dropped = 0
                if not things:
                    # Before the lock is free: what is put from now on starts another thread.
                    self._thread = None
                    return
                self._busy = True
            told = [(thing, 1) for thing in things]
            if dropped:
                told.append((self._lost(dropped), dropped))
            if not self._handled(told):
                with self._ready:
                    self._closed = True
                    self._waiting.clear()
                return

    def _handled(self, things: list[tuple[T, int]]) -> bool:
        for thing, number in things:  # and for how many it stands
            try:
                if not self._handle(thing):
                    return False
            except LostError:  # noqa: PERF203  (each has its own fate)
                with self._ready:
                    self._dropped += number
        return True


class LineWriter(Backlog[str]):
    """Writes lines to a stream.

    After a broken pipe, a closed file or a terminal that is gone the rest is left out. A line that cannot be
    written for another reason, a full disk for instance, counts as lost.

    Args:
        stream: to write to; each line is flushed.
        lost: returns the line, without its end, that says how many were left out.
        name: of the thread.
    """

    def __init__(self, stream: TextIO, lost: Callable[[int], str], *, name: str) -> None:
        super().__init__(name)
        self._stream = stream
        self._line_of_lost = lost

    def _handle(self, line: str) -> bool:
        try:
            self._stream.write(line)
            self._stream.flush()
        except (OSError, ValueError) as error:
            over = isinstance(error, ConnectionError) or getattr(error, "errno", None) in _GONE
            if not (over or self._stream.closed):
                raise LostError from error
            _log.debug("the log cannot be written any more: %s", error)
            return False
        return True

    def _lost(self, number: int) -> str:
        return self._line_of_lost(number) + "\n"
