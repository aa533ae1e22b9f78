"""Collectives over the lane beside the same over gloo: where each is the faster one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.collectives.part import OPS
from benchmarks.figures.sizes import KB, MB, parse_size
from benchmarks.measuring.part import Part, Run
from benchmarks.operations.cases import Case
from benchmarks.operations.names import LANE, P2P
from benchmarks.operations.session import measured
from benchmarks.thresholds.table import table_of, words_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from benchmarks.figures.figure import Figure
    from benchmarks.thresholds.table import Key

CHOSEN = (
    "broadcast", "all_reduce", "reduce", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all",
)  # fmt: skip
SIZES = (4, 64 * KB, MB, 16 * MB)
MEMBERS = (2, 4, 8)


def rounds_of(size: int, members: int) -> tuple[int, int, int]:
    """Rounds that count, and operations of each form in a round: those timed, and those before them."""
    if size <= 4 * KB:
        rounds, repeat, warm_up = 40, 8, 3
    elif size <= 256 * KB:
        rounds, repeat, warm_up = 30, 5, 2
    elif size <= 2 * MB:
        rounds, repeat, warm_up = 20, 3, 1
    else:
        rounds, repeat, warm_up = 8, 1, 1
    return (rounds, repeat, warm_up) if members <= 4 else (max(4, rounds // 2), repeat, warm_up)


def cases_of(run: Run, members: int) -> list[Case]:
    """What is measured among so many members."""
    options, found = run.options, []
    for op in options.ops or CHOSEN:
        for size in options.sizes or SIZES:
            rounds, repeat, warm_up = rounds_of(size, members)
            count = options.rounds or rounds
            found.append(Case("thresholds", op, size, members, (P2P, LANE), count, repeat, warm_up))
    return found


def measure(run: Run) -> Iterator[Figure]:
    """Every case; the table at the end."""
    ratios: dict[Key, float] = {}
    for members in run.options.members or MEMBERS:
        for figure in measured(run, cases_of(run, members), lambda _case, _form: None):
            told = figure.series
            if told["form"] == LANE:
                ratios[told["op"], told["bytes"], told["members"]] = figure.value
            yield figure
    print(f"\n{table_of(ratios)}\n\n{words_of(ratios)}", flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which cases; everything by default."""
    parser.add_argument("--ops", nargs="+", choices=OPS, metavar="OP", help="only these operations")
    parser.add_argument("--sizes", nargs="+", type=parse_size, metavar="SIZE", help="4B, 64KB, 1MB, ...")
    parser.add_argument(
        "--members", nargs="+", type=int, choices=range(2, 65), metavar="N", help="2 to 64; 2, 4 and 8"
    )
    parser.add_argument("--rounds", type=int, help="that count, of each case")


PART = Part(
    name="thresholds",
    title="Thresholds",
    description=(
        "Each collective in a world whose collectives go over the lane (M8D_LANE=1) and in one whose go over "
        "gloo (M8D_LANE=p2p), in the same processes, rounds of the two taking turns; a ratio is lane/gloo. "
        "From the table it is chosen from which size on a collective goes over gloo."
    ),
    measure=measure,
    add_options=add_options,
)
