"""Examples as a user starts them: their output line by line, and whether a process of theirs is left."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from kits.forkedkit import Forked

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
PATIENCE = 180.0  # seconds; five processes load torch on a machine that may be busy
MARK = "M8D_TEST_EXAMPLE"


class Program:
    """A running example, its output line by line; `forked`: from a process that has loaded torch."""

    def __init__(self, mark: str, *words: object, nice: int = 0, forked: bool = True) -> None:
        # A program of examples/, or what comes after `python`.
        words = (EXAMPLES / str(words[0]), *words[1:]) if str(words[0]).endswith(".py") else words
        self.mark = mark
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        # Unbuffered, print() writes a line and its end one after the other: examples must not mix theirs.
        environ = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", MARK: mark}
        self.process = (Forked if forked else subprocess.Popen)(
            [sys.executable, *map(str, words)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, env=environ, start_new_session=True,
        )  # fmt: skip
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, self.process.pid, os.getpriority(os.PRIO_PROCESS, 0) + nice)
        self.lines: list[str] = []
        self._fresh: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._fresh.put(line.rstrip("\n"))
        self._fresh.put(None)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def expect(self, pattern: str, timeout: float = PATIENCE) -> re.Match[str]:
        """The next line in which `pattern` is found."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                line = self._fresh.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {pattern!r} in {timeout} s:\n{self.text}") from None
            if line is None:
                raise AssertionError(f"ended before {pattern!r}:\n{self.text}")
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found

    def finish(self, timeout: float = PATIENCE) -> int:
        """Wait for its end; returns its exit code. All output is in `lines` then."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        if code is not None:
            self._reader.join(PATIENCE)
        while not self._fresh.empty():
            if (line := self._fresh.get()) is not None:
                self.lines.append(line)
        assert code is not None, f"did not end in {timeout} s:\n{self.text}"
        return code

    def pids(self, count: int) -> dict[int, int]:
        """The pid that each of `count` processes told, by rank."""
        found: dict[int, int] = {}
        while len(found) < count:
            told = self.expect(r"(?:process|rank) (\d)(?: of \d)?, pid (\d+)")
            found[int(told[1])] = int(told[2])
        return found

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()


def processes_with(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":
                    found.append(int(entry.name))
    return found


def running(programs: list[Program]) -> list[int]:
    """Pids of programs that have not ended: the environment of a forked one is its server's in /proc."""
    return [each.process.pid for each in programs if each.process.poll() is None]


@contextlib.contextmanager
def examples() -> Iterator[Callable[..., Program]]:
    """Start examples; afterwards nothing of them may be there any more, even if it was killed."""
    mark = uuid.uuid4().hex
    made: list[Program] = []

    def start(*words: object, nice: int = 0, forked: bool = True) -> Program:
        made.append(Program(mark, *words, nice=nice, forked=forked))
        return made[-1]

    try:
        yield start
        deadline = time.monotonic() + PATIENCE / 2
        while (left := [*processes_with(mark), *running(made)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"left behind: {left}"
    finally:
        for pid in processes_with(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for program in made:
            program.close()
