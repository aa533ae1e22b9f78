"""Which of the matrix's scenarios need no double, and what else is looked at on hardware. Pure."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING

from matrix.catalogue import GROUPS, SCENARIOS
from matrix.cells import Cell
from matrix.modes import MODES
from matrix.scenario import KILL, Fault, Scenario

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matrix.cells import Target

    from hardware.placements import Placement

__all__ = ["CHECKS", "HARDWARE", "ORDER", "needs_double", "select", "wanted"]

_UNHANDLED = "aeh0"
"""Nobody is ever let go there: nothing can be measured, and every cell costs its whole deadline."""


def needs_double(scenario: Scenario) -> bool:
    """Whether the scenario's fault is one that only the double can be told to make."""
    config = any("knobs" in name for name in scenario.config)
    return (
        config or any(name.startswith("M8D_BED_") for name in scenario.env) or "enqueue" in scenario.program
    )


_SLOW = Scenario(
    "later.dump-sleep-default",
    GROUPS[-2],
    "the time for dumps as torch has it: four times 15 s before the caller is let go",
    "faults:peer_lost",
    shows=("D2",),
    config={"op": "all_reduce", "caller": "stream", "linger": 1.0},
    env={"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "15000"},
    fault=Fault(KILL, 1),
    deadline=90.0,
    modes=("unset", "aeh2"),
)

HARDWARE: tuple[Scenario, ...] = (*(each for each in SCENARIOS if not needs_double(each)), _SLOW)
"""Everything whose fault is a signal."""

ORDER = {
    (scenario.id, mode): place
    for place, (scenario, mode) in enumerate((each, mode) for each in HARDWARE for mode in each.modes)
}


CHECKS = (
    *(f"every collective, {size} ranks" for size in (2, 3, 4)),
    "groups beside the default one, 3 ranks",
    *(f"worlds: every operation in every way, {size} members" for size in (2, 3)),
    "worlds: left and rejoined",
    "worlds: a member is killed and replaced, the others go on",
    "worlds: a member is stopped and replaced, the others go on",
)
"""What is looked at beside the scenarios (`hardware.verify.checks`)."""


def wanted() -> tuple[tuple[str, str], ...]:
    """Return the cells of a whole record: scenario and mode."""
    return tuple(key for key in ORDER if key[1] != _UNHANDLED)


def select(
    target: Target,
    placement: Placement,
    gpus: int,
    *,
    only: Sequence[str] = (),
    modes: Sequence[str] = (),
    repeat: int = 1,
) -> tuple[list[Cell], list[str]]:
    """Return the cells to run on a machine, and the scenarios it has too few GPUs for.

    Args:
        target: build and backend.
        placement: how ranks are put on the GPUs.
        gpus: how many there are.
        only: shell patterns of scenario ids; empty: all.
        modes: shell patterns of mode ids; empty: all.
        repeat: how often each is run.
    """
    most = placement.most(gpus)
    found: list[Cell] = []
    lacking: list[str] = []
    for scenario in HARDWARE:
        chosen = [mode for mode in scenario.modes if mode != _UNHANDLED and _matches(mode, modes)]
        if not chosen or not _matches(scenario.id, only):
            continue
        if most is not None and scenario.world_size > most:
            lacking.append(f"{scenario.id}: {scenario.world_size} ranks")
            continue
        found += [Cell(scenario, MODES[mode], target, turn) for mode in chosen for turn in range(repeat)]
    return found, lacking


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
