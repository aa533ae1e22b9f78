"""Python programs forked from a server that has loaded torch: a start costs 0.1 s of processor time instead of 3 s.

`Forked` is a `subprocess.Popen` whose program begins in a fork, and ends as any program of Python's does: it goes through
the end of the interpreter. Its environment, folder, streams, session and ``sys.path`` are those that were asked for. What a
fork cannot have is started as ever: other interpreters, options, and variables that are read while Python or torch is loaded.

Run as a program it is the server: ``python forkedkit.py FD``.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_LIMIT = 1 << 18  # bytes of a request
_STARTS = 120.0  # seconds: torch is loaded, on a busy machine
_READ_EARLY = ("PYTHON", "LD_", "OMP_", "MKL_", "KMP_", "TORCH_", "NCCL_", "LOGLEVEL", "COV")
"""Beginnings of the variables that are read before a fork could have them."""
_SET_LATER = ("PYTHONPATH", "PYTHONUNBUFFERED")
"""Of these, those that a fork does have."""


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
    alike = (
        env.get(name) == environ.get(name)
        for name in {*env, *environ}
        if name.startswith(_READ_EARLY) and name not in _SET_LATER
    )
    return first == str(ROOT) and known.issuperset(others) and all(alike)


class Forked(subprocess.Popen):
    """A program that began in a fork, where `fits` allows it."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *more: Any) -> None:
        pass_fds, cwd, env, _info, _flags, shell = more[:6]
        fds = more[6:12]
        told = dict(os.environ if env is None else env)
        self._status: socket.socket | None = None
        if executable or preexec_fn or pass_fds or shell or not fits(args, told):
            super()._execute_child(args, executable, preexec_fn, close_fds, *more)  # type: ignore[misc]
            return
        given = (fds[0], fds[3], fds[5])
        streams = [fd if fd >= 0 else number for number, fd in enumerate(given)]
        request = {
            "words": [str(each) for each in args[1:]], "env": told, "cwd": os.fspath(cwd or Path.cwd()),
            "session": bool(more[17]),
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
                [sys.executable, __file__, str(its.fileno())], pass_fds=[its.fileno()], stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        mine.settimeout(_STARTS)
        self.environ = dict(os.environ)
        self._control, self._lock = mine, threading.Lock()

    def start(self, request: dict[str, Any], streams: list[int]) -> tuple[int, socket.socket]:
        """Start a program; return its pid, and the socket that gets its status."""
        mine, its = socket.socketpair()
        with its, self._lock:
            socket.send_fds(self._control, [json.dumps(request).encode()], [*streams, its.fileno()])
            pid = json.loads(self._control.recv(_LIMIT))
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


# -- the server ------------------------------------------------------------------------------------------------


def load() -> None:
    """Load what programs of tests load."""
    import multiworld

    names = [module.name for module in pkgutil.walk_packages(multiworld.__path__, "multiworld.")]
    for name in (
        "torch.distributed.run",
        "torch.distributed.elastic.agent.server.local_elastic_agent",
        *names,
    ):
        if not name.endswith("__main__") and not name.startswith(("multiworld.shim", "multiworld.cli")):
            importlib.import_module(name)


def serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for each request. Returns the request in a fork, None in the server at its end."""
    running: dict[int, socket.socket] = {}
    woken, wake = socket.socketpair()
    for each in (woken, wake):
        each.setblocking(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # typed for pytest
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                woken.recv(4096)
            while running:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                with running.pop(pid) as told, contextlib.suppress(OSError):
                    told.send(struct.pack("i", status))
        if control not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(control, _LIMIT, 4)
        if not data:
            signal.set_wakeup_fd(-1)
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            return None
        pid = os.fork()
        if not pid:
            ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG: no longer than the server
            signal.set_wakeup_fd(-1)
            for number, fd in enumerate(fds[:3]):
                os.dup2(fd, number)
            for each in (control, woken, wake, *running.values()):
                each.close()
            for fd in fds:
                os.close(fd)
            request: dict[str, Any] = json.loads(data)
            return request
        for fd in fds[:3]:
            os.close(fd)
        running[pid] = socket.socket(fileno=fds[3])
        control.send(json.dumps(pid).encode())


def become(request: dict[str, Any], base: list[str]) -> None:
    """Be the program that was asked for."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw: Any = open(number, "wb", 0 if at_once else -1, closefd=False)  # noqa: SIM115
        errors = "strict" if name == "stdout" else "backslashreplace"
        text = io.TextIOWrapper(
            raw, encoding="utf-8", errors=errors, write_through=at_once, line_buffering=number == 2
        )
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    how, *words = request["words"]
    named = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    if how == "-m":
        sys.path[:] = [str(Path.cwd()), *named, *base]
        sys.argv[:] = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.path[:] = ["", *named, *base]
        sys.argv[:] = ["-c", *words[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[0], "<string>", "exec"), main.__dict__)  # noqa: S102
    else:
        sys.path[:] = [str(Path(how).resolve().parent), *named, *base]
        sys.argv[:] = [how, *words]
        runpy.run_path(how, run_name="__main__")


def main() -> None:
    """Serve, or, in a fork, be a program."""
    base = sys.path[2:]  # without this folder, and without PYTHONPATH
    load()
    gc.collect()
    gc.freeze()
    if (request := serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        become(request, base)


if __name__ == "__main__":
    main()
