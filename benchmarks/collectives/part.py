"""Collectives among two and four members, beside plain torch.distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.figures.figure import Goal
from benchmarks.figures.sizes import KB, MB, parse_size
from benchmarks.measuring.part import Part, Run
from benchmarks.operations.cases import Case
from benchmarks.operations.names import CHECKED, COMMUNICATED
from benchmarks.operations.session import measured

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from benchmarks.figures.figure import Figure

SMALL = ("barrier", "all_reduce", "broadcast")
"""With goals up to 64 KB."""
LARGE = ("all_reduce", "all_gather")
"""With goals from 4 MB on."""
OTHERS = (
    "reduce", "gather", "scatter", "reduce_scatter", "all_to_all", "all_gather_into_tensor",
    "reduce_scatter_tensor", "all_to_all_single",
)  # fmt: skip
OPS = ("barrier", "all_reduce", "broadcast", "all_gather", *OTHERS)
FORMS = ("stock", "world", "with", "aio", "communicator", "checked")
QUICK = {op: (4, 64 * KB, *((4 * MB,) if op in LARGE else ())) for op in {*SMALL, *LARGE}}
FULL = {op: (4, 64 * KB, MB, *((4 * MB, 16 * MB, 64 * MB) if op in LARGE else ())) for op in {*SMALL, *LARGE}}


def goal_of(case: Case, form: str) -> Goal | None:
    """The limit of a form's ratio, where one is set."""
    if case.op in SMALL and case.size <= 64 * KB and form in {"world", "with"}:
        return Goal(at_most=0.40)
    if case.op in LARGE and case.size >= 4 * MB and form == "world":
        return Goal(at_most=0.60)
    return None


def forms_of(op: str, size: int, members: int, *, full: bool) -> tuple[str, ...]:
    """What is compared."""
    left_out = set()
    if op not in COMMUNICATED or not full or size > 4 * KB:
        left_out.add("communicator")
    if size > MB:
        left_out |= {"with", "aio"}
    if op not in SMALL:
        left_out.add("with")
    if (op, members) != ("all_reduce", 2) or size not in {4, MB}:
        left_out.add(CHECKED)
    return tuple(form for form in FORMS if form not in left_out)


def rounds_of(op: str, size: int, members: int, *, full: bool) -> tuple[int, int, int]:
    """Rounds that count, and operations of each form in a round: those timed, and those before them."""
    if size <= 4 * KB:
        rounds, repeat, warm_up = 60, 10, 4
    elif size <= 256 * KB:
        rounds, repeat, warm_up = 40, 6, 3
    elif size <= MB:
        rounds, repeat, warm_up = 30, 4, 1
    elif size <= 4 * MB:
        rounds, repeat, warm_up = 24, 3, 1
    else:
        rounds, repeat, warm_up = 16 if size <= 16 * MB else 10, 1, 1
    if full and op in SMALL and size <= 64 * KB:
        rounds *= 3  # where the goals are tight
    if op in OTHERS:
        rounds, repeat = rounds // 2, max(1, repeat // 2)
    # Members on fewer cores take turns: each operation takes longer, and says less.
    return rounds, repeat if members == 2 else max(1, repeat // 2), warm_up


def sizes_of(op: str, *, full: bool) -> Sequence[int]:
    """Sizes of an operation; a barrier has none, and stands at the smallest."""
    if op == "barrier":
        return (4,)
    return (FULL if full else QUICK).get(op, (4, 64 * KB, MB) if full else (4,))


def cases_of(run: Run, members: int) -> list[Case]:
    """What is measured among so many members, the operations with goals first."""
    options, found = run.options, []
    wanted = options.forms or FORMS
    # The quick form shows among two members that all of them work.
    ops = OPS if run.full or members == 2 else tuple(op for op in OPS if op not in OTHERS)
    for op in options.ops or ops:
        sizes = options.sizes or sizes_of(op, full=run.full)
        for size in sizes if op != "barrier" else sizes[:1]:
            rounds, repeat, warm_up = rounds_of(op, size, members, full=run.full)
            forms = [each for each in forms_of(op, size, members, full=run.full) if each in wanted]
            given = ("stock", *(form for form in forms if form != "stock"))
            count = options.rounds or rounds
            found.append(Case("collectives", op, size, members, given, count, repeat, warm_up))
    return found


def measure(run: Run) -> Iterator[Figure]:
    """Every case among two members, then among four."""
    for members in run.options.members or [2, 4]:
        yield from measured(run, cases_of(run, members), goal_of, pin=run.options.pin)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which cases; everything by default."""
    parser.add_argument("--ops", nargs="+", choices=OPS, metavar="OP", help="only these operations")
    parser.add_argument("--sizes", nargs="+", type=parse_size, metavar="SIZE", help="4B, 64KB, 1MB, ...")
    parser.add_argument("--forms", nargs="+", choices=FORMS, help="only these, and stock")
    parser.add_argument(
        "--members", nargs="+", type=int, choices=range(2, 9), metavar="N", help="2 to 8; 2 and 4"
    )
    parser.add_argument("--rounds", type=int, help="that count, of each case")
    parser.add_argument("--pin", action="store_true", help="each rank with all its threads on one core")


PART = Part(
    name="collectives",
    title="Collectives",
    description=(
        "Every collective from 4 B up among two and four members of one host, in the ways to call it, beside "
        "plain torch.distributed in the same processes, over the same tensors. A collective's time is its "
        "slowest member's; sizes are what one member has for one other. All forms take turns in each round; "
        "a ratio is the median over rounds of ours/stock of the same round. In stock's turns multiworld's "
        "routing is taken out of torch. Columns: `with`, a block around each call; `checked`, a world with "
        "M8D_CHECK=1, and `checked:world` what that costs."
    ),
    measure=measure,
    add_options=add_options,
)
