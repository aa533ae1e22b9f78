"""launch_subprocesses: one function in several processes; results by rank, one failure ends all."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import connection, forkserver, resource_tracker
from typing import TYPE_CHECKING, Any

from multiworld.launch.child import INTERRUPTED, Job, run
from multiworld.launch.errors import LaunchError, ProcessExitedError, ProcessRaisedError
from multiworld.launch.fill_in_config import LaunchPlan, complete
from multiworld.launch.first_failure import FailedProcess, first_failure
from multiworld.launch.host import environment_of, gather, serving, with_environment
from multiworld.launch.result_file import ResultFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from multiworld.launch.config import MultiprocessConfig

__all__ = ["launch_subprocesses"]

_GLANCE = 1.0
"""Seconds between two polls of the processes: their children may hold their pipe open beyond their end."""

_UNWINDING = 1.0
"""Seconds that processes have to end by themselves after Ctrl-C, which a terminal sends them too."""

_REAPING = 30.0
"""Seconds for the kernel to end a process after SIGKILL."""


def launch_subprocesses(
    func: Callable[..., Any],
    cfg: MultiprocessConfig,
    setup: Callable[[MultiprocessConfig], Any] | None = None,
    rank_offset: int = 0,
    *args: Any,
    **kwargs: Any,
) -> list[Any]:
    """Run ``func(cfg, *args, **kwargs)`` in ``local_world_size`` processes; each gets its own complete `cfg`.

    A single process is run in place, without a new one; so is one that torchrun or m8d-run started. All find
    RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in their environment. The
    store at that address is served by this process until all have ended.

    Ctrl-C ends all, quietly: it is raised here, once. When this process ends, however it does, the others are
    ended by the kernel.

    Args:
        func: of a module (it is pickled by name), as are its arguments.
        cfg: what is left out is resolved, see `MultiprocessConfig`.
        setup: called with the configuration first, in each process: ``init_dist``, for example.
        rank_offset: rank of the first process on this host.
        *args: for `func`.
        **kwargs: for `func`.

    Returns:
        What `func` returned, by local rank: copies, tensors included. In place: a list of one, the object
            itself.

    Raises:
        ConfigError: a value of `cfg` breaks a rule.
        StoreBindError: the store's address cannot be served.
        ProcessRaisedError: `func` or `setup` raised in a process (in place: the exception itself).
        ProcessExitedError: a process ended by a signal, or with an exit code other than 0.
        LaunchError: a process could not be started.
    """
    made = complete(cfg, gather(), rank_offset)
    with serving(made) as served:
        if len(served.configs) == 1:
            return [_in_place(served, func, setup, args, kwargs)]
        with contextlib.ExitStack() as result_files:
            workers = []
            for each in served.configs:
                result_file = ResultFile()
                result_files.callback(result_file.close)
                workers.append(_Child(Job(func, each, setup, args, kwargs, result_file)))
            return _Children(workers, cfg.grace, cfg.launch_method).run()


def _in_place(made: LaunchPlan, func: Any, setup: Any, args: Any, kwargs: Any) -> Any:
    (cfg,) = made.configs
    with with_environment({} if made.placed else environment_of(cfg)):
        if setup is not None:
            setup(cfg)
        return func(cfg, *args, **kwargs)


@dataclass
class _Child:
    """One process and its job."""

    job: Job
    process: Any = None
    ended: float = 0.0  # when that was noticed, monotonic seconds
    done: bool = False
    code_taken: bool = False

    @property
    def running(self) -> bool:
        return self.process is not None and self.exit_code is None

    @property
    def exit_code(self) -> int | None:
        """None while it runs. One that was taken (`_code_is_taken`) is told by what the process wrote."""
        if self.process.exitcode is None and self._code_is_taken():
            self.code_taken = True
            told = 0 if self.job.result_file.has_result() else 1
            # Else multiprocessing holds it for running, and keeps its descriptors.
            self.process._popen.returncode = told  # noqa: SLF001  (as said)
        code: int | None = self.process.exitcode
        return code

    def _code_is_taken(self) -> bool:
        """Whether the process has ended, and another part of this program was told its exit code.

        The kernel tells it once, and a handler of SIGCHLD, or a thread, may wait for any child.
        """
        if not connection.wait([self.process.sentinel], 0):
            return False
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return False
        return self.process.exitcode is None  # asked last: another thread may have noted it

    def must_be_known(self) -> None:
        """Raise LaunchError where neither an exit code nor the process says how it ended."""
        if self.code_taken and self.job.result_file.failure() is None:
            raise LaunchError(
                f"Rank {self.job.cfg.rank} (pid {self.process.pid}) has ended without a result, and its exit"
                " code was taken by another part of this program",
                rule="The kernel tells an exit code once, to the first that waits for the process",
                next_step="Let handlers of SIGCHLD and os.wait() wait for their own processes only",
            )

    def failure(self) -> FailedProcess:
        cfg, told, code = self.job.cfg, self.job.result_file.failure(), self.exit_code
        return FailedProcess(
            rank=cfg.rank or 0,
            local_rank=cfg.local_rank or 0,
            pid=self.process.pid,
            # One that has raised and still runs is about to end with 1.
            exit_code=1 if code is None else code,
            at=self.ended if told is None else told["at"],
            raised=told,
            began=self.job.result_file.has_begun(),
        )


class _Children:
    """All processes of one launch; none outlives `run`."""

    def __init__(self, workers: list[_Child], grace: float, method: str) -> None:
        self._workers = workers
        self._grace = grace
        self._method = method

    def run(self) -> list[Any]:
        with _exit_codes_kept():
            return self._run()

    def _run(self) -> list[Any]:
        try:
            with _ctrl_c_kept_back(self._method):
                for worker in self._workers:
                    self._start(worker)
            failures = self._watch()
        except KeyboardInterrupt:
            self._end(_UNWINDING)
            raise
        except BaseException:
            self._end(0)
            raise
        if failures:
            self._end(0)
            raise _error(failures)
        results = [worker.job.result_file.result() for worker in self._workers]
        self._end(0)
        return results

    def _start(self, worker: _Child) -> None:
        engine: Any = import_module("torch.multiprocessing")

        cfg = worker.job.cfg
        try:
            # A context of its own for each: this class finds the first failure, and gives the others the
            # grace period, which torch's own waiting fixes at 30 s.
            context = engine.start_processes(
                run, args=(worker.job,), nprocs=1, join=False, daemon=False, start_method=self._method
            )
        except Exception as exc:
            raise LaunchError(
                f"Rank {cfg.rank} could not be started: {type(exc).__name__}: {exc}",
                rule="The function and its arguments are pickled: functions of a module, and plain values",
                next_step="Move the function to the top of its module",
            ) from exc
        (worker.process,) = context.processes

    def _watch(self) -> list[FailedProcess]:
        """Wait until all processes have ended with 0, or return the failures as soon as there are any."""
        while waiting := [worker for worker in self._workers if not worker.done]:
            connection.wait([worker.process.sentinel for worker in waiting], timeout=_GLANCE)
            now = time.monotonic()
            failed = []
            for worker in waiting:
                code = worker.exit_code
                if code is not None:
                    worker.done, worker.ended = True, now
                    if code != 0:
                        worker.must_be_known()
                        failed.append(worker)
            if failed:
                failures = [worker.failure() for worker in failed]
                return failures + self._ending(first_failure(failures)[0])
        return []

    def _ending(self, first: FailedProcess) -> list[FailedProcess]:
        """Return the failures of processes that raised before `first` did, and take longer to end."""
        if first.raised is None:
            # When it failed is not known: only when its end was noticed, and others raise because of it.
            return []
        raised = [
            worker.failure()
            for worker in self._workers
            if not worker.done and worker.job.result_file.failure() is not None
        ]
        return [each for each in raised if each.at <= first.at]

    def _end(self, unwinding: float) -> None:
        """End all: SIGTERM after `unwinding` seconds, SIGKILL after the grace, or at a second Ctrl-C."""
        started = [worker for worker in self._workers if worker.process is not None]
        try:
            self._wait(unwinding)
            for worker in started:
                if worker.running:
                    worker.process.terminate()
            self._wait(self._grace)
        finally:
            for worker in started:
                if worker.running:
                    worker.process.kill()
            self._wait(_REAPING)
            for worker in started:
                if not worker.running:
                    worker.process.join(_REAPING)
                    worker.process.close()
                    worker.process = None

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while running := [worker for worker in self._workers if worker.running]:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            connection.wait([worker.process.sentinel for worker in running], timeout=min(left, _GLANCE))


def _error(failures: list[FailedProcess]) -> LaunchError:
    first, others = first_failure(failures)
    also = tuple(each.line() for each in others)
    if first.raised is not None:
        return ProcessRaisedError(
            first.rank,
            first.local_rank,
            first.pid,
            first.exit_code,
            type_name=first.raised["type"],
            message=first.raised["message"],
            traceback=first.raised["traceback"],
            also=also,
        )
    code = -signal.SIGINT if first.exit_code == INTERRUPTED else first.exit_code
    return ProcessExitedError(first.rank, first.local_rank, first.pid, code, began=first.began, also=also)


@contextlib.contextmanager
def _exit_codes_kept() -> Iterator[None]:
    """Have the kernel keep the processes' exit codes, which it drops where SIGCHLD is ignored.

    Raises:
        LaunchError: it is, and another thread than the main one, which alone may change that, launches.
    """
    if signal.getsignal(signal.SIGCHLD) != signal.SIG_IGN:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError(
            "Processes are started in a thread while SIGCHLD is ignored",
            rule="The kernel drops their exit codes then, and only the main thread can change that",
            next_step="Call signal.signal(signal.SIGCHLD, signal.SIG_DFL) in the main thread first",
        )
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


@contextlib.contextmanager
def _ctrl_c_kept_back(method: str) -> Iterator[None]:
    """Start processes with SIGINT blocked until they are ready; here Ctrl-C is raised afterwards.

    Blocking it alone is not enough here: a thread of torch's would take it. A process that is half started
    would print a traceback.
    """
    came: list[int] = []
    here = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if here else None
    if callable(handler):
        signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))
    try:
        # Both would be started with the first process: the tracker unblocks the signal, and the server would
        # keep it blocked for all its processes.
        resource_tracker.ensure_running()
        if method == "forkserver":
            forkserver.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    except Exception:
        if came and callable(handler):
            handler(signal.SIGINT, None)  # Ctrl-C ended the forkserver while it loaded modules
        raise
    finally:
        if callable(handler):
            signal.signal(signal.SIGINT, handler)
    if came and callable(handler):
        handler(signal.SIGINT, None)
