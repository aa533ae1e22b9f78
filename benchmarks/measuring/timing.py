"""Timing inside a rank: a clock loop without garbage collection, and the summary of its samples."""

from __future__ import annotations

import gc
import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.figures.figure import quantile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def settle() -> None:
    """Once, when all is loaded: what lives now is never looked at again, so that later collections are short."""
    gc.collect()
    gc.freeze()


@contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage collection inside; what piled up before is collected first (quick after `settle`)."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def gathered(number: int) -> Iterator[None]:
    """Inside, all threads of this process run on one core: of those there are, by `number`.

    Whoever wakes inside is on that core afterwards too, until the system moves it. So forms that are compared
    begin alike; else each would run for seconds with its threads where they happened to be, and that makes a
    third of what a message takes.
    """
    cores = os.sched_getaffinity(0)
    _confine({sorted(cores)[number % len(cores)]})
    try:
        yield
    finally:
        _confine(cores)


def _confine(cores: set[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), cores)


def told(taken: Sequence[int], share: float = 1.0) -> dict[str, float]:
    """Median, 99th percentile, largest and mean of timings, in microseconds.

    Args:
        taken: nanoseconds each; at least one.
        share: of each timing that counts: 0.5 for a round trip that is to be one way.
    """
    micro = [share * each / 1e3 for each in taken]
    return {
        "p50": quantile(micro, 0.5),
        "p99": quantile(micro, 0.99),
        "max": max(micro),
        "mean": sum(micro) / len(micro),
    }
