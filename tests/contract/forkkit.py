"""Programs as processes forked from `worldkit`'s server, which has torch loaded: a start costs 0.1 s of a processor, not 2.

A `Forked` is used as a `subprocess.Popen`. What differs from a program that is started: its command line and its environment
in /proc are the server's. What it starts itself is started, not forked.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from worldkit import CONTEXT, enter_netns


class Forked:
    """A running program.

    Args:
        line: its arguments, as after ``python``: ``-m MODULE ...`` or ``FILE ...``.
        cwd: its folder.
        env: all of its environment.
        netns: the network namespace that it enters.
        errors: standard error is a pipe of its own; else it is the server's.
        talks: standard input is a pipe; else it is empty.
        group: in a session (and process group) of its own.
    """

    def __init__(
        self,
        line: Sequence[str],
        *,
        cwd: str | Path,
        env: Mapping[str, str],
        netns: str | None = None,
        errors: bool = True,
        talks: bool = False,
        group: bool = False,
    ) -> None:
        self.args = list(line)
        ours, theirs = CONTEXT.Pipe(duplex=False)
        pipes: dict[int, Any] = {1: theirs}
        self.stdout: IO[str] | None = _file(ours, "r")
        self.stderr: IO[str] | None = None
        self.stdin: IO[str] | None = None
        if errors:
            ours, pipes[2] = CONTEXT.Pipe(duplex=False)
            self.stderr = _file(ours, "r")
        if talks:
            pipes[0], ours = CONTEXT.Pipe(duplex=False)
            self.stdin = _file(ours, "w")
        self._process = CONTEXT.Process(
            target=_become, args=(self.args, str(cwd), dict(env), netns, pipes, group)
        )
        self._process.start()
        for each in pipes.values():
            each.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _file(end: Any, mode: str) -> IO[str]:
    fd = os.dup(end.fileno())
    end.close()
    return os.fdopen(fd, mode, encoding="utf-8", errors="replace")


def _become(
    line: list[str], cwd: str, env: dict[str, str], netns: str | None, pipes: dict[int, Any], group: bool
) -> None:
    """Be the program `line`, as far as a process can become one without an exec."""
    if group:
        os.setsid()
    if netns is not None:
        enter_netns(netns)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for number, each in pipes.items():
        os.dup2(each.fileno(), number)
        each.close()
    # New ones: the server's may be of a file, and know their place in it.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="replace", closefd=False)
    if line[0] == "-m":
        sys.argv = [line[1], *line[2:]]
        runpy.run_module(line[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(line)
        runpy.run_path(line[0], run_name="__main__")
