"""Entry point of a started process: applies the configuration, calls the function, writes its result."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import select
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from multiworld import settings
from multiworld.launch.host import environment_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld.launch.config import MultiprocessConfig
    from multiworld.launch.result_file import ResultFile

__all__ = ["INTERRUPTED", "Job", "run"]

INTERRUPTED = 130
"""Exit code of a process that Ctrl-C ended."""


@dataclass(frozen=True)
class Job:
    """The work of one process.

    Attributes:
        func: called with `cfg`, `args` and `kwargs`.
        cfg: complete.
        setup: called with `cfg` before; or None.
        result_file: for its result, or its failure.
    """

    func: Callable[..., Any]
    cfg: MultiprocessConfig
    setup: Callable[[MultiprocessConfig], Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result_file: ResultFile


def run(_index: int, job: Job) -> None:
    """Do the job; an exception is written to the result file, not printed.

    Args:
        _index: given by ``torch.multiprocessing.start_processes``; 0, there is one process in each context.
        job: of this process.

    Raises:
        SystemExit: with 1 after an exception, 130 after Ctrl-C.
    """
    try:
        _end_with_the_parent()
        job.result_file.began()
        # SIGINT was blocked while modules were loaded, where Ctrl-C would print a traceback.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        settings.set_environment({**environment_of(job.cfg), "M8D_CONTROL": None})
        if job.setup is not None:
            job.setup(job.cfg)
        result = job.func(job.cfg, *job.args, **job.kwargs)
        _deaf_to_ctrl_c()
    except KeyboardInterrupt:
        _deaf_to_ctrl_c()
        raise SystemExit(INTERRUPTED) from None
    except Exception as exc:  # noqa: BLE001  (the parent raises it)
        at = time.monotonic()
        _deaf_to_ctrl_c()
        job.result_file.put_failure(_told(exc, at))
        raise SystemExit(1) from None
    try:
        job.result_file.put_result(result)
    except Exception as exc:  # noqa: BLE001  (the parent raises it)
        failure = _told(exc, time.monotonic())
        failure["message"] = f"its result cannot be sent to the parent: {failure['message']}"
        job.result_file.put_failure(failure)
        raise SystemExit(1) from None


def _told(exc: BaseException, at: float) -> dict[str, Any]:
    kind = type(exc)
    module = "" if kind.__module__ in {"builtins", "__main__", "__mp_main__"} else f"{kind.__module__}."
    try:
        message = str(exc)
    except Exception as worse:  # noqa: BLE001  (an exception's own fault must not hide it)
        message = f"(its text cannot be had: {type(worse).__name__})"
    return {
        "type": module + kind.__qualname__,
        "message": message,
        "traceback": "".join(traceback.format_exception(kind, exc, exc.__traceback__)),
        "at": at,
    }


def _deaf_to_ctrl_c() -> None:
    """Ignore Ctrl-C from here on: the process ends, and a second one would print a traceback."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end_with_the_parent() -> None:
    """Have the kernel end this process (SIGKILL) when its parent has ended, in whatever way.

    torch sends SIGINT then, by PR_SET_PDEATHSIG: a process that is blocked in C++ does not handle it, one
    that a shell started in the background ignores it, and one of a forkserver has the server for a parent.
    The pipe behind `parent_process()` closes with the real parent, and the kernel can be asked for a signal
    at its end.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    fd = int(parent.sentinel)
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([fd], [], [], 0)[0]:  # it was gone before
        raise SystemExit(1)
