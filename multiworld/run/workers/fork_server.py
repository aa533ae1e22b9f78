"""The fork server of ``m8d-run --preload``: imports modules once, and forks workers that have them.

The launcher starts it (`multiworld.run.workers.fork_client`) with its pid, a socket, the modules, and the
command line of the workers. It ends with the launcher. Messages in both directions are JSON with four bytes
of length (big-endian) in front:

    -> {"argv": [...], "env": {...}, "files": [1, 2]}    start a worker. With it come descriptors: one to read
                                                          from, then those of the worker's files (1: standard
                                                          output, 2: standard error)
    <- {"ready": SECONDS}                                 all modules are imported
    <- {"failed": TEXT}                                   they are not; the fork server ends
    <- {"pid": PID}  or  {"error": TEXT}                  the worker was forked, or not

A worker is the launcher's child: it is forked by a process in between that ends at once, and the launcher is
the subreaper then. It waits for a byte at the descriptor, which the launcher writes when it has told the
orphan reaper of the worker; without it (the launcher was killed) the worker ends before any code of the
user's ran. Then the script runs as ``python -u SCRIPT`` or ``python -u -m MODULE`` would run it.

This program imports nothing but the standard library, and starts no thread.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import io
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
import types
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["WorkerProgram", "main", "preload", "receive", "send"]

_SET_PDEATHSIG = 1  # of prctl(2)
_LENGTH = 4
_MOST_FILES = 3


@dataclass(frozen=True)
class WorkerProgram:
    """What a forked process is to run.

    Attributes:
        argv: its command line after ``python -u``: SCRIPT ARGUMENTS, or -m MODULE ARGUMENTS.
        env: its whole environment.
    """

    argv: list[str]
    env: dict[str, str]

    def run(self) -> None:
        """Run the script or module as ``__main__``; its exceptions go through."""
        sys.excepthook = _without_own_frames
        sys.orig_argv[:] = [sys.executable, "-u", *self.argv]
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        module.__dict__["__builtins__"] = builtins
        if self.argv[0] == "-m":
            sys.argv = self.argv[1:]
            runpy._run_module_as_main(self.argv[1])  # type: ignore[attr-defined]  # noqa: SLF001  (what -m calls)
            return
        sys.argv = list(self.argv)
        path = str(Path(self.argv[0]).absolute())
        module.__dict__.update(
            __file__=path, __cached__=None, __loader__=importlib.machinery.SourceFileLoader("__main__", path)
        )
        try:
            with io.open_code(path) as file:
                source = file.read()
        except OSError as exc:
            sys.stderr.write(f"{sys.executable}: can't open file {path!r}: {exc}\n")
            raise SystemExit(2) from None
        code = compile(source, path, "exec", dont_inherit=True)
        exec(code, module.__dict__)  # nosec B102  # noqa: S102  (the user's own program)


# messages


def send(channel: socket.socket, message: dict[str, Any], files: list[int] | None = None) -> None:
    """Send a message, and descriptors with it. Raises OSError; TimeoutError at the socket's timeout."""
    data = json.dumps(message).encode()
    data = len(data).to_bytes(_LENGTH, "big") + data
    sent = socket.send_fds(channel, [data], files) if files else 0
    channel.sendall(data[sent:])


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive a message and its descriptors; None where the other end is closed.

    Raises:
        OSError: the connection failed; TimeoutError at the socket's timeout.
    """
    data, files = b"", []
    while len(data) < _LENGTH or len(data) < _LENGTH + int.from_bytes(data[:_LENGTH], "big"):
        # Never more than this message: the next one has descriptors of its own.
        wanted = _LENGTH - len(data)
        if wanted <= 0:
            wanted = _LENGTH + int.from_bytes(data[:_LENGTH], "big") - len(data)
        more, came, _flags, _address = socket.recv_fds(channel, wanted, _MOST_FILES)
        files += came
        if not more:
            for each in files:
                os.close(each)
            return None
        data += more
    message: dict[str, Any] = json.loads(data[_LENGTH:])
    return message, files


# the fork server


def preload(modules: list[str]) -> str:
    """Import the modules; return why workers cannot be forked of this process, "" where they can."""
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as exc:  # noqa: BLE001  (SystemExit of a script that was named, too: it is told)
            lines = traceback.format_exception(exc)
            return f"{name} cannot be imported:\n{''.join(lines).rstrip()}"
        threads = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
        if threads:
            return f"{name} starts threads when it is imported ({', '.join(threads)}); a fork lacks them"
        if _cuda_is_lost():
            return (
                f"{name} uses CUDA when it is imported (torch.cuda.is_available() does already): "
                "a process that is forked then cannot"
            )
    return ""


def _cuda_is_lost() -> bool:
    """Whether torch refuses CUDA in a process that is forked of this one: only such a process knows."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None:
        return False
    child = _forked()
    if not child:
        lost = 1
        try:
            lost = int(cuda._is_in_bad_fork())  # noqa: SLF001  (torch says it nowhere else)
        finally:
            os._exit(lost)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def _forked() -> int:
    """Fork, without the warning of Python 3.12 and later: OpenBLAS has threads, and ends them for a fork."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def changed(before: dict[str, str], env: dict[str, str], after: dict[str, str]) -> dict[str, str]:
    """Return a worker's environment, with what the imports changed in this process's.

    Args:
        before: this process's at its start.
        env: the worker's, as the launcher gives it; where it differs from `before`, that stays.
        after: this process's after the imports.
    """
    names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    ours = {name for name in names if env.get(name) == before.get(name)}
    kept = {name: value for name, value in env.items() if name not in ours}
    return kept | {name: after[name] for name in ours if name in after}


def serve(channel: socket.socket, before: dict[str, str]) -> WorkerProgram | None:
    """Fork workers until the launcher closes the socket; return None then, and in a worker what to run."""
    after = dict(os.environ)
    while True:
        try:
            received = receive(channel)
        except OSError:
            return None
        if received is None:
            return None
        message, files = received
        worker = WorkerProgram(message["argv"], changed(before, message["env"], after))
        try:
            answer = _fork(worker, files, message["files"], channel)
        except OSError as exc:
            answer = {"error": str(exc)}
        if answer is None:
            return worker
        for each in files:
            os.close(each)
        try:
            send(channel, answer)
        except OSError:
            return None


def _fork(
    worker: WorkerProgram, files: list[int], numbers: list[int], channel: socket.socket
) -> dict[str, Any] | None:
    """Fork a worker whose parent is the launcher; return the answer, None in the worker."""
    read, write = os.pipe()
    try:
        middle = _forked()
    except OSError:
        os.close(read)
        os.close(write)
        raise
    if middle:
        os.close(write)
        with io.FileIO(read) as told:
            said = told.readall() or b""
        with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored: it has ended
            os.waitpid(middle, 0)
        return {"pid": int(said)} if said else {"error": "no memory or process is left for it"}
    child = -1
    try:
        child = os.fork()
    finally:
        if child:  # also where the fork failed: this process has nothing else to do
            os._exit(0)
    try:
        os.setsid()
        for number in _IGNORED:  # before the launcher knows it, and may signal it
            if signal.getsignal(number) is signal.SIG_IGN:
                default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                signal.signal(number, default)
        os.write(write, str(os.getpid()).encode())
        for each in (read, write):
            os.close(each)
        channel.close()
        _become(worker, files, numbers)
    except BaseException:  # noqa: BLE001  (it must not go on as a second fork server)
        traceback.print_exc()
        os._exit(1)
    return None


def _become(worker: WorkerProgram, files: list[int], numbers: list[int]) -> None:
    """Make the forked process what a new one would be; it ends where the launcher has gone."""
    go, *outputs = files
    if not os.read(go, 1):
        os._exit(1)
    os.close(go)
    for source, target in zip(outputs, numbers, strict=True):
        if source != target:
            os.dup2(source, target)
            os.close(source)
    os.environ.clear()
    os.environ.update(worker.env)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()  # else all workers draw the same numbers; `random` does so itself
    with contextlib.suppress(OSError, ValueError, IndexError):
        _show_in_ps([sys.executable, "-u", *worker.argv])


def _show_in_ps(command: list[str]) -> None:
    """Write a command line over this process's own, which has the same or more room."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, 48 and 49 of proc(5)
    line = b"\0".join(os.fsencode(word) for word in command)[: end - begin - 1]
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)


