"""Client of the fork server, in the launcher: starts the program, and forks workers of it."""

from __future__ import annotations

import ctypes
import logging
import os
import select
import socket
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from multiworld.run.errors import RunError
from multiworld.run.workers.fork_server import receive, send

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["ForkClient", "ForkError", "ForkedProcess"]

_PROGRAM = Path(__file__).with_name("fork_server.py")
_IMPORTS = 600.0
"""Seconds in which the modules are imported: a network file system takes minutes where many hosts read it."""
_FORK = 5.0
"""Seconds in which a worker is forked; it takes some milliseconds."""
_TOLD_EVERY = 10.0
_AGAIN, _AGAIN_AT_MOST = 1.0, 60.0  # seconds between two starts of the fork server, doubled each time
_PARTS = {"multiworld": ("multiworld.preloaded",)}
"""Modules that are imported with others, which load their own parts late."""
_SET_SUBREAPER, _GET_SUBREAPER = 36, 37  # of prctl(2)


class ForkError(Exception):
    """A worker could not be forked; it can be started as any program is."""


class ForkedProcess:
    """A forked worker, with the parts of ``subprocess.Popen`` that torch's contexts use.

    Args:
        pid: of a child of this process.
        go: descriptor of a pipe; the worker waits for a byte in it.
    """

    def __init__(self, pid: int, go: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._go: int | None = go

    def go(self) -> None:
        """Let the worker run its program."""
        if self._go is not None:
            with suppress(BrokenPipeError):  # it was killed
                os.write(self._go, b"g")
        self.close()

    def close(self) -> None:
        """Close the pipe, where `go` has not: the worker ends."""
        go, self._go = self._go, None
        if go is not None:
            os.close(go)

    def poll(self) -> int | None:
        """Reap the process if it has ended; return its exit code, -N for signal N, None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # reaped already, by another part: Popen says 0 then, too
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        """Wait until the process has ended; return its exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended after `timeout` seconds.
        """
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= until:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        """Do nothing: it leads a process group, which `WorkerProcess` signals, until it was reaped."""


class ForkClient:
    """Forks workers of a process that has imported their modules; starts that process, again if it is lost.

    Args:
        python: the interpreter.
        modules: to import, in this order.
        argv: command line of the workers after ``python -u``.
        note: publishes a line of the run's log: level of `logging`, and text.
    """

    def __init__(
        self, python: str, modules: Sequence[str], argv: Sequence[str], note: Callable[[int, str], None]
    ) -> None:
        self._command = [python, "-u", str(_PROGRAM)]
        self._modules, self._argv, self._note = ",".join(modules), tuple(argv), note
        self._all = ",".join(part for name in modules for part in (name, *_PARTS.get(name, ())))
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._ready = self._was_ready = False
        self._started_at, self._pause = float("-inf"), _AGAIN
        self._told = ""
        self._adopted: set[int] = set()
        self._start()

    def _start(self) -> None:
        self._started_at, self._ready = time.monotonic(), False
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(_FORK)
        with theirs:
            self._process = subprocess.Popen(
                [*self._command, str(os.getpid()), str(theirs.fileno()), self._all, *self._argv],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def wait_ready(self, interrupted: Callable[[], bool]) -> None:
        """Wait until the modules are imported for the first time, or `interrupted` (asked every 0.2 s).

        Raises:
            RunError: they cannot be imported, or not in 600 s.
        """
        began = time.monotonic()
        told = began + 1.0 - _TOLD_EVERY  # the first line after a second
        while not (self._was_ready or interrupted()):
            now = time.monotonic()
            if now >= began + _IMPORTS:
                raise RunError(
                    f"--preload {self._modules}: not imported after {_IMPORTS:g} s",
                    rule="All modules are imported before the first worker starts",
                    next_step="Leave out what takes longest",
                )
            if now >= told + _TOLD_EVERY:
                told = now
                self._note(logging.INFO, f"--preload: importing for {now - began:.0f} s")
            if failed := self._hear(0.2):
                raise RunError(
                    f"--preload {self._modules}: {failed}",
                    rule="One process imports the modules, and workers are forked of it",
                    next_step="Leave this module out of --preload: workers import it by themselves",
                )

    def check(self) -> None:
        """Look after the fork server: hear that it is ready, and start it again if it was lost."""
        for pid in [*self._adopted]:
            with suppress(ChildProcessError):
                if not os.waitpid(pid, os.WNOHANG)[0]:
                    continue
            self._adopted.discard(pid)
        failed = ""
        if self._channel is not None:
            failed = self._hear(0.0)
        elif time.monotonic() >= self._started_at + self._pause:
            self._pause = min(2 * self._pause, _AGAIN_AT_MOST)
            try:
                self._start()
            except OSError as exc:
                self._lose()
                failed = f"the fork server cannot be started: {exc}"
        if failed and failed != self._told:
            self._told = failed
            self._note(
                logging.WARNING, f"--preload: {failed}; workers start without it until it is there again"
            )

    def _hear(self, timeout: float) -> str:
        """Wait for a message that was not asked for, or the end; return what failed, "" for nothing."""
        channel = self._channel
        if channel is None:
            return ""
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        if not poll.poll(1e3 * timeout):
            return ""
        try:
            received = receive(channel)
        except OSError:
            received = None
        if received is None:
            return self._lose(_FORK)
        if failed := received[0].get("failed"):
            self._lose()
            return str(failed)
        self._ready = self._was_ready = True
        self._pause, self._told = _AGAIN, ""
        took = float(received[0]["ready"])
        self._note(logging.INFO, f"--preload: {self._modules} imported in {took:.1f} s")
        return ""

    def fork(self, argv: Sequence[str], env: Mapping[str, str], files: Mapping[int, int]) -> ForkedProcess:
        """Fork a worker, which waits for `ForkedProcess.go`.

        Args:
            argv: its command line after ``python -u``.
            env: its whole environment.
            files: descriptors of its output, by the number that they have in the worker.

        Raises:
            ForkError: why it could not be forked.
        """
        self.check()
        if self._channel is None or not self._ready:
            raise ForkError("its modules are not imported")
        read, go = os.pipe()
        try:
            pid = self._fork(self._channel, argv, env, list(files), [read, *files.values()])
        except BaseException:
            os.close(go)  # a worker that was forked nevertheless ends
            raise
        finally:
            os.close(read)
        return ForkedProcess(pid, go)

    def _fork(
        self,
        channel: socket.socket,
        argv: Sequence[str],
        env: Mapping[str, str],
        numbers: list[int],
        descriptors: list[int],
    ) -> int:
        before, pid = _children(), None
        try:
            with _subreaper():
                send(channel, {"argv": [*argv], "env": {**env}, "files": numbers}, descriptors)
                answer = receive(channel)
            if answer is None:
                raise ForkError(self._lose(_FORK))
            pid = answer[0].get("pid")
        except OSError as exc:
            raise ForkError(f"{self._lose(0.2)} ({exc})") from exc
        finally:
            self._adopted |= _children() - before - {pid}  # orphans of others that came meanwhile
        if pid is None:
            raise ForkError(f"it could not: {answer[0].get('error')}")
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError as exc:
            raise ForkError("this kernel does not make the worker a child of m8d-run") from exc
        return int(pid)

    def _lose(self, patience: float = 0.0) -> str:
        """End the fork server, which may end by itself within `patience` seconds; return how it ended."""
        process, channel = self._process, self._channel
        self._process = self._channel = None
        self._ready = False
        if channel is not None:
            channel.close()
        if process is None:
            return "the fork server ended"
        try:
            return f"the fork server ended with {process.wait(patience)}"
        except subprocess.TimeoutExpired:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # it waits for a device in the kernel
                process.wait(_FORK)
            return f"the fork server did not answer for {_FORK:g} s"

    def close(self) -> None:
        """End the fork server; workers are not affected."""
        self._lose()


def _children() -> set[int]:
    """Pids of this process's children; none where the kernel does not tell."""
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found |= {int(pid) for pid in path.read_text().split()}
    return found


@contextmanager
def _subreaper() -> Iterator[None]:
    """Make this process the parent of what its descendants leave behind, meanwhile.

    Not for longer: the launcher would have to reap what workers leave behind.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    before = ctypes.c_int(0)
    prctl(_GET_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SET_SUBREAPER, before.value, 0, 0, 0)
