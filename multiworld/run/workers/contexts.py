"""torch's process contexts, one for each process, so that one can be restarted while the others run.

Differences to a context of all workers: torch's signal handlers are not installed (they raise at any point of
the main thread; see `multiworld.run.signals`), and the binding to a GPU's CPUs and the prefix of log lines
get the process's true local rank.
"""

from __future__ import annotations

import inspect
import signal
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing import MultiprocessContext, SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import (
    SubprocessHandler,
    get_subprocess_handler,
)
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from multiworld.run.workers.fork_client import ForkError
from multiworld.run.workers.logs import LoneLogs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import TextIO

    from torch.distributed.elastic.multiprocessing import LogsDest

    from multiworld.run.workers.fork_client import ForkClient, ForkedProcess

__all__ = ["ForkedContext", "FunctionContext", "ProgramContext", "filtered_tails"]


def filtered_tails(
    name: str,
    dest: LogsDest,
    prefixes: dict[int, str] | None,
    filters: tuple[list[str], list[str]],
    streams: tuple[TextIO | None, TextIO | None],
) -> Iterator[TailLog]:
    """Yield readers that copy lines with one of the words in `filters` to the files of all workers."""
    for files, words, stream in zip((dest.tee_stdouts, dest.tee_stderrs), filters, streams, strict=True):
        if words and stream is not None and files:
            yield TailLog(name, files, stream, prefixes, log_line_filter=_has_one_of(words))


def _has_one_of(words: list[str]) -> Callable[[str], bool]:
    return lambda line: any(word in line for word in words)


def _start_tails(context: Any) -> None:
    older = ("_stdout_tail", "_stderr_tail")
    own = getattr(context, "_tail_logs", None) or [getattr(context, name) for name in older]
    for tail in (*own, *context._more_tails):  # noqa: SLF001  (of both classes below)
        tail.start()


class ProgramContext(SubprocessContext):
    """One worker that is a program.

    Args:
        name: of the role.
        entrypoint: the program.
        args: of the program.
        env: its environment variables, over the launcher's.
        dest: its log files.
        local_rank: on this node.
        prefixes: of its lines under --tee, by local rank.
        numa_options: of --numa-binding.
        tails: more readers of its output.
    """

    def __init__(
        self,
        name: str,
        entrypoint: str,
        args: tuple[str, ...],
        env: dict[str, str],
        dest: LogsDest,
        *,
        local_rank: int,
        prefixes: dict[int, str] | None,
        numa_options: Any,
        tails: Iterable[TailLog] = (),
    ) -> None:
        super().__init__(name, entrypoint, {0: args}, {0: env}, LoneLogs(dest), prefixes)
        self._more_tails = list(tails)
        self._local_rank = local_rank
        self._numa = numa_options

    def start(self) -> None:
        """Start the process, and the readers of its output."""
        self._start()
        _start_tails(self)

    def close(self, *how: Any, **more: Any) -> None:
        """End the process if it runs, and the readers of its output after the last line."""
        super().close(*how, **more)
        for tail in self._more_tails:
            tail.stop()

    def _start(self) -> None:
        self._start_as(get_subprocess_handler)

    def _start_as(self, make: Callable[..., SubprocessHandler]) -> None:
        asked = {
            "entrypoint": self.entrypoint,
            "args": self.args[0],
            "env": self.envs[0],
            "stdout": self.stdouts[0],
            "stderr": self.stderrs[0],
            "local_rank_id": self._local_rank,
            "numa_options": self._numa,
        }
        takes = inspect.signature(get_subprocess_handler).parameters  # older versions know fewer
        self.subprocess_handlers = {0: make(**{k: v for k, v in asked.items() if k in takes})}

    @property
    def process(self) -> Any:
        """The ``subprocess.Popen``."""
        return self.subprocess_handlers[0].proc


