"""Run cells: start the ranks, do the fault, watch the observers to the end, write down what they saw."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from matrix.outcome import Row, observe
from matrix.scenario import KILL, NOTHING, STOP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from bed.ranks import Launcher, Ranks

    from matrix.cells import Cell
    from matrix.scenario import Scenario

__all__ = ["run_cell", "run_cells"]

START = 60.0
"""Seconds for ranks to start and to make their groups; it takes less than one on an idle machine."""

SETTLE = 0.3
"""Seconds between an observer's word that it is about to call and the fault, so that the fault meets the call."""

_NEVER = 5.0
"""Seconds to see that somebody is blocked for good."""

_QUICK = "100"
"""Milliseconds; torch's watchdog sleeps four times as long before it aborts. A scenario of its own looks at that."""


def environment(cell: Cell, scratch: Path) -> dict[str, str]:
    """Return the variables of a cell's ranks."""
    return {
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": _QUICK,
        # torch 2.6's default. With more, newer ones spend seconds on a stack trace before they abort.
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
        "TORCH_FR_BUFFER_SIZE": "0",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(scratch / "dump_of_rank_"),
        **cell.mode.env,
        **cell.scenario.env,
    }


def run_cell(launcher: Launcher, cell: Cell, *, scratch: Path) -> Row:
    """Fill one cell; a run that came to nothing is a row that says why."""
    scenario, target = cell.scenario, cell.target
    row = Row(target.build, target.backend, scenario.id, cell.mode.id, cell.repeat)
    config = {"exit": "hard", **scenario.config, "backend": target.backend}
    filled = row
    try:
        with launcher.start(
            scenario.program,
            scenario.world_size,
            config=config,
            env=environment(cell, scratch),
            timeout=START,
        ) as ranks:
            fault_at = _fault(ranks, scenario)
            _watch(ranks, cell)
            filled = _written(row, ranks, scenario, fault_at)
    except AssertionError as exc:
        return replace(filled, failure=filled.failure or _shortened(str(exc)))
    return filled


def run_cells(
    launcher: Launcher,
    cells: Sequence[Cell],
    *,
    scratch: Path,
    jobs: int,
    each: Callable[[Cell, Row], None],
) -> None:
    """Fill cells, some side by side; `each` is called as they come, by one thread at a time."""
    lock = threading.Lock()

    def one(cell: Cell) -> None:
        row = run_cell(launcher, cell, scratch=scratch)
        with lock:
            each(cell, row)

    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(one, cell) for cell in cells]
        try:
            for done in running:
                done.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _fault(ranks: Ranks, scenario: Scenario) -> float:
    """Do it, and return when it happened."""
    ranks.wait("ready", timeout=START)
    if scenario.fault.verb == NOTHING:
        return ranks.wait("fault", ranks=scenario.observers[:1], timeout=START)[0].at
    # Whoever ended meanwhile is not waited for; that the others have not is as it should be.
    _left(ranks, scenario.observers[:1], float(scenario.config.get("settle", SETTLE)))
    return {KILL: ranks.kill, STOP: ranks.stop}[scenario.fault.verb](scenario.fault.rank)


def _watch(ranks: Ranks, cell: Cell) -> None:
    """Wait until each observer has left or died, or is known to be blocked.

    Who has come through the call that met the fault gets as much time again for what it does afterwards.
    """
    observers = cell.scenario.observers
    if _left(ranks, observers, _deadline(cell)) and all(
        _through(ranks, rank) for rank in _left(ranks, observers, 0)
    ):
        _left(ranks, observers, cell.scenario.deadline + float(cell.scenario.config.get("linger", 0)))


def _left(ranks: Ranks, observers: Iterable[int], timeout: float) -> list[int]:
    """Wait, so long at most, until none of the observers is left; return those that are."""
    try:
        ranks.join(ranks=observers, timeout=timeout)
    except AssertionError:
        return [rank for rank in observers if rank not in ranks.exits]
    return []


def _deadline(cell: Cell) -> float:
    """Where nothing is handled nobody is ever let go: no need to wait long to see it."""
    if cell.mode.id != "aeh0":
        return cell.scenario.deadline
    return min(cell.scenario.deadline, _NEVER + float(cell.scenario.config.get("timeout", 0)))


def _through(ranks: Ranks, rank: int) -> bool:
    ended = {event.fields["step"]: event.fields["ok"] for event in ranks.events(rank, "end")}
    begun = {event.fields["step"] for event in ranks.events(rank, "begin")}
    return not ended.get("caller", True) or ("read" in ended if "read" in begun else "caller" in ended)


def _written(row: Row, ranks: Ranks, scenario: Scenario, fault_at: float) -> Row:
    exits = ranks.exits
    seen = tuple(
        observe(rank, ranks.events(rank), exits.get(rank), fault_at=fault_at) for rank in scenario.observers
    )
    return replace(row, seen=seen, failure=_failure(ranks, scenario.observers))


def _failure(ranks: Ranks, observers: Iterable[int]) -> str:
    """A program that raised did not observe anything."""
    for rank in observers:
        for event in ranks.events(rank, "failed"):
            return _shortened(f"rank {rank}: {event.fields['error']}: {event.fields['text']}")
    return ""


def _shortened(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines)[:400]
