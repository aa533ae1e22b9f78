"""Signals in the launcher: queued for its loop (`Wake`), or recorded beside torch's handlers (`Arrivals`).

`Wake` (``--restart worker``) queues signals and never raises. `Arrivals` is for ``--restart group``, where
torch's handlers raise, at any point of the main thread.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from multiworld.run.errors import used_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

__all__ = [
    "REPEATS",
    "Arrivals",
    "Wake",
    "interrupts_at_once",
    "is_another",
    "keep_exit_codes",
    "numbers",
    "repeats_ignored",
]

REPEATS = 1.0
"""Seconds in which a signal that comes again is the same one.

The end of a terminal sends SIGHUP twice, by the shell and by the kernel, and GNU timeout SIGTERM.
"""


def is_another(number: signal.Signals | None, first: signal.Signals, seconds: float) -> bool:
    """Whether a signal that came some seconds after `first` is a second one, not the same one again."""
    return number is not None and (number == signal.SIGINT or number != first or seconds >= REPEATS)


def numbers(names: str) -> tuple[signal.Signals, ...]:
    """Return the signals of a list like ``SIGTERM,SIGINT``; names unknown to this system are left out."""
    known = (getattr(signal, name.strip(), None) for name in names.split(","))
    return tuple(found for found in known if isinstance(found, signal.Signals))


@contextmanager
def interrupts_at_once() -> Iterator[None]:
    """Let Ctrl-C end this process at once: an import that it breaks off prints a traceback.

    A handler other than Python's own is left alone.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def keep_exit_codes() -> None:
    """Have the kernel keep ended processes' exit codes: it drops them where SIGCHLD is ignored.

    Perl daemons and some supervisors ignore it, and hand that on to what they start.
    """
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@contextmanager
def repeats_ignored(first: signal.Signals) -> Iterator[None]:
    """Call the handler of a signal that ends the run only where `is_another` says that it came again."""
    handler = signal.getsignal(first)
    main = threading.current_thread() is threading.main_thread()
    if first == signal.SIGINT or not callable(handler) or not main:
        yield
        return
    began = time.monotonic()

    def again(number: int, frame: FrameType | None) -> None:
        if is_another(signal.Signals(number), first, time.monotonic() - began):
            handler(number, frame)

    signal.signal(first, again)
    try:
        yield
    finally:
        signal.signal(first, handler)


class Wake:
    """Waits until a descriptor is readable, a signal arrives, or a timeout passes."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._ours, self._theirs = socket.socketpair()
        for end in (self._ours, self._theirs):
            end.setblocking(False)
        self._selector.register(self._ours, selectors.EVENT_READ)
        self._came: deque[signal.Signals] = deque()
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup: int | None = None

    def listen(self, signals: Iterable[signal.Signals]) -> None:
        """Queue these signals from now on. Only in the main thread, where Python handles signals."""
        for number in signals:
            if number in {signal.SIGKILL, signal.SIGSTOP} or number in self._before:
                continue
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            self._before[number] = signal.signal(number, self._note)
        if self._wakeup is None:
            self._wakeup = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)

    @property
    def listening(self) -> tuple[signal.Signals, ...]:
        """The signals that are queued."""
        return tuple(self._before)

    def _note(self, number: int, _frame: object) -> None:
        self._came.append(signal.Signals(number))

    def came(self, signals: Iterable[signal.Signals]) -> bool:
        """Whether one of these is queued; it stays there."""
        return not set(signals).isdisjoint(self._came)

    def signalled(self) -> signal.Signals | None:
        """Return and remove the oldest queued signal."""
        return self._came.popleft() if self._came else None

    def rouse(self) -> None:
        """Have `wait` return. From any thread."""
        with suppress(OSError):  # it is awake, or closed
            self._theirs.send(b".")

    def add(self, fd: int) -> None:
        """Wake when `fd` is readable; where the kernel has no room for it, the timeout of `wait` does."""
        try:
            self._selector.register(fd, selectors.EVENT_READ)
        except OSError as error:
            if not used_up(error):
                raise

    def remove(self, fd: int) -> None:
        """No longer wake for `fd`."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def wait(self, timeout: float) -> set[int]:
        """Sleep for `timeout` seconds at most; return the descriptors that are readable."""
        if self._came:
            return set()
        ready = {key.fd for key, _ in self._selector.select(max(0.0, timeout))}
        if self._ours.fileno() in ready:
            ready.discard(self._ours.fileno())
            with suppress(BlockingIOError):
                while self._ours.recv(512):
                    continue
        return ready

    def close(self) -> None:
        """Restore the handlers."""
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._wakeup)
            self._wakeup = None
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()
        self._selector.close()
        self._ours.close()
        self._theirs.close()


class Arrivals:
    """Records signals, independently of their handlers and of the exceptions that these raise.

    Python's own handler in C writes each signal's number to a descriptor (`signal.set_wakeup_fd`), before the
    handler in Python runs. So a signal is not lost with an exception that an ``except Exception`` swallows
    (logging has them, and destructors).
    """

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        for end in (self._ours, self._theirs):
            end.setblocking(False)
        self._before: int | None = None

    def open(self) -> None:
        """Record signals from now on. Harmless when repeated, and outside of the main thread."""
        if self._before is None and threading.current_thread() is threading.main_thread():
            self._before = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
            os.register_at_fork(after_in_child=self._forked)

    def take(self, wanted: Iterable[signal.Signals]) -> signal.Signals | None:
        """Return the first of `wanted` that arrived since the last call, or None."""
        numbers = b""
        with suppress(BlockingIOError):
            while True:
                numbers += self._ours.recv(512)
        expected = set(wanted)
        return next((signal.Signals(number) for number in numbers if number in expected), None)

    def close(self) -> None:
        """Stop recording. Harmless when repeated."""
        if self._before is not None:
            signal.set_wakeup_fd(self._before)
            self._before = None
        self._ours.close()
        self._theirs.close()

    def _forked(self) -> None:
        """Detach a forked child (a worker that is a function) from the launcher's descriptor."""
        if self._before is not None:
            self._before = None
            signal.set_wakeup_fd(-1)
            self._ours.close()
            self._theirs.close()
