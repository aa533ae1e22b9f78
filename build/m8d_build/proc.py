"""Subprocesses, started here alone: argument lists, a log file, a deadline, the last lines on failure."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from m8d_build.errors import CommandFailed, PrerequisiteMissing

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence

__all__ = ["Finished", "run", "tail_of", "which"]

TAIL_LINES = 30
CANCEL_POLL = 0.2  # seconds between looks at a cancel event


@dataclass(frozen=True)
class Finished:
    """A program that ended with status 0.

    Attributes:
        stdout: what it wrote to standard output ("" if it went to a log).
        seconds: wall-clock time.
    """

    stdout: str
    seconds: float


def which(program: str, *, why: str, next_step: str) -> str:
    """Return the full path of a program.

    Raises:
        PrerequisiteMissing: it is not on PATH.
    """
    found = shutil.which(program)
    if found is None:
        raise PrerequisiteMissing(
            f"{program!r} is not on PATH", rule=f"it is needed {why}", next_step=next_step
        )
    return found


def run(
    command: Sequence[str | Path],
    *,
    what: str,
    log: Path | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 1800.0,
    next_step: str = "",
    cancel: threading.Event | None = None,
) -> Finished:
    """Run a program to its end; never through a shell, never with our standard input.

    Args:
        command: program and arguments.
        what: what it does, for messages ("compile NCCLUtils.cpp").
        log: where its output goes (appended); without it stdout is returned and both are kept for the
            message.
        cwd: its working folder.
        env: variables set on top of ours.
        timeout: seconds after which it and its children are ended.
        next_step: what to do when it fails.
        cancel: once it is set (from another thread) the program and its children are ended.

    Raises:
        CommandFailed: it could not start, ended with another status than 0, ran past ``timeout``, or was
            cancelled.
    """
    argv = [os.fspath(part) for part in command]
    environ = {**os.environ, **(env or {})}
    started = time.monotonic()
    sink = log.open("ab") if log is not None else None
    try:
        if sink is not None:
            sink.write(os.fsencode(f"$ {' '.join(argv)}\n"))
            sink.flush()
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=sink or subprocess.PIPE,
                stderr=subprocess.STDOUT if sink else subprocess.PIPE,
                cwd=cwd,
                env=environ,
                start_new_session=True,  # so that a deadline or Ctrl-C can end its children too
            )
        except OSError as exc:
            raise CommandFailed(
                f"cannot {what}: {argv[0]}: {exc.strerror}", next_step=next_step, log=log
            ) from exc
        try:
            ended = _finish(process, started + timeout, cancel)
        except BaseException:
            _end(process)
            raise
        if ended is None:
            _end(process)
            stopped = cancel is not None and cancel.is_set()
            raise CommandFailed(
                f"stopped: {what}" if stopped else f"could not {what} within {timeout:.0f} s",
                next_step=next_step,
                log=log,
                tail=tail_of(log),
            )
        out, err = ended
    finally:
        if sink is not None:
            sink.close()
    stdout = (out or b"").decode(errors="replace")
    if process.returncode != 0:
        said = stdout + (err or b"").decode(errors="replace")
        text = tail_of(log) if log else "\n".join(said.splitlines()[-TAIL_LINES:])
        raise CommandFailed(
            f"could not {what}: {Path(argv[0]).name} {_ending(process.returncode)}",
            next_step=next_step,
            log=log,
            tail=text,
        )
    return Finished(stdout=stdout, seconds=time.monotonic() - started)


def tail_of(log: Path | None, lines: int = TAIL_LINES) -> str:
    """Return the last lines of a log, "" if there is none."""
    if log is None or not log.exists():
        return ""
    with log.open(encoding="utf-8", errors="replace") as file:
        return "".join(deque(file, maxlen=lines)).rstrip()


def _finish(
    process: subprocess.Popen[bytes], deadline: float, cancel: threading.Event | None
) -> tuple[bytes | None, bytes | None] | None:
    """Wait for the end and return the output; None if the deadline passed or it was cancelled before."""
    while (left := deadline - time.monotonic()) > 0 and not (cancel and cancel.is_set()):
        try:
            return process.communicate(timeout=left if cancel is None else min(left, CANCEL_POLL))
        except subprocess.TimeoutExpired:  # noqa: PERF203  (five times a second)
            continue
    return None


def _ending(returncode: int) -> str:
    return (
        f"was ended by {signal.Signals(-returncode).name}" if returncode < 0 else f"exited with {returncode}"
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End our own child and its process group; it was started as a session of its own."""
    for sig in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sig)
        except ProcessLookupError:
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
    process.communicate()  # and those that had stopped, or that do not heed SIGTERM, are gone too
