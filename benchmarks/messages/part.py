"""Messages between two members, beside plain torch.distributed and a plain socket pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.figures.figure import Goal
from benchmarks.figures.sizes import KB, MB, parse_size
from benchmarks.measuring.part import Part, Run
from benchmarks.operations.cases import Case
from benchmarks.operations.session import measured

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from benchmarks.figures.figure import Figure

FORMS = ("stock", "floor", "world", "wire", "with", "with_round", "aio", "communicator")
QUICK = (4, 64 * KB, MB, 4 * MB, 16 * MB)
FULL = (4, KB, 16 * KB, 64 * KB, MB, 4 * MB, 16 * MB, 64 * MB)
ANNOUNCED = MB
"""From here on messages are announced, and read from the sender's memory where that is allowed."""


def goal_of(case: Case, form: str) -> Goal | None:
    """The limit of a form's ratio, where one is set."""
    size = case.size
    match form:
        case "world" if size == 4:
            return Goal(at_most=0.68)
        case "world" if size == 64 * KB:
            return Goal(at_most=0.58)
        case "world:floor" if size in {4, 64 * KB}:
            return Goal(at_most=1.15)
        case "with" if size == 4:
            return Goal(at_most=0.80)
        case "world" if MB <= size <= 16 * MB:
            return Goal(at_most=0.42)
        case "wire" if MB <= size <= 16 * MB:
            return Goal(at_most=0.95)
        case "aio" if size == 4:
            return Goal(at_most=0.90)
        case "aio/p99" if size == 4:
            return Goal(at_most=1.2)
        case "aio" if size >= MB:
            return Goal(at_most=0.48)
    return None


def forms_of(size: int, *, full: bool) -> tuple[str, ...]:
    """What is compared; the quick form leaves out what differs by little."""
    left_out = {"floor"} if size >= ANNOUNCED else {"wire"}
    if not full:
        left_out |= {"with_round"} if size < ANNOUNCED else {"with", "with_round", "communicator"}
    return tuple(form for form in FORMS if form not in left_out)


def rounds_of(size: int, *, full: bool) -> tuple[int, int, int]:
    """Rounds that count, and operations of each form in a round: those timed, and those before them.

    A small message takes what the placement of threads makes of it, and a machine has moods that last for
    tens of milliseconds: rounds of a millisecond let them meet all forms alike. What large messages take
    varies from one to the next: there the number of messages counts.
    """
    if size <= 4 * KB:
        rounds, repeat, warm_up = 120, 10, 4
    elif size <= 256 * KB:
        rounds, repeat, warm_up = 60, 6, 3
    elif size <= 4 * MB:
        rounds, repeat, warm_up = 40, 10 if size <= MB else 5, 2
    else:
        rounds, repeat, warm_up = 30, 3 if size <= 16 * MB else 1, 1
    more = 4 if size <= 256 * KB else 2  # small ones take little time, and spread widely
    return rounds * (more if full else 1), repeat, warm_up


def cases_of(run: Run) -> list[Case]:
    """What is measured."""
    options = run.options
    wanted, found = options.forms or FORMS, []
    for size in options.sizes or run.pick(QUICK, FULL):
        rounds, repeat, warm_up = rounds_of(size, full=run.full)
        forms = [form for form in forms_of(size, full=run.full) if form in wanted and form != "stock"]
        given = ("stock", *forms)
        found.append(Case("messages", "send_recv", size, 2, given, options.rounds or rounds, repeat, warm_up))
    return found


def measure(run: Run) -> Iterator[Figure]:
    """Every size, in the same two processes."""
    yield from measured(run, cases_of(run), goal_of, pin=run.options.pin)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which cases; everything by default."""
    parser.add_argument("--sizes", nargs="+", type=parse_size, metavar="SIZE", help="4B, 64KB, 1MB, ...")
    parser.add_argument("--forms", nargs="+", choices=FORMS, help="only these, and stock")
    parser.add_argument("--rounds", type=int, help="that count, of each case")
    parser.add_argument(
        "--pin",
        action="store_true",
        help="each rank with all its threads on one core: steadier, and not what people run",
    )


PART = Part(
    name="messages",
    title="Messages",
    description=(
        "Half the time of a message to and fro between two members, from 4 B up, in the ways to call it, "
        "beside plain torch.distributed in the same processes, over the same tensors. All forms take turns "
        "in each round, some milliseconds each; a ratio is the median over rounds of ours/stock of the same "
        "round. In stock's turns multiworld's routing is taken out of torch. Up to 64 KB each form begins a "
        "round with the threads of a rank on one core, free to move; but what is awaited is compared with "
        "stock up to 4 KB in long rounds, with threads wherever the system puts them. Columns: "
        "`floor`, a plain Unix socket pair between the two processes, driven by Python's `sendall` and "
        "`recv_into`; `wire`, a world whose members cannot read each other's memory; `stock_long`, stock in "
        "those long rounds; `with`, a block around each call; `with_round`, one around all; `aio/p99`, the "
        "99th percentile over stock's; `world:floor` and such, one form over another."
    ),
    measure=measure,
    add_options=add_options,
)
