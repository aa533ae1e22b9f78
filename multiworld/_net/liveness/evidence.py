"""Helper process that reports whether this process runs, and questions to the helpers of peers.

It answers by UDP at the watchdog's address and port, so a member's endpoint suffices to ask.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from multiworld._core.liveness.evidence import Evidence, answer, question
from multiworld.settings import environment

if TYPE_CHECKING:
    from multiworld._core.membership.roster import Endpoint

__all__ = ["Answered", "Asker", "Helper"]

_PROGRAM = Path(__file__).with_name("evidence_program.py")
_LINE = 3  # descriptor of its control socket
_ENDING = 0.2  # seconds to wait for its end once its control socket is closed; it takes some milliseconds
_LIBRARIES = "LD_LIBRARY_PATH"  # the one variable that the interpreter itself may need
_MOST = 1024  # pending questions; the oldest is dropped


class Helper:
    """The helper of this process. Any thread; started by `start` only.

    It costs about 10 MB of memory (3.5 MB unshared), 10 ms of CPU time to start, and none while members are
    heard.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._twins: dict[tuple[str, int], socket.socket] = {}
        self._tokens: dict[bytes, int] = {}
        # What its queue had no room for, in order, each with the socket that goes with it.
        self._unsaid: dict[bytes, socket.socket | None] = {}
        self._line: socket.socket | None = None
        self._pid = 0

    @property
    def pid(self) -> int:
        """Of the program; 0 where it does not run."""
        return self._pid if self._line is not None else 0

    @property
    def behind(self) -> bool:
        """Whether it has not been told all: call `start` again soon."""
        return bool(self._unsaid)

    def listen(self, endpoint: Endpoint) -> None:
        """Answer at `endpoint`, by UDP, from the helper's start on, unless the UDP port is taken."""
        twin = _bind(endpoint)
        if twin is not None:
            with self._lock:
                self._twins[endpoint.host, endpoint.port] = twin
                self._say(b"u" + _place(twin), b"x" + _place(twin), twin)

    def unlisten(self, endpoint: Endpoint) -> None:
        """Stop answering at `endpoint`."""
        with self._lock:
            twin = self._twins.pop((endpoint.host, endpoint.port), None)
            if twin is not None:
                place = _place(twin)
                self._say(b"x" + place, b"u" + place)
                twin.close()

    def vouch(self, token: bytes) -> None:
        """Answer questions authenticated with `token`; pair each call with one of `forget`."""
        with self._lock:
            self._tokens[token] = self._tokens.get(token, 0) + 1
            if self._tokens[token] == 1:
                self._say(b"+" + token, b"-" + token)

    def forget(self, token: bytes) -> None:
        """Undo one `vouch`."""
        with self._lock:
            left = self._tokens.pop(token, 0) - 1
            if left > 0:
                self._tokens[token] = left
            elif left == 0:
                self._say(b"-" + token, b"+" + token)

    def start(self) -> bool:
        """Start the helper, if it does not run, and tell it what it was not told; False where that fails."""
        with self._lock:
            if self._line is not None:
                if not _has_ended(self._pid):
                    self._go_on()
                    return True
                self._line.close()
                self._line = None
            if sys.platform != "linux" or not _is_python(sys.executable) or not _PROGRAM.is_file():
                return False
            try:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            except OSError:
                return False
            try:
                self._pid = _spawn(theirs)
            except (OSError, ValueError, NotImplementedError):  # the last: a C library without setsid there
                ours.close()
                return False
            finally:
                theirs.close()
            ours.setblocking(False)
            self._line = ours
            self._unsaid = {b"u" + _place(twin): twin for twin in self._twins.values()}
            self._unsaid.update({b"+" + token: None for token in self._tokens})
            self._go_on()
            return True

    def close(self) -> None:
        """End the helper, and close its sockets."""
        with self._lock:
            line, self._line = self._line, None
            for twin in self._twins.values():
                twin.close()
            self._twins.clear()
            self._tokens.clear()
            self._unsaid.clear()
        if line is not None:
            line.close()
            _reap(self._pid)

    def abandon(self) -> None:
        """Close a forked child's copies: the helper is the parent's."""
        for each in (*self._twins.values(), *(() if self._line is None else (self._line,))):
            each.close()

    def _say(self, message: bytes, contrary: bytes, twin: socket.socket | None = None) -> None:
        """Tell it, where it runs; `contrary` is what this undoes, which may be still to be said."""
        if self._line is None:
            return
        if contrary in self._unsaid and twin is None:
            del self._unsaid[contrary]
        else:
            self._unsaid[message] = twin
        self._go_on()

    def _go_on(self) -> None:
        while self._line is not None and self._unsaid:
            message, twin = next(iter(self._unsaid.items()))
            try:
                if twin is None:
                    self._line.send(message)
                else:
                    socket.send_fds(self._line, [b"u"], [twin.fileno()])
            except OSError as error:
                if isinstance(error, BlockingIOError):  # its queue is full
                    return
                # It died: the next one is told all.
            del self._unsaid[message]


