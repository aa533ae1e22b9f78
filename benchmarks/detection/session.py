"""A session of `detection`: its processes, and one fault after the other in them."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from signal import SIGKILL
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.measuring.ranks import Rank, Ranks

HANG = 0.5
"""hang_timeout of worlds whose member is stopped, seconds."""
_LONG = 30.0
"""hang_timeout of worlds whose member is killed: silence says nothing there."""
_AFTER = (0.150, 0.300)
"""Seconds between the last receive's beginning and the signal: at no fixed phase of any timer, and after the early-close
connections were dialed (0.05 s)."""


@dataclass(frozen=True)
class Fault:
    """One fault; times are seconds of the machine's monotonic clock.

    Attributes:
        at: when the signal was sent.
        seen: what the observer saw, by world: "at", "cause", "ranks", "error".
        third: what a third member saw, if there was one.
        ended: when a plain TCP connection of the victim ended; None where it was only stopped.
    """

    at: float
    seen: list[dict[str, Any]]
    third: dict[str, Any] | None
    ended: float | None


class Session:
    """The processes: an observer, its steady partner, which keeps the store, and the zygote of the victims."""

    def __init__(self, ranks: Ranks) -> None:
        self.observer: Rank = ranks[0]
        self.partner: Rank = ranks[1]
        self.zygote: Rank = ranks[2]
        self._random = random.Random(0)  # noqa: S311  (nothing secret; the same pauses in every run)
        self._number = 0
        self._steady = 0
        self._store = self.partner.call("address")
        for rank in (self.observer, self.partner, self.zygote):
            rank.call("meet", store=self._store)
        self._port = self.partner.call("listen")

    def steady(self, count: int) -> None:
        """Have `count` worlds of observer and partner."""
        names = [f"steady{number}" for number in range(self._steady, count)]
        if names:
            for rank in (self.observer, self.partner):
                rank.start("steady", names=names)
            self._steady = self.observer.result()
            self.partner.result()

    def fault(
        self, signal: str, way: str, *, worlds: int = 1, third: bool = False, fresh: Rank | None = None
    ) -> Fault:
        """One victim, one signal.

        Args:
            signal: "kill" or "stop".
            way: how the observer notices.
            worlds: how many the victim shares with the observer.
            third: whether the partner is in the world as well.
            fresh: the victim, to be killed; None: one that is forked for that.
        """
        self._number += 1
        names = [f"fault{self._number}-{number}" for number in range(worlds)]
        size = 3 if third else 2
        terms: dict[str, Any] = {
            "names": names,
            "size": size,
            "hang_timeout": HANG if signal == "stop" else _LONG,
        }
        if fresh is None:
            self.zygote.start("fork", port=self._port, rank=size - 1, **terms)
        else:
            fresh.start("join", store=self._store, port=self._port, rank=size - 1, **terms)
        self.observer.start("watch", rank=0, how=way, src=size - 1, **terms)
        if third:
            self.partner.call("watch", rank=1, how="recv", src=0, **terms)
        self.partner.call("accept")
        self.observer.result()
        victim = (fresh or self.zygote).result()
        at = self._signal(signal, victim) if fresh is None else self._kill(fresh)
        seen = self.observer.call("seen", within=30.0)
        other = self.partner.call("seen", within=30.0)[0] if third else None
        if signal == "stop":
            self.zygote.call("kill", pid=victim, after=0.0)
        ended = self.partner.call("ended")
        self._check_others()
        return Fault(at, seen, other, ended if signal == "kill" else None)

    def _signal(self, signal: str, victim: int) -> float:
        at: float = self.zygote.call(signal, pid=victim, after=self._random.uniform(*_AFTER))
        return at

    def _kill(self, fresh: Rank) -> float:
        time.sleep(self._random.uniform(*_AFTER))
        at = time.monotonic()
        os.kill(fresh.pid, SIGKILL)
        return at

    def _check_others(self) -> None:
        """A message through each of the other worlds."""
        if not self._steady:
            return
        for rank in (self.observer, self.partner):
            rank.start("exchange")
        self.observer.result()
        if (right := self.partner.result()) != self._steady:
            raise RuntimeError(f"after a fault in another world {right} of {self._steady} messages arrived")
