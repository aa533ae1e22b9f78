"""Which combinations of scenario, mode, build and backend make sense."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING

from matrix.modes import CLEAN_UP, MODES, OTHERS, Mode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from matrix.scenario import Scenario

__all__ = ["LEGACY", "NCCL2", "Cell", "Target", "cells", "targets"]

LEGACY = "legacy"
NCCL2 = "nccl2"

_BACKENDS = ("nccl", "nccl-legacy", "nccl2")


@dataclass(frozen=True)
class Target:
    """A build and one of its backends.

    Attributes:
        build: name of the build: "stock-2.14.1".
        torch: its version without the local part.
        patched: whether the build is ours.
        backend: name given to init_process_group.
        implementation: what that name builds there, "legacy" or "nccl2".
    """

    build: str
    torch: str
    patched: bool
    backend: str
    implementation: str

    @property
    def name(self) -> str:
        """Heading of its column."""
        return f"{self.build} {self.backend}"


@dataclass(frozen=True)
class Cell:
    """One thing to run."""

    scenario: Scenario
    mode: Mode
    target: Target
    repeat: int = 0

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """What makes it one row of the results."""
        return (self.target.build, self.target.backend, self.scenario.id, self.mode.id, self.repeat)

    def __str__(self) -> str:
        """Return what progress shows."""
        return f"{self.target.name} {self.scenario.id} {self.mode.id}"


def targets(
    build: str, torch: str, *, patched: bool, backends: Iterable[str], default: str
) -> tuple[Target, ...]:
    """Name the backends of a build worth a column: one for each implementation, the plain name where it can be.

    Args:
        build: its name.
        torch: its version; a local part is cut off.
        patched: whether it is ours.
        backends: all names the build has.
        default: what the plain name "nccl" builds: "legacy" or "nccl2".
    """
    found: dict[str, Target] = {}
    for backend in _BACKENDS:
        if backend not in backends:
            continue
        kind = default if backend == "nccl" else LEGACY if backend == "nccl-legacy" else NCCL2
        found.setdefault(kind, Target(build, torch.partition("+")[0], patched, backend, kind))
    return tuple(found.values())


def cells(
    scenarios: Sequence[Scenario],
    columns: Sequence[Target],
    *,
    only: Sequence[str] = (),
    modes: Sequence[str] = (),
    repeat: int = 1,
) -> list[Cell]:
    """List what is to be run, target by target.

    A build that has its stock or patched twin here is run in every mode, as the two are compared; the others are
    run in torch's default mode and in CleanUpOnly with its variants, and in all where a scenario says so.

    Args:
        scenarios: from the catalogue.
        columns: the targets.
        only: shell patterns of scenario ids; empty: all.
        modes: shell patterns of mode ids; empty: all.
        repeat: how often each is run.
    """
    twins = _twins(columns)
    found = []
    for target in columns:
        for scenario in scenarios:
            if only and not any(fnmatch.fnmatchcase(scenario.id, pattern) for pattern in only):
                continue
            for mode in scenario.modes:
                if modes and not any(fnmatch.fnmatchcase(mode, pattern) for pattern in modes):
                    continue
                if target in twins or scenario.everywhere or _always(mode):
                    found += [Cell(scenario, MODES[mode], target, number) for number in range(repeat)]
    return found


def _always(mode: str) -> bool:
    return mode in CLEAN_UP or (mode in OTHERS and mode.startswith("unset"))


def _twins(columns: Sequence[Target]) -> set[Target]:
    seen: dict[tuple[str, str], list[Target]] = {}
    for target in columns:
        seen.setdefault((target.torch, target.backend), []).append(target)
    return {
        target for group in seen.values() if len({each.patched for each in group}) == 2 for target in group
    }
