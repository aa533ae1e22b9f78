"""Members forked from a process that has loaded what they need; one is killed. Standard library only."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeAlias

from benchmarks.measuring.forks import Zygote

if TYPE_CHECKING:
    from collections.abc import Callable

Survivor: TypeAlias = "tuple[Callable[[], dict[str, Any]], Callable[[], None]]"
"""Of a member: to operate until one is lost and again without it, and tell; what it does after that."""
_READY = 120.0
"""Seconds until all members are there: 32 of them share two cores."""
_WHOLE = 90.0


class Line:
    """One survivor's way: when it got where, in seconds of the machine's monotonic clock."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}
        self.retries = 0

    def mark(self, what: str) -> None:
        """It is there now, if it was not before."""
        self.times.setdefault(what, time.monotonic())

    def told(self, generation: int, size: int) -> dict[str, Any]:
        """What the driver gets."""
        return {"times": self.times, "retries": self.retries, "generation": generation, "size": size}


class Herd(Zygote):
    """Commands of the process that forks members. It is in no world."""

    def __init__(self) -> None:
        super().__init__()
        self._pids: list[int] = []

    def _member(self, number: int, count: int, how: dict[str, Any]) -> Survivor:
        """In a member: join the others."""
        raise NotImplementedError

    def gather(self, count: int, **how: Any) -> None:
        """Fork so many members; returns when all have done an operation together."""

        def run(number: int, tell: Callable[..., None]) -> None:
            survive, go_on = self._member(number, count, how)
            tell(ready=True)
            tell(**survive())
            go_on()

        for number in range(count):
            self._pids.append(self._forks.start(lambda tell, number=number: run(number, tell)))  # type: ignore[misc]
        for pid in self._pids:
            self._forks.hear(pid, _READY)

    def lose(self, number: int) -> dict[str, Any]:
        """Kill a member; when it was killed, and what each of the others tells."""
        at = self._forks.kill(self._pids.pop(number))
        return {"at": at, "lines": [self._forks.hear(pid, _WHOLE) for pid in self._pids]}

    def scatter(self) -> None:
        """Kill those that are left."""
        while self._pids:
            self._forks.kill(self._pids.pop())