@dataclass(frozen=True)
class Answered:
    """Answer of the helper of `process`."""

    process: str
    evidence: Evidence


class Asker:
    """Asks the helpers of other processes. For one thread.

    Args:
        selector: watches its sockets; their data is this object.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._sockets: dict[int, socket.socket] = {}
        self._asked: dict[bytes, tuple[str, bytes]] = {}

    def ask(self, process: str, endpoint: Endpoint, token: bytes) -> None:
        """Ask whether `process`, which listens at `endpoint`, runs."""
        nonce = os.urandom(16)
        while len(self._asked) >= _MOST:
            del self._asked[next(iter(self._asked))]
        self._asked[nonce] = process, token
        # No route, or no descriptor left: the state stays unknown.
        with contextlib.suppress(OSError, ValueError, OverflowError):
            family, address = _resolve(endpoint)
            sock = self._sockets.get(family)
            if sock is None:
                sock = self._sockets[family] = socket.socket(family, socket.SOCK_DGRAM)
                sock.setblocking(False)
                self._selector.register(sock, selectors.EVENT_READ, self)
            sock.sendto(question(token, nonce), address)

    def read(self) -> list[Answered]:
        """Return the answers that arrived."""
        found = []
        for sock in self._sockets.values():
            with contextlib.suppress(OSError):  # until it is empty
                while True:
                    data, _ = sock.recvfrom(64)
                    asked = self._asked.pop(data[4:20], None)
                    evidence = None if asked is None else answer(data, asked[1])
                    if asked is not None and evidence is not None:
                        found.append(Answered(asked[0], evidence))
        return found

    def close(self) -> None:
        """Close its sockets without unregistering them: a forked child shares the parent's selector."""
        for sock in self._sockets.values():
            sock.close()
        self._sockets.clear()


def _is_python(executable: str | None) -> bool:
    """Whether sys.executable is an interpreter: in a program that embeds Python it is that program."""
    return bool(executable) and not hasattr(sys, "frozen") and Path(str(executable)).name.startswith("python")


def _spawn(line: socket.socket) -> int:
    """Start the helper without the environment, streams, terminal and signal mask of this process."""
    libraries = environment(_LIBRARIES)
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    high = (
        os.dup(line.fileno()) if line.fileno() == _LINE else -1
    )  # dup2 to itself would leave it to be closed
    try:
        return os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", str(_PROGRAM)],
            {_LIBRARIES: libraries} if libraries else {},
            file_actions=[
                *((os.POSIX_SPAWN_DUP2, nothing, each) for each in range(_LINE)),
                (os.POSIX_SPAWN_DUP2, line.fileno() if high < 0 else high, _LINE),
            ],
            setsigmask=(),
            setsid=True,
        )
    finally:
        os.close(nothing)
        if high >= 0:
            os.close(high)


_ended: list[int] = []
"""Programs that had not ended yet when they were waited for."""


def _reap(pid: int) -> None:
    _ended.append(pid)
    deadline = time.monotonic() + _ENDING
    while True:
        _ended[:] = [each for each in _ended if not _has_ended(each)]
        if pid not in _ended or time.monotonic() >= deadline:
            return
        time.sleep(0.001)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # another part of the program waits for all its children
        return True


def _place(twin: socket.socket) -> bytes:
    host, port = twin.getsockname()[:2]
    return f"{host} {port}".encode()


def _bind(endpoint: Endpoint) -> socket.socket | None:
    try:
        family, address = _resolve(endpoint)
        twin = socket.socket(family, socket.SOCK_DGRAM)
    except (OSError, ValueError):
        return None
    try:
        twin.bind(address)
    except OSError:
        twin.close()
        return None
    return twin


def _resolve(endpoint: Endpoint) -> tuple[int, tuple[str, int] | tuple[str, int, int, int]]:
    kind, flags = socket.SOCK_DGRAM, socket.AI_NUMERICHOST
    family, _, _, _, address = socket.getaddrinfo(endpoint.host, endpoint.port, type=kind, flags=flags)[0]
    # typeshed has a third kind of address, which numeric hosts do not give.
    return family, address  # type: ignore[return-value]
