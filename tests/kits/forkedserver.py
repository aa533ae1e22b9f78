"""The server of `kits.forkedkit`: loads torch and multiworld once, and forks programs that have them.

A launcher (m8d-run, torchrun) that began as a fork starts its workers as forks as well, where their script loads torch or
multiworld. Such a worker is what the launcher would have started: its child, in a session of its own, with its arguments and
environment in /proc. It is forked from a process that the launcher's fork leaves behind before it runs any code, by one in
between that ends at once; meanwhile the launcher is the subreaper. All other programs are started as ever.
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
import re
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

LIMIT = 1 << 18  # bytes of a request
_LAUNCHERS = {"multiworld.run", "torch.distributed.run"}
_LOADS = re.compile(r"^\s*(?:import\b.*\b|from )(?:torch|multiworld)\b", re.MULTILINE)
_READ_EARLY = ("PYTHON", "LD_", "MKL_", "KMP_", "TORCH_", "NCCL_", "LOGLEVEL", "COV")
"""Beginnings of the variables that are read before a fork could have them."""
_SET_LATER = (
    "PYTHONUNBUFFERED",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
)
"""Of these, those that a fork does have: torch reads its own when a group is made, and in launchers."""
_PDEATHSIG, _SET_SUBREAPER, _NEWNET = 1, 36, 0x40000000  # of prctl(2), and of setns(2)
_ANSWERS = 60.0  # seconds; a fork takes some milliseconds


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
        data, fds, _, _ = socket.recv_fds(control, LIMIT, 4)
        if not data:
            signal.set_wakeup_fd(-1)
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            return None
        pid = os.fork()
        if not pid:
            ctypes.CDLL(None).prctl(_PDEATHSIG, int(signal.SIGKILL))  # no longer than the server
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for each in (control, woken, wake, *running.values()):
                each.close()
            request: dict[str, Any] = json.loads(data)
            _take(fds, 3)
            if request["session"]:
                os.setsid()
            return request
        for fd in fds[:3]:
            os.close(fd)
        running[pid] = socket.socket(fileno=fds[3])
        control.send(json.dumps(pid).encode())


def _take(fds: list[int], count: int) -> None:
    """Make the first of these the standard streams, and close all of them."""
    for number, fd in enumerate(fds[:count]):
        os.dup2(fd, number)
    for fd in fds:
        os.close(fd)


# -- workers of launchers --------------------------------------------------------------------------------------


def with_workers(request: dict[str, Any]) -> dict[str, Any] | None:
    """Leave a process behind that workers are forked from, where the program is a launcher of such workers.

    Returns the request of the program itself; in a worker that worker's; None at the end of the process left behind.
    """
    how, name, *words = (*request["words"], "")
    if how != "-m" or name not in _LAUNCHERS or not any(map(_loads_torch, words)):
        return request
    launcher = os.getpid()
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        its.close()
        mine.settimeout(_ANSWERS)
        _fork_workers_with(mine, request["env"])
        return request
    mine.close()
    os.setsid()
    ctypes.CDLL(None).prctl(_PDEATHSIG, int(signal.SIGKILL))
    return _serve_launcher(its) if os.getppid() == launcher else None


def _loads_torch(word: str) -> bool:
    if not word.endswith(".py"):
        return False
    try:
        return bool(_LOADS.search(Path(word).read_text(encoding="utf-8")))
    except OSError:
        return False


def _serve_launcher(control: socket.socket) -> dict[str, Any] | None:
    """Fork for each request. Returns the request in a worker, None when the launcher has ended."""
    while True:
        data, fds, _, _ = socket.recv_fds(control, LIMIT, 3)
        if not data:
            return None
        read, write = os.pipe()
        middle = os.fork()
        if not middle:
            if os.fork():
                os._exit(0)
            os.setsid()
            os.write(write, str(os.getpid()).encode())
            for fd in (read, write):
                os.close(fd)
            control.close()
            _take(fds, 3)
            request: dict[str, Any] = json.loads(data)
            return request
        os.close(write)
        with io.FileIO(read) as told:
            pid = told.readall() or b""
        os.waitpid(middle, 0)
        for fd in fds:
            os.close(fd)
        control.send(pid)


def _fork_workers_with(control: socket.socket, before: dict[str, str]) -> None:
    """Have `subprocess.Popen` of this process, with this environment, ask for a fork where a program may begin as one."""
    start, lock = subprocess.Popen._execute_child, threading.Lock()  # type: ignore[attr-defined]

    def started(popen: Any, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *more: Any) -> None:
        pass_fds, cwd, env, _info, _flags, shell = more[:6]
        fds, env = more[6:12], dict(os.environ if env is None else env)
        plain = not (executable or preexec_fn or pass_fds or shell) and more[17]  # a session of its own
        if not plain or not _fits(args, env, before):
            start(popen, args, executable, preexec_fn, close_fds, *more)
            return
        streams = [fd if fd >= 0 else number for number, fd in enumerate((fds[0], fds[3], fds[5]))]
        words = [str(each) for each in args[1:]]
        request = {"words": words, "env": env, "cwd": os.fspath(cwd or Path.cwd())}
        with lock, _subreaper():
            socket.send_fds(control, [json.dumps(request).encode()], streams)
            popen.pid = int(control.recv(64))
        popen._child_created = True
        popen._close_pipe_fds(*fds)

    subprocess.Popen._execute_child = started  # type: ignore[attr-defined]


def _fits(args: Any, env: dict[str, str], before: dict[str, str]) -> bool:
    if not isinstance(args, list | tuple) or str(args[0]) != sys.executable:
        return False
    words = [str(each) for each in args[1:] if each != "-u"]
    if not words or not _loads_torch(words[0]):
        return False
    return alike(env, before, _SET_LATER)


def alike(env: dict[str, str], other: dict[str, str], but: Collection[str]) -> bool:
    """Whether two environments agree in what is read before a fork could have it, `but` these."""
    names = {name for name in {*env, *other} if name.startswith(_READ_EARLY) and name not in but}
    return all(env.get(name) == other.get(name) for name in names)


@contextlib.contextmanager
def _subreaper() -> Iterator[None]:
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SET_SUBREAPER, 0, 0, 0, 0)


# -- a program -------------------------------------------------------------------------------------------------


def enter_host(name: str) -> None:
    """Be on a host of `kits.netkit`, with all that is forked from here on."""
    with Path(f"/run/netns/{name}").open("rb") as host:
        if ctypes.CDLL(None, use_errno=True).setns(host.fileno(), _NEWNET):
            raise OSError(ctypes.get_errno(), "setns", name)


def become(request: dict[str, Any], base: list[str]) -> None:
    """Be the program that was asked for."""
    words, env = request["words"], request["env"]
    os.environ.clear()  # else the C library would have its variables where others are shown
    os.environ.update(env)
    _show([sys.executable, *words], env)
    os.chdir(request["cwd"])
    at_once = bool(os.environ.get("PYTHONUNBUFFERED")) or words[0] == "-u"
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw: Any = open(number, "wb", 0 if at_once else -1, closefd=False)  # noqa: SIM115
        errors = "strict" if name == "stdout" else "backslashreplace"
        text = io.TextIOWrapper(
            raw, encoding="utf-8", errors=errors, write_through=at_once, line_buffering=number == 2
        )
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if "OMP_NUM_THREADS" in env:  # torch has read it before the fork
        sys.modules["torch"].set_num_threads(int(env["OMP_NUM_THREADS"]))
    sys.modules["numpy"].random.seed()  # else all draw the same numbers; `random` does so itself
    named = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    how, *words = words[1:] if words[0] == "-u" else words
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


def _show(line: list[str], env: dict[str, str]) -> None:
    """Write a command line and an environment over this process's own, which /proc shows, as far as there is room."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    marks = {name: value for name, value in env.items() if name.startswith("M8D_")}  # tests look for these
    variables = [f"{name}={value}" for name, value in (marks | env).items()]
    for first, texts in ((45, line), (47, variables)):  # arg_start, arg_end, env_start and env_end of proc(5)
        begin, end = int(fields[first]), int(fields[first + 1])
        shown = b"\0".join(os.fsencode(text) for text in texts)[: end - begin - 1]
        ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


def main() -> None:
    """Serve, or, in a fork, be a program."""
    base = sys.path[2:]  # without this folder, and without PYTHONPATH
    load()
    gc.collect()
    gc.freeze()
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None and request["host"]:
        enter_host(request["host"])
    if request is not None:
        request = with_workers(request)
    if request is not None:
        become(request, base)


if __name__ == "__main__":
    main()
