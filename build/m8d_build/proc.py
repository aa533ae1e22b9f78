"""Subprocesses, started here alone: argument lists, a log file, a deadline, the last lines on failure."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from m8d_build.errors import CommandFailed, PrerequisiteMissing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import FrameType, TracebackType

__all__ = ["Finished", "Unbroken", "run", "tail_of", "which"]

TAIL_LINES = 30
CANCEL_POLL = 0.2  # seconds between looks at a cancel event
ENDING = 5.0  # seconds that a program has to end when it is told to


@dataclass(frozen=True)
class Finished:
    """A program that ended with status 0.

    Attributes:
        stdout: what it wrote to standard output ("" if it went to a log).
        seconds: wall-clock time.
    """

    stdout: str
    seconds: float


class Unbroken:
    """Holds signals that raise back until a program that is being started is known.

    One that arrives before would leave it running: nothing could name it. Ctrl-C, and what ``cli`` makes of
    SIGTERM and SIGHUP, raise when the context ends instead.
    """

    def __init__(self) -> None:
        self._before: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._came: list[tuple[int, FrameType | None]] = []
        self._holding = True

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():  # Python runs handlers there alone
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
                handler = signal.getsignal(number)
                if callable(handler):
                    self._before[number] = handler
                    signal.signal(number, self._note)

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._holding = False
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for number, frame in self._came:
            self._before[number](number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._holding:
            self._came.append((number, frame))
        else:  # between the lines above
            self._before[number](number, frame)


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
    # A run before this one, which failed for another reason, has written there too.
    since = log.stat().st_size if log is not None else 0
    process: subprocess.Popen[bytes] | None = None
    try:
        if sink is not None:
            sink.write(os.fsencode(f"$ {' '.join(argv)}\n"))
            sink.flush()
        try:
            with Unbroken():
                process = _start(argv, cwd, environ, sink)
            ended = _finish(process, started + timeout, cancel)
        except BaseException as exc:
            if process is not None:
                _end(process)
            elif isinstance(exc, OSError):
                raise CommandFailed(
                    f"cannot {what}: {argv[0]}: {exc.strerror}", next_step=next_step, log=log
                ) from exc
            raise
        if ended is None:
            _end(process)
            stopped = cancel is not None and cancel.is_set()
            raise CommandFailed(
                f"stopped: {what}" if stopped else f"could not {what} within {timeout:.0f} s",
                next_step=next_step,
                log=log,
                tail=tail_of(log, since=since),
            )
        out, err = ended
    finally:
        if sink is not None:
            sink.close()
    stdout = (out or b"").decode(errors="replace")
    if process.returncode != 0:
        said = stdout + (err or b"").decode(errors="replace")
        text = tail_of(log, since=since) if log else "\n".join(said.splitlines()[-TAIL_LINES:])
        raise CommandFailed(
            f"could not {what}: {Path(argv[0]).name} {_ending(process.returncode)}",
            next_step=next_step,
            log=log,
            tail=text,
        )
    return Finished(stdout=stdout, seconds=time.monotonic() - started)


def tail_of(log: Path | None, lines: int = TAIL_LINES, *, since: int = 0) -> str:
    """Return the last lines of a log, of what is after ``since`` bytes; "" if there is none."""
    if log is None or not log.exists():
        return ""
    with log.open(encoding="utf-8", errors="replace") as file:
        file.seek(since)
        return "".join(deque(file, maxlen=lines)).rstrip()


def _start(
    argv: Sequence[str], cwd: Path | None, environ: Mapping[str, str], sink: BinaryIO | None
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=sink or subprocess.PIPE,
        stderr=subprocess.STDOUT if sink else subprocess.PIPE,
        cwd=cwd,
        env=environ,
        start_new_session=True,  # so that a deadline or Ctrl-C can end its children too
    )


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
            process.wait(timeout=ENDING)
    # Those that had stopped, or that do not heed SIGTERM, are gone too. Not without a timeout: Ctrl-C within
    # `wait` can leave the lock taken that the next `wait` needs.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=ENDING)
