"""Processes to measure in: started together, driven line by line, ended for certain.

    with Ranks("benchmarks.peers.rank:make", count=2, args={"backend": "gloo"}) as ranks:
        ranks.call("round", form="stock", size=4)      # in all at once: a list of answers
        ranks[0].call("port")                          # in one
        ranks[1].start("serve"); ...; ranks[1].result(timeout=10)

Nothing is pickled and the interpreter may be any (`python=`): arguments and answers are JSON. A rank runs in
a folder of its own, so that only `PYTHONPATH` says which packages it sees: that of `env`, then the
repository.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

ROOT = Path(__file__).resolve().parents[2]
END_SECONDS = 3.0
"""Seconds for ranks to end after their input was closed; then they are killed. Busy ones get none."""


class RankError(Exception):
    """A command failed in a rank, or the rank ended; the message has its traceback or its last output."""


class RankTimeout(RankError):
    """A rank has not answered in time; the message has the stacks of its threads."""


class Rank:
    """One process. Made by `Ranks`.

    Attributes:
        number: its rank.
        pid: of the process; what it forks is in its process group, and ends with it.
    """

    def __init__(self, number: int, command: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
        self.number = number
        self.asked = "start"
        self._pending = b""
        mine, theirs = os.pipe()
        self._answers = mine
        self._output_path = folder / f"output-{number}"
        options = json.loads(command[-1]) | {"rank": number, "answers": theirs, "driver": os.getpid()}
        try:
            with self._output_path.open("wb") as output:
                self._process = subprocess.Popen(
                    [*command[:-1], json.dumps(options)],
                    stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, pass_fds=[theirs],
                    env=dict(env), cwd=folder, start_new_session=True,
                )  # fmt: skip
        except OSError:
            os.close(mine)
            raise
        finally:
            os.close(theirs)
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)

    @property
    def output(self) -> str:
        """What the process has printed."""
        return self._output_path.read_text(encoding="utf-8", errors="replace")

    def call(self, name: str, *, timeout: float = 60.0, **args: Any) -> Any:
        """Run a command and return its answer.

        Raises:
            RankError: see there.
            RankTimeout: no answer within `timeout` seconds.
        """
        self.start(name, **args)
        return self.result(timeout)

    def start(self, name: str, **args: Any) -> None:
        """Begin a command; `result` has its answer.

        Raises:
            RankError: another command is not answered yet, or the rank has ended.
            ValueError: the name begins with an underscore (that is no command), or JSON cannot hold an
                argument.
        """
        if name.startswith("_"):
            raise ValueError(f"{name!r}: a command's name has no leading underscore")
        if self.asked:
            raise RankError(f"rank {self.number} has not answered {self.asked!r}: take its result first")
        line = json.dumps({"name": name, "args": args}, allow_nan=False) + "\n"
        assert self._process.stdin is not None  # noqa: S101  (for mypy)
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):  # ValueError: closed
            raise self._gone(name) from None
        self.asked = name

    def result(self, timeout: float = 60.0) -> Any:
        """The answer to what was started.

        Raises:
            RankError: see there; also when nothing was started.
            RankTimeout: no answer within `timeout` seconds.
        """
        return next(iter(_results([self], timeout)))[1]

    def fds(self) -> tuple[int, int]:
        """Its descriptors to wait on: answers, and the process."""
        return self._answers, self._pidfd

    def take(self, ready: set[int]) -> tuple[bool, Any]:
        """Whether the answer is complete, and the answer."""
        if self._answers in ready:
            chunk = os.read(self._answers, 1 << 20)
            self._pending += chunk
            if not chunk:
                raise self._gone(self.asked)
        elif self._pidfd in ready:
            # Descriptors that it left to children would hide its end; what it wrote before was read above.
            raise self._gone(self.asked)
        if not self._pending.endswith(b"\n"):
            return False, None
        answer, self._pending = json.loads(self._pending), b""
        asked, self.asked = self.asked, ""
        if "error" in answer:
            raise RankError(f"rank {self.number}, {asked!r}: {answer['error']}\n{answer['traceback']}")
        return True, answer["value"]

    def _gone(self, asked: str) -> RankError:
        self._wait_end(1.0)  # its descriptors close a moment before it is gone
        status = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        how = "closed its answers" if status is None else f"ended ({_status(status)})"
        return RankError(f"rank {self.number} {how} during {asked!r}; its last output:\n{_tail(self.output)}")

    def late(self, timeout: float) -> RankTimeout:
        """The error of a rank that has not answered in time, with the stacks of its threads."""
        before = len(self.output)
        signal.pidfd_send_signal(self._pidfd, signal.SIGUSR1)
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline and len(self.output) == before:
            time.sleep(0.02)
        return RankTimeout(
            f"rank {self.number} has not answered {self.asked!r} within {timeout:g} s; "
            f"its output and stacks:\n{_tail(self.output, 60)}"
        )

    def close_input(self) -> None:
        """Let it end: its commands are over."""
        assert self._process.stdin is not None  # noqa: S101  (for mypy)
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            return  # the reader of what was buffered is gone

    def end(self, deadline: float) -> None:
        """Wait for its end unless it is busy, kill what is left of its process group, and reap it."""
        if not self.asked:
            self._wait_end(deadline - time.monotonic())
        # Not reaped yet, so the number is still its own: what it forked goes too, and a stopped process as
        # well.
        os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._pidfd)
        os.close(self._answers)

    def _wait_end(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.poll(max(0.0, seconds) * 1000)


class Ranks:
    """`count` processes of one program; a context manager that leaves none of them behind.

    They end with the thread that entered it, too: Linux tells them when it is gone.

    Args:
        make: "module:function"; `function(rank, count, args)` returns the object whose methods are the
            commands.
        count: how many.
        python: the interpreter.
        args: the third argument of `function`; JSON.
        env: added to the environment. A PYTHONPATH in it comes before the repository; this process's own is
            not handed on.
        start_timeout: seconds until all have imported what they need.

    Raises:
        RankError: (on entering) a rank could not be made.
        RankTimeout: the same, in time.
    """

    def __init__(
        self,
        make: str,
        count: int,
        *,
        python: str | Path = sys.executable,
        args: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        start_timeout: float = 120.0,
    ) -> None:
        self._command = [
            str(python), "-m", "benchmarks.measuring.rank", make,
            json.dumps({"count": count, "args": dict(args or {})})
        ]  # fmt: skip
        path = [*filter(None, [(env or {}).get("PYTHONPATH")]), str(ROOT)]
        self._env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            **(env or {}),
            "PYTHONPATH": os.pathsep.join(path),
        }
        self._count = count
        self._start_timeout = start_timeout
        self._ranks: list[Rank] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="m8d-ranks-")
        try:
            for number in range(self._count):
                self._ranks.append(Rank(number, self._command, self._env, Path(self._folder.name)))
            for _ in _results(self._ranks, self._start_timeout):
                pass
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End them all: three seconds of time, then SIGKILL. Again: nothing happens."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.close_input()
        deadline = time.monotonic() + END_SECONDS
        for rank in ranks:
            rank.end(deadline)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __getitem__(self, number: int) -> Rank:
        return self._ranks[number]

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def call(self, name: str, *, timeout: float = 60.0, **args: Any) -> list[Any]:
        """Run a command in all ranks at once; their answers, by rank.

        Raises:
            RankError: of the first rank that fails, though others may still be blocked.
            RankTimeout: one has not answered within `timeout` seconds.
        """
        for rank in self._ranks:
            rank.start(name, **args)
        return self.results(timeout)

    def results(self, timeout: float = 60.0) -> list[Any]:
        """The answers to what was started in each of them, by rank.

        Raises:
            RankError: as for `call`.
            RankTimeout: as for `call`.
        """
        found = dict(_results(self._ranks, timeout))
        return [found[rank.number] for rank in self._ranks]


def _results(ranks: Sequence[Rank], timeout: float) -> Iterator[tuple[int, Any]]:
    """Answers as they come: an error of one is seen though another is blocked."""
    deadline = time.monotonic() + timeout
    waiting = {rank.number: rank for rank in ranks}
    for rank in ranks:
        if not rank.asked:
            raise RankError(f"rank {rank.number} was asked nothing: start a command first")
    poll = select.poll()
    for rank in ranks:
        for fd in rank.fds():
            poll.register(fd, select.POLLIN)
    while waiting:
        left = deadline - time.monotonic()
        ready = {fd for fd, _ in poll.poll(max(0.0, left) * 1000)}
        for rank in list(waiting.values()):
            if not ready & set(rank.fds()):
                continue
            complete, value = rank.take(ready)
            if complete:
                for fd in rank.fds():
                    poll.unregister(fd)
                del waiting[rank.number]
                yield rank.number, value
        if not ready and left <= 0:
            raise next(iter(waiting.values())).late(timeout)


def _status(status: os.waitid_result) -> str:
    if status.si_code == os.CLD_EXITED:
        return f"status {status.si_status}"
    return signal.Signals(status.si_status).name


def _tail(text: str, lines: int = 20) -> str:
    return "\n".join(text.splitlines()[-lines:])