class ForkedContext(ProgramContext):
    """One worker that the fork server forks (--preload); a program of its own where it cannot.

    Args:
        args: of the program, which is Python: -u SCRIPT ARGUMENTS.
        forks: the fork server.
        more: as for `ProgramContext`.

    Attributes:
        forked: the process, once it was forked.
        refused: why it was not.
    """

    def __init__(self, *args: Any, forks: ForkClient, **more: Any) -> None:
        super().__init__(*args, **more)
        self._forks = forks
        self.forked: ForkedProcess | None = None
        self.refused = ""

    def _start(self) -> None:
        try:
            self._start_as(self._fork)
        except ForkError as exc:
            self.refused = str(exc)
            super()._start()
        else:
            self.forked = self.process

    def close(self, *how: Any, **more: Any) -> None:
        """As for `ProgramContext`; also where the process waits for its first word."""
        super().close(*how, **more)
        if self.forked is not None:
            self.forked.close()

    def _fork(self, **asked: Any) -> SubprocessHandler:
        return _ForkedHandler(self._forks, **asked)


class _ForkedHandler(SubprocessHandler):
    """Torch's handler of a process, which it has opened the log files for."""

    def __init__(self, forks: ForkClient, **asked: Any) -> None:
        self._forks = forks
        super().__init__(**asked)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        outputs = {1: self._stdout, 2: self._stderr}
        files = {number: file.fileno() for number, file in outputs.items() if file is not None}
        return self._forks.fork(args[2:], env, files)  # after PYTHON -u


class FunctionContext(MultiprocessContext):
    """One worker that is a function in a process of its own (--run-path).

    Args:
        name, args, env, dest, local_rank, prefixes, numa_options, tails: as for `ProgramContext`.
        entrypoint: the function.
        start_method: of multiprocessing.
        signals: numbers of the signals that the launcher handles; a forked worker resets them.
    """

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any],
        args: tuple[str, ...],
        env: dict[str, str],
        dest: LogsDest,
        *,
        local_rank: int,
        prefixes: dict[int, str] | None,
        numa_options: Any,
        start_method: str,
        signals: Iterable[int] = (),
        tails: Iterable[TailLog] = (),
    ) -> None:
        entry = _EntryPoint(entrypoint, local_rank, numa_options, tuple(signals))
        super().__init__(name, entry, {0: args}, {0: env}, start_method, LoneLogs(dest), prefixes)
        self._more_tails = list(tails)

    def start(self) -> None:
        """Start the process, and the readers of its output."""
        self._start()  # type: ignore[no-untyped-call]
        _start_tails(self)

    def close(self, *how: Any, **more: Any) -> None:
        """End the process if it runs, and the readers of its output after the last line."""
        super().close(*how, **more)
        for tail in self._more_tails:
            tail.stop()

    def look(self) -> int | None:
        """Return the process's exit code once it has ended, else None. Never waits for it.

        A process that has returned from the function waits until its value was read here. torch's own
        ``_poll`` is not asked: it waits without a timeout for the end of a process that has returned, and
        forever for the value of one that ended with 0 without any (``sys.exit()``, ``os._exit(0)``, Ctrl-C).
        """
        if self._pc is None:
            return None
        exitcode: int | None = self._pc.processes[0].exitcode
        if exitcode is None and not self._return_values and not self._ret_vals[0].empty():
            self._return_values[0] = self._ret_vals[0].get()
            self._worker_finished_event.set()
        return exitcode

    @property
    def value(self) -> Any:
        """What the function returned; None where it did not."""
        return self._return_values.get(0)

    def send(self, signum: int) -> None:
        """Send a signal where there are no pidfds: SIGKILL, or SIGTERM for any other."""
        if self._pc is not None:
            process = self._pc.processes[0]
            (process.kill if signum == signal.SIGKILL else process.terminate)()


class _EntryPoint:
    """Entry point of the worker's process: resets signals, binds it to CPUs, calls the function."""

    def __init__(
        self, fn: Callable[..., Any], local_rank: int, numa_options: Any, signals: tuple[int, ...]
    ) -> None:
        self.__qualname__ = fn.__qualname__
        self._fn = fn
        self._local_rank = local_rank
        self._numa = numa_options
        self._signals = signals

    def __call__(self, *args: Any) -> Any:
        signal.set_wakeup_fd(-1)
        for number in self._signals:
            # A forked process has the launcher's handlers.
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
        fn = self._fn
        if self._numa is not None:
            from torch.numa import binding  # noqa: PLC0415  (only newer versions have it)

            # torch's context would bind it to the CPUs of GPU 0, since its only process is number 0 there.

            fn = binding._maybe_wrap_with_numa_binding(  # noqa: SLF001  (as torch's own context calls it)
                fn, gpu_index=self._local_rank, numa_options=self._numa
            )
        return fn(*args)
