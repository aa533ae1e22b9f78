"""One worker's process: polled, signalled and reaped by itself, without touching any other."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from multiworld._net.blocking import BlockingCall
from multiworld.run.signals import is_another
from multiworld.run.workers.contexts import FunctionContext, ProgramContext

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from multiworld.run.signals import Wake

__all__ = ["ProcessExit", "WorkerProcess", "message", "stop_all"]

_AFTER_KILL = 10.0
"""Seconds after SIGKILL in which a process ends, unless it waits for a device in the kernel."""

_ASIDE = 30.0
"""Seconds for what is done meanwhile; the goodbye to the other nodes takes 15 s at most."""


@dataclass(frozen=True)
class ProcessExit:
    """How a worker's process ended.

    Attributes:
        exitcode: negative: the signal that ended it; None: it could not be ended.
        failure: as torch describes it, with the error file's text; None where the exit code is 0.
        value: return value, of a worker that is a function.
    """

    exitcode: int | None
    failure: ProcessFailure | None
    value: Any = None


class WorkerProcess:
    """A started worker.

    Args:
        context: of its process.
        rank, local_rank: of the worker.
        attempt: number of starts before this one.

    Attributes:
        started: monotonic seconds.
        pid: of the process.
        leads: whether it leads a process group, so that a signal reaches its children too.
        came_up: whether it has reported an active world.
    """

    def __init__(
        self, context: ProgramContext | FunctionContext, rank: int, local_rank: int, attempt: int
    ) -> None:
        self.context = context
        self.rank = rank
        self.local_rank = local_rank
        self.attempt = attempt
        self.started = time.monotonic()
        self.pid = int(context.pids()[0])
        self.came_up = False
        self._pidfd: int | None = None
        try:
            self.leads = os.getpgid(self.pid) == self.pid
        except ProcessLookupError:  # a function's process that was reaped already
            self.leads = False
        with contextlib.suppress(AttributeError, OSError):  # an old kernel: then it is polled
            self._pidfd = os.pidfd_open(self.pid)

    @property
    def descriptor(self) -> int | None:
        """Descriptor that is readable when the process has ended; None where the kernel has no pidfd."""
        return self._pidfd

    def ended(self) -> bool:
        """Whether the process has ended. It is not reaped: until `collect` its pid stays its own."""
        if isinstance(self.context, FunctionContext):
            return self.context.look() is not None
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return self.context.process.poll() is not None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process and its process group; does nothing once it was collected."""
        # The process is a child that was not reaped: its pid cannot be another process's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.leads:
                os.killpg(self.pid, number)
            elif self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, number)
            elif isinstance(self.context, FunctionContext):
                self.context.send(number)
            else:
                self.context.process.send_signal(number)

    def collect(self, *, stopped: bool = False) -> ProcessExit:
        """Reap the ended process.

        The rest of its process group is killed, unless it ended with 0 by itself: the worker that replaces a
        failed one needs its ports and its memory.

        Args:
            stopped: whether the launcher ended it.
        """
        if isinstance(self.context, FunctionContext):
            exitcode = self.context.look()
            failure = self._failure(exitcode) if exitcode else None
            return ProcessExit(exitcode, failure, self.context.value)
        if self.leads and (stopped or not self._ended_well()):
            self.send(signal.SIGKILL)
        exitcode = int(self.context.process.wait())
        return ProcessExit(exitcode, self._failure(exitcode) if exitcode else None)

    def _ended_well(self) -> bool:
        try:
            how = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True  # reaped already: the group's id may be another's
        return how is not None and how.si_code == os.CLD_EXITED and how.si_status == 0

    def _failure(self, exitcode: int) -> ProcessFailure:
        try:
            return ProcessFailure(self.local_rank, self.pid, exitcode, self.context.error_files[0])
        except (ValueError, KeyError, TypeError, OSError):
            # It was killed while it wrote its error file.
            return ProcessFailure(self.local_rank, self.pid, exitcode, "")

    def close(self) -> threading.Thread:
        """End the readers of its output, after the last line. In a thread: they poll every 0.1 s."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        thread = threading.Thread(target=self.context.close, name="m8d-run-close", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the host has no thread left for this process
            self.context.close()
        return thread


def message(ended: ProcessExit) -> str:
    """Return one line on how a worker failed."""
    exitcode, failure = ended.exitcode, ended.failure
    said = getattr(failure, "message", "") if failure is not None else ""
    if isinstance(said, dict):
        said = said.get("message", "")
    elif failure is not None and failure.error_file == "<N/A>":
        said = ""  # torch's hint on how to get an error file
    how = f"exit code {exitcode}"
    if exitcode is not None and exitcode < 0:
        try:
            how = f"killed by {signal.Signals(-exitcode).name}"
        except ValueError:
            how = f"killed by signal {-exitcode}"
    first = str(said).strip().splitlines()
    return first[0] if first else how


def stop_all(
    processes: Iterable[WorkerProcess],
    number: signal.Signals,
    grace: float,
    wake: Wake,
    *,
    ends: Collection[signal.Signals],
    meanwhile: Callable[[], None] | None = None,
    hurry: Callable[[], bool] | None = None,
) -> dict[int, ProcessExit]:
    """End processes: a signal to all, `grace` seconds for all, then SIGKILL for those that are left.

    A second one of the signals that end the run ends the grace period, if the launcher gets it meanwhile.

    Args:
        processes: to end; those that have ended are collected as well.
        number: the first signal.
        grace: seconds.
        wake: of the launcher's loop; wakes for signals.
        ends: signals to the launcher that end the run.
        meanwhile: called once, in a thread, after the first signal was sent; its end is waited for.
        hurry: asked whenever `wake` wakes; True ends the grace period, too.

    Returns:
        How each ended, by rank.
    """
    left = {process.rank: process for process in processes}
    done: dict[int, ProcessExit] = {}
    for process in left.values():
        process.send(number)
        if process.descriptor is not None:
            with contextlib.suppress(KeyError):  # it is registered already
                wake.add(process.descriptor)
    began = time.monotonic()
    aside = _aside(meanwhile)
    deadline = began + (0 if number == signal.SIGKILL else grace)
    killed_at: float | None = None
    while True:
        for rank, process in list(left.items()):
            if process.ended():
                if process.descriptor is not None:
                    wake.remove(process.descriptor)
                done[rank] = process.collect(stopped=True)
                del left[rank]
        if not left:
            break
        now = time.monotonic()
        hurries = hurry is not None and hurry()
        # A run that goes on after SIGKILL hears its signals itself.
        second = number != signal.SIGKILL and _is_second(wake.signalled(), ends, number, now - began)
        if killed_at is None and (hurries or now >= deadline or second):
            killed_at = now
            for process in left.values():
                process.send(signal.SIGKILL)
        elif killed_at is not None and now >= killed_at + _AFTER_KILL:
            break
        wake.wait(0.05 if killed_at is not None else min(0.2, deadline - now))
    for rank, process in left.items():
        if process.descriptor is not None:
            wake.remove(process.descriptor)
        done[rank] = ProcessExit(None, None)
    if aside is not None and aside.wait(_ASIDE):
        aside.result()
    return done


def _aside(function: Callable[[], None] | None) -> BlockingCall[None] | None:
    """Call a function in a thread of its own, or here where the host has none left."""
    if function is None:
        return None
    try:
        return BlockingCall(function, name="m8d-run-meanwhile")
    except RuntimeError:
        function()
        return None


def _is_second(
    came: signal.Signals | None, ends: Collection[signal.Signals], first: signal.Signals, seconds: float
) -> bool:
    return came in ends and is_another(came, first, seconds)
