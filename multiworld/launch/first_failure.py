"""The first failure, of processes that are found failed at the same time. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

from multiworld.launch.errors import signal_name

__all__ = ["Failure", "first_failure"]

_FROM_OUTSIDE = frozenset({-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGQUIT})


@dataclass(frozen=True)
class Failure:
    """How a process failed.

    Attributes:
        rank, local_rank, pid: of the process.
        exit_code: negative: the signal.
        at: monotonic seconds of its exception; without one, of the time when its end was noticed.
        raised: "type", "message", "traceback" of its exception; None without one.
        began: whether it reached its function.
    """

    rank: int
    local_rank: int
    pid: int
    exit_code: int
    at: float
    raised: dict[str, Any] | None
    began: bool

    def line(self) -> str:
        """Return one line on the failure."""
        if self.raised is not None:
            return (
                f"rank {self.rank}: {self.raised['type']}: {(self.raised['message'].splitlines() or [''])[0]}"
            )
        return f"rank {self.rank}: {signal_name(self.exit_code) or f'exit code {self.exit_code}'}"


def first_failure(failures: list[Failure]) -> tuple[Failure, list[Failure]]:
    """Return the first one and the others.

    A process that was killed from outside comes first: its peers raise because of it, possibly before its end
    is noticed. Otherwise time decides.
    """
    first, *others = sorted(
        failures, key=lambda each: (each.exit_code not in _FROM_OUTSIDE, each.at, each.rank)
    )
    return first, others
