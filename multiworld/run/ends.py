"""End of a run: exit code, reason, and a report of the worker that failed last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from multiworld.run.workers.agent import GROUP_HINT

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

__all__ = ["End", "child_failed"]


@dataclass(frozen=True)
class End:
    """How a run ended.

    Attributes:
        code: exit code.
        reason: in a line.
        report: details for standard error.
    """

    code: int
    reason: str
    report: str = ""


def child_failed(failed: ChildFailedError, most: int, restart: str, *, worlds: bool) -> End:
    """Return the end of a run whose worker has no restarts left.

    Args:
        failed: as torch reports it.
        most: --max-restarts.
        restart: "worker" or "group".
        worlds: whether any worker has reported a world.
    """
    rank, failure = failed.get_first_failure()
    code = int(failure.exitcode)
    whose = "it" if restart == "worker" else "the group"
    if most == 0:
        more = f"Rank {rank} was not started again: with --max-restarts N it is, up to N times."
    else:
        times = "once" if most == 1 else f"{most} times"
        more = f"Rank {rank} failed after {whose} had been restarted {times} (--max-restarts {most})."
    if restart == "worker" and not worlds:
        more += f" {GROUP_HINT}"
    return End(
        code if code > 0 else 128 - code, f"rank {rank} failed", f"{str(failed).strip()}\nm8d-run: {more}"
    )
