"""One build on one machine: how ranks share its GPUs is tried, then everything is run."""

from __future__ import annotations

import fnmatch
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bed.builds import ask
from bed.errors import BedError
from bed.ranks import Launcher
from matrix.cells import targets
from matrix.runner import run_cells

from hardware.costs import costs
from hardware.machine import look
from hardware.paper import paper
from hardware.placed import Placed
from hardware.placements import choices
from hardware.records import Check, Column, Run
from hardware.risks import risks
from hardware.selection import select
from hardware.verify import checks
from m8d_build.files.digests import patches_digest, sources_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bed.builds import Build
    from matrix.cells import Cell, Target
    from matrix.outcome import Row

    from hardware.machine import Machine
    from hardware.placements import Placement

__all__ = ["Asked", "GaveUp", "run_build"]

HERE = Path(__file__).resolve().parents[1]
_TRY = 120.0
"""Seconds for two ranks to make a communicator and to add up."""

IN_VAIN = 4
"""Runs in a row that come to nothing until the rest is left: each may have cost a minute."""


class GaveUp(BedError):
    """Nothing comes of it any more; what was run before is kept."""


@dataclass
class Asked:
    """What the command line asks for.

    Attributes:
        only: patterns of scenarios.
        modes: patterns of modes.
        placements: ids; empty: what the machine offers.
        backends: names; empty: all.
        repeat: runs of each cell.
        jobs: cells side by side.
        checks: patterns of what is looked at beside the scenarios: values, worlds, risks, costs.
        said: the options that leave something out, for the record.
        library: the test bed's, where it stands in for hardware.
        packages: folders with what ranks need beyond torch, where the build has it not.
    """

    only: Sequence[str] = ()
    modes: Sequence[str] = ()
    placements: Sequence[str] = ()
    backends: Sequence[str] = ()
    repeat: int = 3
    jobs: int = 2
    checks: Sequence[str] = ("*",)
    said: Sequence[str] = ()
    library: Path | None = None
    packages: tuple[Path, ...] = ()


@dataclass
class _Watch:
    """Counts the runs that came to nothing, one after the other."""

    placed: Placed
    in_vain: int = 0
    last: str = ""
    rows: list[Row] = field(default_factory=list)

    def took(self, row: Row) -> None:
        if self.placed.over:
            return
        self.rows.append(row)
        self.in_vain = self.in_vain + 1 if row.failure else 0
        self.last = row.failure or self.last
        if self.in_vain >= IN_VAIN:
            self.placed.over = True
            raise GaveUp(
                f"{self.in_vain} runs in a row came to nothing, the last: {self.last}",
                rule="ranks start, and what they run ends",
                next_step="Look at that first; `--only` and `--modes` choose a part, `nvidia-smi` shows who uses the GPU",
            )


def run_build(
    name: str, python: Path, asked: Asked, *, scratch: Path, today: str, keep: Callable[[Run], None],
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Run a build in every placement and with every backend.

    Args:
        name: of the build.
        python: its interpreter.
        asked: what is wanted.
        scratch: a folder.
        today: ISO date.
        keep: is given what was run, also when the rest is cut short.
        say: is given a line for each thing that was done.

    Raises:
        NoGpu: there is none.
        GaveUp: too much came to nothing.
        BedError: the build cannot be used, or NCCL takes no two ranks here.
    """
    machine = look(python, library=asked.library)
    say(
        f"{machine.gpu}, driver {machine.driver or 'unknown'}; torch {machine.torch}, NCCL {machine.nccl or 'unknown'}"
    )
    groups = choices(len(machine.gpus), asked.placements)
    with Launcher(
        python, asked.library, workdir=scratch / name, extra_path=(HERE, *asked.packages)
    ) as launcher:
        accepted = [found for group in groups if (found := _accepted(launcher, group, asked, say))]
        if not accepted:
            raise BedError(
                f"NCCL {machine.nccl} takes no two ranks on {machine.gpu} in any way that was tried",
                rule="ranks share one GPU (NCCL 2.30 and later, or an NCCL_HOSTID each), or have one each",
                next_step="What NCCL said stands above; NCCL_DEBUG=INFO in the environment makes it say more",
            )
        build = ask(name, launcher)
        for placement in accepted:
            for target in _targets(build, asked):
                column = _column(target, placement, machine, build, today)
                say(f"{target.name}, {placement.id}: {placement.title}")
                _run_column(Placed(launcher, placement, disguise=asked.library is not None), column, asked,
                            len(machine.gpus), scratch, keep, say)  # fmt: skip


def _accepted(
    launcher: Launcher, group: Sequence[Placement], asked: Asked, say: Callable[[str], None]
) -> Placement | None:
    """Return the first placement in which two ranks can add up."""
    for placement in group:
        placed = Placed(launcher, placement, disguise=asked.library is not None)
        try:
            with placed.start(
                "basics:sums", 2, config={"backend": "nccl", "exit": "hard"}, timeout=_TRY
            ) as ranks:
                sums = [event.fields["value"] for event in ranks.wait("sum")]
        except AssertionError as exc:
            told = [line.strip() for line in str(exc).splitlines() if "rror" in line or "Duplicate" in line]
            say(f"{placement.id} is not accepted: {' / '.join(told[-3:])[:400] or str(exc)[:400]}")
            continue
        if sums == [[3.0], [3.0]]:
            return placement
        say(f"{placement.id}: 1 + 2 came out as {sums}")
    return None


def _targets(build: Build, asked: Asked) -> Iterator[Target]:
    for target in targets(
        build.name, build.torch, patched=build.patched, backends=build.backends, default=build.nccl_default_is
    ):
        if not asked.backends or target.backend in asked.backends:
            yield target


def _column(target: Target, placement: Placement, machine: Machine, build: Build, today: str) -> Column:
    return Column(
        target, placement.id, machine.gpu, machine.driver, build.torch, build.cuda, machine.nccl or build.nccl,
        build.topics, today, sources_digest("hardware"), patches_digest(build.patches),
    )  # fmt: skip


def _left_out(asked: Asked, *, ended: bool) -> tuple[str, ...]:
    """Say why something may be missing from the record of a run, one reason each."""
    return (
        *asked.said,
        *([] if ended else ["the run was cut short"]),
    )


def _run_column(
    placed: Placed, column: Column, asked: Asked, gpus: int, scratch: Path, keep: Callable[[Run], None],
    say: Callable[[str], None],
) -> None:  # fmt: skip
    cells, lacking = select(
        column.target, placed.placement, gpus, only=asked.only, modes=asked.modes, repeat=asked.repeat
    )
    found: list[Check] = []
    ended = False
    watch = _Watch(placed)
    try:
        backend = column.target.backend
        listed = checks(placed, backend, gpus) + risks(placed, column.target, gpus, asked.jobs)
        listed += costs(placed, backend) + paper(placed, backend, gpus, asked.packages)
        for name, run in listed:
            if any(fnmatch.fnmatch(name, pattern) for pattern in asked.checks):
                began = time.monotonic()
                found.append(run())
                say(f"  {name}: {found[-1].outcome} ({time.monotonic() - began:.0f} s)")
        say(f"  {len(cells)} runs of scenarios, {asked.jobs} at a time")

        def took(cell: Cell, row: Row) -> None:
            if row.failure and not placed.over:
                say(f"  {cell}: {row.failure}")
            watch.took(row)

        run_cells(placed, cells, scratch=scratch, jobs=asked.jobs, each=took)
        ended = True
    finally:
        keep(Run(column, tuple(watch.rows), tuple(found), tuple(lacking), _left_out(asked, ended=ended)))