def _without_own_frames(
    kind: type[BaseException], exc: BaseException, trace: types.TracebackType | None
) -> None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, exc.with_traceback(trace), trace)


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_IGNORED = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
"""Signals to all of a run's processes: this one ends with the launcher alone. Workers have their defaults
again; what was ignored before (nohup) stays so."""


def main(arguments: list[str]) -> WorkerProgram | None:
    """Import the modules, then fork workers; return what to run in a worker, None at the end.

    Args:
        arguments: the launcher's pid; number of the socket's descriptor; modules, separated by commas;
            command line of workers as in `WorkerProgram`.
    """
    launcher, *arguments = arguments
    libc = ctypes.CDLL(None, use_errno=True)
    # An import may take long, and does not look at the socket. Forked processes do not have this.
    libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):
        return None
    channel = socket.socket(fileno=int(arguments[0]))
    channel.set_inheritable(False)
    before = dict(os.environ)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # As the workers' own: modules beside the script are found, and none of this program's neighbours is.
    script = arguments[2]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path.cwd() if script == "-m" else Path(script).resolve().parent)
    began = time.monotonic()
    failed = preload(arguments[1].split(","))
    try:
        send(channel, {"failed": failed} if failed else {"ready": time.monotonic() - began})
    except OSError:  # the launcher has ended
        return None
    if failed:
        return None
    libc.fflush(None)  # else each worker writes what C code of an import has left in a buffer
    # Collections would write to each object's header, and so copy pages that workers share.
    gc.collect()
    gc.freeze()
    return serve(channel, before)


if __name__ == "__main__":
    _worker = main(sys.argv[1:])
    if _worker is not None:
        _worker.run()
