"""Rows and columns made up, for the tests of the matrix."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from matrix.cells import LEGACY, NCCL2, Target
from matrix.outcome import ALIVE, RETURNED, Row, Seen, Step

STOCK = Target("stock-2.6.0", "2.6.0", False, "nccl", LEGACY)
PATCHED = Target("patched-2.6.0", "2.6.0", True, "nccl", LEGACY)
NEWER = Target("stock-2.14.1", "2.14.1", False, "nccl2", NCCL2)


@dataclass(frozen=True)
class Event:
    name: str
    at: float
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Exit:
    code: int | None
    signal: str | None
    at: float


def step(name: str, outcome: str = RETURNED, *, ms: int | None = 400, **more: Any) -> Step:
    return Step(name, outcome, ms=None if outcome in {"blocked", "cut short"} else ms, took_ms=ms, **more)


def seen(*steps: Step, end: str = ALIVE, rank: int = 0, ended_ms: int | None = None) -> Seen:
    return Seen(rank, end, ended_ms, steps)


def row(
    *observers: Seen,
    target: Target = STOCK,
    scenario: str = "lost.all_reduce.wait",
    mode: str = "aeh2",
    repeat: int = 0,
    failure: str = "",
) -> Row:
    return Row(target.build, target.backend, scenario, mode, repeat, tuple(observers), failure)
