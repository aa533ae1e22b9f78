"""A rank without torch that forks, for test_bench_forks."""

from __future__ import annotations

import os
import time

from benchmarks.measuring.forks import ForkError, Forks, forever


def make(rank: int, count: int, args: dict[str, object]) -> Parent:
    return Parent()


class Parent:
    def __init__(self) -> None:
        self._forks = Forks()
        self._pid = 0

    def start(self, what: str) -> int:
        self._pid = self._forks.start(getattr(self, f"_{what}"))
        return self._pid

    def hear(self, within: float) -> dict[str, object]:
        try:
            return self._forks.hear(self._pid, within)
        except ForkError as error:
            return {"failed": str(error)}

    def kill(self) -> list[float]:
        before = time.monotonic()
        return [before, self._forks.kill(self._pid), time.monotonic()]

    def stop(self) -> str:
        self._forks.stop(self._pid)
        status = os.waitpid(self._pid, os.WUNTRACED)[1]
        return "stopped" if os.WIFSTOPPED(status) else f"status {status}"

    def _talk(self, tell) -> None:
        tell(pid=os.getpid(), text="one\ntwo")
        tell(more=[1, 2])
        forever()

    def _fail(self, tell) -> None:
        raise LookupError("on purpose")

    def _end(self, tell) -> None:
        pass

    def _return(self, tell) -> None:
        raise SystemExit(0)

    def _silent(self, tell) -> None:
        forever()
