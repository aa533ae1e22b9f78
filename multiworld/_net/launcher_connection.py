"""Control connection of a worker to its launcher: JSON objects, one per line, over a unix socket.

Worlds do not depend on the launcher: when it goes, the connection falls silent and they continue.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import selectors
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from multiworld._net import peer_user
from multiworld.errors import MultiworldError
from multiworld.logs.source import logger

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MAX_LINE", "ControlClient", "Lines", "ProtocolError", "encode"]

MAX_LINE = 1 << 20
"""Bytes of the longest line, its end included."""

_BLOCK = 1 << 16
_MOST_WAITING = 10_000
"""Reports queued for a launcher that does not read; the oldest are dropped."""
_TURN = 30.0
"""Seconds between two checks without events."""
_AGAIN = 0.02
"""Seconds before the next try where the launcher has not accepted those before: its queue was full."""

_log = logger(__name__)


class ProtocolError(MultiworldError):
    """Data on a control socket violates the protocol."""


def encode(message: dict[str, Any], most: int = MAX_LINE) -> bytes:
    """One message as a line.

    Raises:
        ProtocolError: it is longer than `most`.
    """
    line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
    if len(line) > most:
        raise ProtocolError(
            f"a message of {len(line)} bytes",
            rule=f"A line has at most {most} bytes",
            next_step="Send less at once",
        )
    return line


class Lines:
    """Parser of messages from pieces of bytes. Pure."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, octets: bytes) -> list[dict[str, Any]]:
        """Parse the next piece; return the messages that it completes.

        Raises:
            ProtocolError: a line is too long, or no JSON object. Feed nothing after that.
        """
        looked = len(self._buffer)
        self._buffer += octets
        messages = []
        start = 0
        while (end := self._buffer.find(b"\n", max(start, looked))) >= 0:
            messages.append(_decode(bytes(self._buffer[start:end])))
            start = end + 1
        del self._buffer[:start]
        if len(self._buffer) >= MAX_LINE:
            raise _bad(f"{len(self._buffer)} bytes without an end of line")
        return messages


def _decode(line: bytes) -> dict[str, Any]:
    if len(line) >= MAX_LINE:
        raise _bad(f"a line of {len(line)} bytes")
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise _bad(f"{line[:60]!r}") from exc
    if not isinstance(message, dict):
        raise _bad(f"{line[:60]!r}")
    return message


def _bad(what: str) -> ProtocolError:
    return ProtocolError(
        what,
        rule=f"A line is one JSON object, at most {MAX_LINE} bytes long",
        next_step="Speak as docs/run-output.md says",
    )


