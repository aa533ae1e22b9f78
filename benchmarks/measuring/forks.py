"""Processes forked in milliseconds from one that has loaded torch and no thread. Standard library only.

They are there to be killed and stopped. Each has a pipe on which it tells what happened, JSON line by JSON
line. Times are `time.monotonic()` seconds: one clock for all processes of a machine.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Tell = Callable[..., None]

PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ForkError(Exception):
    """A forked process failed, ended or said nothing in time; the message says which, and its traceback."""


class Forks:
    """The children of this process.

    It must have no other thread when it forks: the child has only the one that forked, and locks that others
    held would stay locked in it.
    """

    def __init__(self) -> None:
        self._pipes: dict[int, tuple[int, bytearray]] = {}
        self._frozen = False

    def start(self, run: Callable[[Tell], None]) -> int:
        """Fork; the child calls ``run(tell)`` and ends. ``tell(**fields)`` is what `hear` returns here.

        Returns:
            Its pid.
        """
        if not self._frozen:
            # What lives now is never looked at by a collector again: its pages stay shared.
            gc.collect()
            gc.freeze()
            self._frozen = True
        mine, theirs = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid:
            os.close(theirs)
            self._pipes[pid] = (mine, bytearray())
            return pid
        status = 1
        try:
            os.close(mine)
            _die_with(parent)
            run(lambda **fields: _write(theirs, fields))
            status = 0
        except BaseException:  # noqa: BLE001  (told to the parent; this process must never return into its program)
            _write(theirs, {"error": traceback.format_exc()})
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def hear(self, pid: int, timeout: float) -> dict[str, Any]:
        """The next thing that a child told.

        Args:
            pid: of the child.
            timeout: seconds.

        Raises:
            ForkError: it failed, ended, or told nothing in time.
        """
        pipe, pending = self._pipes[pid]
        deadline = time.monotonic() + timeout
        while b"\n" not in pending:
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise ForkError(f"process {pid} told nothing within {timeout:g} s")
            self._read(pid)
        return self._next(pid)

    def listen(self, within: float) -> list[tuple[int, dict[str, Any]]]:
        """Everything that children have told, in the order of each; waits for the first thing.

        Args:
            within: seconds for which it waits, at most.

        Raises:
            ForkError: one failed, or ended.
        """
        pids = {pipe: pid for pid, (pipe, _) in self._pipes.items()}
        told = []
        for pipe in select.select([*pids], [], [], within)[0]:
            pid = pids[pipe]
            self._read(pid)
            while b"\n" in self._pipes[pid][1]:
                told.append((pid, self._next(pid)))
        return told

    def _read(self, pid: int) -> None:
        pipe, pending = self._pipes[pid]
        chunk = os.read(pipe, 1 << 16)
        if not chunk:
            raise ForkError(f"process {pid} ended before it told anything more")
        pending += chunk

    def _next(self, pid: int) -> dict[str, Any]:
        pending = self._pipes[pid][1]
        line, _, rest = bytes(pending).partition(b"\n")
        pending[:] = rest
        told: dict[str, Any] = json.loads(line)
        if "error" in told:
            raise ForkError(f"process {pid} failed:\n{told['error']}")
        return told

    def kill(self, pid: int) -> float:
        """SIGKILL, and wait for the end; returns when the signal was sent."""
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(self._pipes.pop(pid)[0])
        return at

    def stop(self, pid: int) -> float:
        """SIGSTOP; returns when it was sent."""
        at = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        return at


class Zygote:
    """Commands of a process that others are forked from. It is in no world and has one thread."""

    def __init__(self) -> None:
        self._store = ""
        self._forks = Forks()

    def meet(self, store: str) -> None:
        """Where worlds meet from now on."""
        self._store = store


def forever() -> None:
    """Wait until it is ended from elsewhere."""
    while True:
        signal.pause()


def _write(pipe: int, fields: dict[str, Any]) -> None:
    os.write(pipe, json.dumps(fields).encode() + b"\n")


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        raise SystemExit(f"process {parent} was gone before its child began")
