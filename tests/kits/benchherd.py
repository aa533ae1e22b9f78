"""A rank without torch that forks members, for test_bench_elastic."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

from benchmarks.elastic.herd import Herd, Line
from benchmarks.measuring.forks import forever

if TYPE_CHECKING:
    from benchmarks.elastic.herd import Survivor


def make(rank: int, count: int, args: dict[str, object]) -> Members:
    return Members()


class Members(Herd):
    """A member is told of the loss by SIGUSR1."""

    def _member(self, number: int, count: int, how: dict[str, Any]) -> Survivor:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

        def survive() -> dict[str, Any]:
            line = Line()
            signal.sigwait({signal.SIGUSR1})
            line.mark("first")
            return {**line.told(number, count - 1), **how}

        return survive, forever

    def lose(self, number: int) -> dict[str, Any]:
        for place, pid in enumerate(self._pids):
            if place != number:
                os.kill(pid, signal.SIGUSR1)
        return super().lose(number)

    def pids(self) -> list[int]:
        return self._pids
