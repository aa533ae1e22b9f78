"""Messages and small sums between two hosts: two network namespaces with a cable between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.figures.figure import Goal
from benchmarks.figures.sizes import KB, MB, parse_size
from benchmarks.hosts.network import DEVICE, Cable
from benchmarks.measuring.part import Part, Run
from benchmarks.operations.cases import Case
from benchmarks.operations.session import Place, measured

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from benchmarks.figures.figure import Figure

RATES = {"cable": "", "10Gbit": "10gbit", "1Gbit": "1gbit"}
"""By name in figures, as tc(8) writes them."""
QUICK = (4, 64 * KB, 4 * MB)
FULL = (4, 64 * KB, 256 * KB, MB, 4 * MB, 16 * MB)
SUMS = (4, 64 * KB, 256 * KB)
"""Sizes of `all_reduce`: beyond 256 KiB gloo carries it between hosts."""
FORMS = ("stock", "world", "aio")


def goal_of(_: Case, form: str) -> Goal | None:
    """At least as fast as stock."""
    return Goal(at_most=1.0) if form == "world" else None


def cases_of(run: Run, rate: str) -> list[Case]:
    """What is measured over the cable of that name."""
    options = run.options
    sizes = options.sizes or run.pick(QUICK, FULL)
    found = []
    for op, each in (("send_recv", sizes), ("all_reduce", [size for size in SUMS if size in sizes])):
        for size in each:
            small = size <= 256 * KB
            rounds = options.rounds or run.pick(20, 60) // (1 if small else 2)
            found.append(
                Case("hosts", op, size, 2, FORMS, rounds, 10 if small else 2, 3 if small else 1, f"{rate}/")
            )
    return found


def measure(run: Run) -> Iterator[Figure]:
    """Each cable, with processes of its own.

    Raises:
        Unavailable: no namespaces are to be had.
    """
    for name in run.options.rates or RATES:
        with Cable(RATES[name]) as cable:
            place = Place(DEVICE, cable.address(0), tuple(cable.hosts))
            yield from measured(run, cases_of(run, name), goal_of, place=place)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which cases; everything by default."""
    parser.add_argument("--rates", nargs="+", choices=tuple(RATES), help="only these cables")
    parser.add_argument("--sizes", nargs="+", type=parse_size, metavar="SIZE", help="4B, 64KB, 1MB, ...")
    parser.add_argument("--rounds", type=int, help="that count, of each case")


PART = Part(
    name="hosts",
    title="Between hosts",
    description=(
        "Two members in two network namespaces with a cable (veth) between them, as it is and with its rate "
        "bounded (`tc tbf`, each direction): half the time of a message to and fro, and the time of an "
        "`all_reduce`, beside plain torch.distributed in the same processes. No member's memory is read, "
        "though the kernel would allow it here. Needs root, ip(8) and tc(8)."
    ),
    measure=measure,
    add_options=add_options,
)
