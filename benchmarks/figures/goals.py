"""Goals, and the figures that answer to each; the page shows all, measured or not."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.figures.figure import Figure


@dataclass(frozen=True)
class Target:
    """A line of what is to be reached.

    Attributes:
        what: in words.
        limit: in words; "" where each of its figures has one of its own.
        keys: patterns of the figures that answer to it.
    """

    what: str
    limit: str
    keys: tuple[str, ...]

    def takes(self, figure: Figure) -> bool:
        """Whether a figure answers to it."""
        return any(fnmatchcase(figure.key, key) for key in self.keys)


TARGETS = (
    Target(
        "`World.send`/`recv`, `World.all_reduce` at 4 B", "≤ 0.90 of stock",
        ("latency/send_recv/4B/*/world", "latency/all_reduce/4B/*/world"),
    ),
    Target("the same, 64 KB to 64 MB", "≤ 1.01 of stock", ("latency/*/world",)),
    Target("`with w:` around each call at 4 B", "≤ 1.04 of stock", ("latency/*/4B/*/with",)),
    Target("`with w:` around each call at 1 MB", "≤ 1.01 of stock", ("latency/*/1MB/*/with",)),
    Target("`World.aio` send and recv at 4 B, median", "≤ 1.8 of stock's blocking", ("latency/*/4B/*/aio",)),
    Target("the same, 99th percentile", "≤ 3 of stock's", ("latency/*/4B/*/aio/p99",)),
    Target("`World.aio` send and recv from 1 MB on", "≤ 1.02 of stock", ("latency/*/aio",)),
    Target("pymultiworld, latency at 4 B and 64 KB", "≤ 1/6 of its", ("peers/latency/*",)),
    Target("pymultiworld, throughput at 4 MB", "≥ 1.8 of its", ("peers/throughput/*",)),
    Target("fan-in of 16 worlds", "≥ 0.97 of the throughput of one stock group", ("fanin/16/*",)),
    Target("100 worlds: to join each", "≤ 15 ms", ("worlds/join/100",)),
    Target("100 worlds: threads of each", "≤ 1.1", ("worlds/threads/100",)),
    Target("100 worlds: descriptors of each", "≤ 2", ("worlds/descriptors/100",)),
    Target("100 worlds: memory of each", "≤ 0.2 MB", ("worlds/memory/100",)),
    Target("100 worlds: CPU of the idle process", "≤ 1 % of a core", ("worlds/idle_cpu/100",)),
    Target("100 worlds: to close all", "≤ 2 s", ("worlds/close/100",)),
    Target("256 worlds: cost of each", "≤ 1.2 of that at 30", ("worlds/*/256:30",)),
    Target("a crash is detected, median", "≤ 3 ms, at 100 worlds too", ("detection/crash/*/p50",)),
    Target("a crash is detected, 99th percentile", "≤ 20 ms, at 100 worlds too", ("detection/crash/*/p99",)),
    Target("a 4-member world is whole again, its replacement waiting", "≤ 100 ms", ("rebuild/*",)),
    Target("toolchain", "", ("toolchain/*",)),
)  # fmt: skip


def answers(figures: Iterable[Figure]) -> list[tuple[Target, list[Figure]]]:
    """Each target with the figures that have a goal and answer to it; a figure answers to the first that takes it.

    Raises:
        ValueError: a figure has a goal and no target takes it: add it here.
    """
    found: list[tuple[Target, list[Figure]]] = [(target, []) for target in TARGETS]
    for figure in figures:
        if figure.goal is None:
            continue
        for target, taken in found:
            if target.takes(figure):
                taken.append(figure)
                break
        else:
            raise ValueError(
                f"{figure.key} has a goal, but no target of benchmarks/figures/goals.py takes it: add one"
            )
    return found