class _Waiter:
    """A pending question."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.answer: dict[str, Any] | None = None

    def settle(self, answer: dict[str, Any] | None) -> None:
        self.answer = answer
        self.done.set()


class ControlClient:
    """The connection, with one thread that reads and writes; thread-safe.

    Args:
        path: of the launcher's socket.
        deadline: ``time.monotonic()`` seconds until which to connect.
        retired: called, in the thread, when the launcher retires this worker. Quick.
        looked: called, in the thread, with the launcher's question how this worker's worlds stand; `report`
            takes the answer, with the question's "look". Quick.
        store: address of its store, as an earlier connection was told last; "" for none.

    Raises:
        OSError: the socket does not accept, or another user's process listens there.
    """

    def __init__(
        self,
        path: str,
        *,
        deadline: float,
        retired: Callable[[], object] | None = None,
        looked: Callable[[dict[str, Any]], object] | None = None,
        store: str = "",
    ) -> None:
        self._retired = retired
        self._looked = looked
        self._sock = socket.socket(socket.AF_UNIX)
        try:
            self._connect(path, deadline)
            peer_user.check(self._sock)
            self._sock.setblocking(False)
            self._awake, self._wake = socket.socketpair()
        except BaseException:
            self._sock.close()
            raise
        self._awake.setblocking(False)
        self._wake.setblocking(False)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._waiters: dict[int, _Waiter] = {}
        self._hello = _Waiter()
        self._questions: deque[bytes] = deque()
        self._reports: deque[bytes] = deque(maxlen=_MOST_WAITING)
        self._alive = True
        self._store = store
        self._thread = threading.Thread(target=self._run, daemon=True, name="m8d-control")
        try:
            self._thread.start()
        except BaseException as error:  # no thread is left for this process, or Ctrl-C
            for each in (self._sock, self._awake, self._wake):
                each.close()
            if isinstance(error, RuntimeError):  # it lacks something, as without descriptors
                raise OSError(errno.EAGAIN, f"no connection with the launcher: {error}") from error
            raise

    def _connect(self, path: str, deadline: float) -> None:
        while True:
            self._sock.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                self._sock.connect(path)
            except BlockingIOError:  # at once where the queue is full, whatever the timeout is
                if time.monotonic() + _AGAIN >= deadline:
                    raise
                time.sleep(_AGAIN)
            else:
                return

    @property
    def alive(self) -> bool:
        """Whether the launcher is connected."""
        return self._alive and os.getpid() == self._pid

    @property
    def store(self) -> str:
        """Address of the launcher's store, as last reported; empty before."""
        return self._store

    def hello(self, message: dict[str, Any], *, deadline: float) -> dict[str, Any] | None:
        """Introduce this worker, once; return the answer, or None without one in time."""
        return self._question(message, self._hello, deadline)

    def introduce(self, message: dict[str, Any]) -> None:
        """Introduce this worker, without waiting for the answer; before all questions and reports."""
        self._questions.append(encode(message))
        self._rouse()

    def ask(self, what: str, *, deadline: float) -> dict[str, Any] | None:
        """Send a question; return the answer, or None without one in time or without the launcher."""
        number, waiter = next(self._ids), _Waiter()
        with self._lock:
            self._waiters[number] = waiter
        try:
            return self._question({"ask": what, "id": number}, waiter, deadline)
        finally:
            with self._lock:
                self._waiters.pop(number, None)

    def report(self, message: dict[str, Any]) -> None:
        """Queue a report for the launcher. Never blocks, never raises; a report may be lost."""
        if not self.alive:
            return
        with contextlib.suppress(ProtocolError, ValueError, TypeError):  # reports are best effort
            self._reports.append(encode(message))
            self._rouse()

    def close(self) -> None:
        """Close the connection. Idempotent; in a forked child it leaves the parent's connection alone."""
        self._alive = False
        if os.getpid() == self._pid:
            self._rouse()
            if threading.current_thread() is not self._thread:
                self._thread.join(1.0)
        else:  # copies of the parent's descriptors, which would keep its connection open
            for each in (self._sock, self._awake, self._wake):
                each.close()

    # -- the thread ------------------------------------------------------------------------------------------

    def _question(self, message: dict[str, Any], waiter: _Waiter, deadline: float) -> dict[str, Any] | None:
        self._questions.append(encode(message))
        self._rouse()
        while self.alive and not waiter.done.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            waiter.done.wait(min(left, 1.0))
        return waiter.answer

    def _rouse(self) -> None:
        with contextlib.suppress(OSError):  # it is awake already, or gone
            self._wake.send(b".")

    def _run(self) -> None:
        try:
            self._talk()
        except (OSError, ProtocolError) as exc:
            _log.info("the launcher is gone: %s", exc)
        finally:
            self._alive = False
            with self._lock:
                waiting = (self._hello, *self._waiters.values())
            for waiter in waiting:
                if not waiter.done.is_set():
                    waiter.settle(None)
            for each in (self._sock, self._awake, self._wake):
                each.close()

    def _talk(self) -> None:
        lines = Lines()
        out = b""
        with selectors.PollSelector() as selector:  # not epoll: a forked child would share it
            selector.register(self._sock, selectors.EVENT_READ)
            selector.register(self._awake, selectors.EVENT_READ)
            while self._alive:
                out = out or self._next()
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if out else 0)
                selector.modify(self._sock, wanted)
                for key, ready in selector.select(_TURN):
                    if key.fileobj is self._awake:
                        self._awake.recv(_BLOCK)
                        continue
                    if ready & selectors.EVENT_WRITE:
                        out = out[self._sock.send(out) :]
                    if ready & selectors.EVENT_READ:
                        octets = self._sock.recv(_BLOCK)
                        if not octets:
                            _log.info("the launcher is gone")
                            return
                        for message in lines.feed(octets):
                            self._hear(message)

    def _next(self) -> bytes:
        """Return the next message to send: questions first, because callers wait for them."""
        for waiting in (self._questions, self._reports):
            with contextlib.suppress(IndexError):
                return waiting.popleft()
        return b""

    def _hear(self, message: dict[str, Any]) -> None:
        if isinstance(store := message.get("store"), str):
            self._store = store
        if message.get("retire") is True and self._retired is not None:
            self._retired()
        if "look" in message and self._looked is not None:
            self._looked(message)
        number = message.get("id")
        if number is None:
            if "worlds" in message or "error" in message:
                self._hello.settle(message)
            return
        with self._lock:
            waiter = self._waiters.get(number) if isinstance(number, int) else None
        if waiter is not None:
            waiter.settle(message)
