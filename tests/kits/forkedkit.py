"""Python programs forked from a server that has loaded torch: a start costs 0.1 s of processor time instead of 3 s.

`Forked` is a `subprocess.Popen` whose program begins in a fork, and ends as any program of Python's does: it goes through
the end of the interpreter. Its environment, folder, streams, session and ``sys.path`` are those that were asked for. What a
fork cannot have is started as ever: other interpreters, options, and variables that are read while Python or torch is loaded.

Hosts of `kits.netkit` are fine too: ``ip netns exec HOST`` may stand before the command. Workers of a launcher that began as
a fork do so as well (`kits.forkedserver`, the server).
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from kits.forkedserver import LIMIT, alike

ROOT = Path(__file__).parents[2]
_SERVER = Path(__file__).with_name("forkedserver.py")
_ROOM = {"FORKED_ROOM": "." * 8000}
"""Room for the variables of programs: /proc shows them in the place of the server's."""
_STARTS = 120.0  # seconds: torch is loaded, on a busy machine
_SET_LATER = ("PYTHONPATH", "PYTHONUNBUFFERED")
"""Of the variables that are read early, those that a fork does have."""


def host_of(args: Any) -> tuple[str | None, Any]:
    """The host (a network namespace) that a command is for, and the command itself."""
    if isinstance(args, list | tuple) and [*map(str, args[:3])] == ["ip", "netns", "exec"]:
        return str(args[3]), args[4:]
    return None, args


def fits(args: Any, env: dict[str, str]) -> bool:
    """Whether a command of this Python may begin as a fork: ``-m``, ``-c`` or a script, and nothing that is read early.

    Folders on PYTHONPATH are: a package there may have entry points.
    """
    if not isinstance(args, list | tuple) or len(args) < 2 or str(args[0]) != sys.executable:
        return False
    if str(args[1]).startswith("-") and (str(args[1]) not in {"-m", "-c"} or len(args) < 3):
        return False
    first, *others = env.get("PYTHONPATH", "").split(os.pathsep)
    known = {str(ROOT), str(ROOT / "tests"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    environ = _servers[0].environ if _servers else dict(os.environ)
    return first == str(ROOT) and known.issuperset(others) and alike(env, environ, _SET_LATER)


class Forked(subprocess.Popen):
    """A program that began in a fork, where `fits` allows it."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *more: Any) -> None:
        pass_fds, cwd, env, _info, _flags, shell = more[:6]
        fds = more[6:12]
        told = dict(os.environ if env is None else env)
        self._status: socket.socket | None = None
        host, words = host_of(args)
        if executable or preexec_fn or pass_fds or shell or not fits(words, told):
            super()._execute_child(args, executable, preexec_fn, close_fds, *more)  # type: ignore[misc]
            return
        given = (fds[0], fds[3], fds[5])
        streams = [fd if fd >= 0 else number for number, fd in enumerate(given)]
        request = {
            "words": [str(each) for each in words[1:]], "env": told, "cwd": os.fspath(cwd or Path.cwd()),
            "session": bool(more[17]), "host": host,
        }  # fmt: skip
        self.pid, self._status = server().start(request, streams)
        self._child_created = True
        self._close_pipe_fds(*fds)  # type: ignore[attr-defined]

    def _internal_poll(self, _deadstate: int | None = None, **more: Any) -> int | None:
        if self._status is None:
            return super()._internal_poll(_deadstate, **more)  # type: ignore[misc, no-any-return]
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                if self.returncode is None and (found := self._try_wait(os.WNOHANG))[0]:
                    self._handle_exitstatus(found[1])  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._status is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc, no-any-return]
        if wait_flags & os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        told = self._status.recv(8)
        self._status.close()
        # Without a server there is no status: it was killed, and with it what it had forked.
        return self.pid, struct.unpack("i", told)[0] if told else int(signal.SIGKILL)


def program(text: str, *words: str, **more: Any) -> Forked:
    """Start a program's text with arguments; `more` is for `subprocess.Popen`. What it writes can be read."""
    given: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **more}
    env = {**os.environ, "PYTHONPATH": str(ROOT), **given.pop("env", {})}
    return Forked([sys.executable, "-c", text, *words], env=env, **given)


class _Server:
    """The server of this process, as its clients see it."""

    def __init__(self) -> None:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self.process = subprocess.Popen(
                [sys.executable, str(_SERVER), str(its.fileno()), "." * 2000], pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT), **_ROOM},
            )  # fmt: skip
        mine.settimeout(_STARTS)
        self.environ = dict(os.environ)
        self._control, self._lock = mine, threading.Lock()

    def start(self, request: dict[str, Any], streams: list[int]) -> tuple[int, socket.socket]:
        """Start a program; return its pid, and the socket that gets its status."""
        mine, its = socket.socketpair()
        with its, self._lock:
            socket.send_fds(self._control, [json.dumps(request).encode()], [*streams, its.fileno()])
            pid = json.loads(self._control.recv(LIMIT))
        return pid, mine

    def close(self) -> None:
        self._control.close()
        self.process.wait(_STARTS)


_servers: list[_Server] = []
_starting = threading.Lock()


def server() -> _Server:
    """The server of this process, started when it is needed first. `stop` ends it."""
    with _starting:
        if not _servers:
            _servers.append(_Server())
        return _servers[0]


def stop() -> None:
    """End the server, if there is one, and what is left of its programs."""
    while _servers:
        _servers.pop().close()
