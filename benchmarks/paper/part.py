"""The paper's experiments: three ways to serve senders, a worker that is lost, a worker that joins."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.figures.sizes import KB, MB, parse_size, size_name
from benchmarks.measuring.part import Part, Run, Unavailable
from benchmarks.measuring.ranks import RankError
from benchmarks.measuring.rounds import interleaved
from benchmarks.paper.layout import CAUGHT, FORMS, PLAIN, SAME, SENDERS, THEIRS, WORDS, WORLD, cells_of
from benchmarks.paper.overtime import Trial, joined, killed
from benchmarks.paper.program import PACKAGES, Program
from benchmarks.paper.told import fault_of, join_of, throughput_of
from benchmarks.peers.environments import TORCH
from benchmarks.peers.held import held_pair

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from benchmarks.figures.figure import Figure
    from benchmarks.peers.environments import Pair

SIZES = (4 * KB, 40 * KB, 400 * KB, 4 * MB)
"""Those that the paper's figures name; 40 MB is added with --full."""
ROUND_BYTES = 40 * MB
"""What each sender sends in a round, within the two limits below."""
FEWEST, MOST = 16, 200
"""Messages of each sender in a round."""
CAUGHT_WORDS = "torch.distributed, each receive in a thread with a handler of its own"


def messages_for(size: int) -> int:
    """Messages of each sender in a round, the same for every form: none has its start in fewer. Pure."""
    return max(FEWEST, min(MOST, ROUND_BYTES // size))


def measure(run: Run) -> Iterator[Figure]:
    """All four tables."""
    with contextlib.ExitStack() as stack:
        held: Pair | None = None
        try:
            held = stack.enter_context(held_pair(run, run.options.torch_python))
        except Unavailable as error:
            run.remark(f"without pymultiworld, and on this interpreter's torch: {error}")
        forms = [form for form in FORMS if held is not None or form != THEIRS]
        if "throughput" in run.options.tables:
            yield from _throughput(run, held, forms)
        if "fault" in run.options.tables:
            yield from _faults(run, held, forms)
        if "join" in run.options.tables:
            yield from _joins(run, held, forms)


def _throughput(run: Run, held: Pair | None, forms: list[str]) -> Iterator[Figure]:
    sizes = run.options.sizes or [*SIZES, *run.pick([], [40 * MB])]
    rounds = run.options.rounds or run.pick(5, 15)
    senders = max(run.options.senders)
    with contextlib.ExitStack() as stack:
        programs: dict[str, Program] = {}
        for package in dict.fromkeys(PACKAGES[form] for form in forms):
            run.progress(f"starting processes of {package}")
            programs[package] = stack.enter_context(Program(package, held, senders))
        for count in run.options.senders:
            for size in sizes:
                run.progress(f"{count} senders, messages of {size_name(size)}")
                cells = [cell for cell in cells_of(count) if cell[0] in forms]
                found = _rates(programs, cells, count, size, rounds)
                yield from throughput_of(count, size, found)


def _rates(
    programs: dict[str, Program], cells: list[tuple[str, str]], count: int, size: int, rounds: int
) -> dict[tuple[str, str], list[float]]:
    def rate(cell: tuple[str, str]) -> float:
        form, topology = cell
        return programs[PACKAGES[form]].rate(form, topology, count, size, messages_for(size))

    return interleaved(cells, rounds, rate, warm_up=1)


def _faults(run: Run, held: Pair | None, forms: list[str]) -> Iterator[Figure]:
    words = {**WORDS, CAUGHT: CAUGHT_WORDS}
    order = [PLAIN, CAUGHT, *(form for form in forms if form != PLAIN)]
    found = _trials(run, "a worker is killed", order, partial(killed, held))
    for form, trials in found.items():
        yield from fault_of(form, words[form], trials)


def _joins(run: Run, held: Pair | None, forms: list[str]) -> Iterator[Figure]:
    order = [form for form in forms if form in (THEIRS, SAME, WORLD)]
    found = _trials(run, "a worker joins", order, partial(joined, held))
    for form, trials in found.items():
        yield from join_of(form, WORDS[form], trials)


def _trials(
    run: Run, what: str, forms: list[str], one: Callable[[str, int, float], Trial]
) -> dict[str, list[Trial]]:
    """Trials of every form, taking turns; one that failed is said and left out."""
    found: dict[str, list[Trial]] = {form: [] for form in forms}
    for number in range(run.options.trials or run.pick(2, 5)):
        for form in forms:
            run.progress(f"{what}, {form}, trial {number + 1}")
            try:
                found[form].append(one(form, run.options.size, run.options.seconds))
            except RankError as error:
                run.remark(f"{what}, {form}: a trial failed: {str(error).splitlines()[0][:160]}")
    return {form: trials for form, trials in found.items() if trials}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which tables, what is sent, and how often."""
    parser.add_argument(
        "--torch-python", type=Path, metavar="PYTHON",
        help=f"a Python with torch {TORCH} to lean on, instead of an environment made in the cache",
    )  # fmt: skip
    tables = ("throughput", "fault", "join")
    parser.add_argument("--tables", nargs="+", choices=tables, default=[*tables], help="default: all")
    parser.add_argument(
        "--senders", nargs="+", type=int, choices=range(1, SENDERS + 1), default=[1, 2, 3], help="1 2 3"
    )
    parser.add_argument("--sizes", nargs="+", type=parse_size, metavar="SIZE", help="4KB, 4MB, ...")
    parser.add_argument("--rounds", type=int, help="that count, of each rate (5; 15 with --full)")
    parser.add_argument("--trials", type=int, help="of each experiment over time (2; 5 with --full)")
    parser.add_argument("--size", type=parse_size, default=400 * KB, help="of messages over time: 400KB")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a trial over time (4)")


PART = Part(
    name="paper",
    title="The paper's tables",
    description=(
        "The experiments of the MultiWorld paper (arXiv 2407.08980) on gloo and loopback: throughput over "
        "size for one leader and 1 to 3 senders, as one world, as a world for each sender, and as a "
        "receiving process for each; a worker that is killed, and one that joins, while another sends. "
        "pymultiworld, torch and this package take turns, on the same torch."
    ),
    measure=measure,
    add_options=add_options,
    torch=TORCH,
)
