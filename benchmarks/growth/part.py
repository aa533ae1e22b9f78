"""Growth: what advances cost, and how long members are held while others come, leave, or are replaced."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.figures.figure import TAIL, Figure, Goal, distribution, quantile, ratio, summary
from benchmarks.figures.sizes import MB
from benchmarks.measuring.part import Part, Run
from benchmarks.measuring.ranks import Ranks

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

MEMBERS = 3
"""Those that stay, of a world that grows; a world with a loss has one more."""
STATE = 100 * MB
KINDS = ("advance/idle", "grow", "replace/100MB", "step/ddp")

_REPEAT = 20_000
_WAITING = 0.5
"""Seconds that a process waits to join before the member is killed whose place it takes."""
_IDLE, _HELD, _REPLACED = Goal(at_most=2.0), Goal(at_most=10.0), Goal(at_most=300.0)
_STEP = Goal(at_most=1.02)
_CHUNK, _STEPS = 10, 20


@dataclass
class Changes:
    """Changes of one kind: of each the longest time of any member that stayed, in ms.

    Attributes:
        held: in one `advance`, since the change before.
        step: of one whole step, and of the first operation after the change.
    """

    held: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)

    def add(self, lines: Sequence[Mapping[str, Any]], size: int) -> None:
        """Take in what each member told.

        Raises:
            RuntimeError: the world has not that size afterwards.
        """
        if {line["size"] for line in lines} != {size}:
            raise RuntimeError(f"a world of {size} was to come: {lines}")
        self.held.append(1e3 * max(line["held"] for line in lines))
        self.step.append(1e3 * max(line["longest"] for line in lines))


def replaced(told: Mapping[str, Any], size: int) -> tuple[float, float]:
    """Ms from a kill until all members, the new one too, have done an operation; and until all know of it.

    Raises:
        RuntimeError: the world has not its full size, or the new member not the state.
    """
    lines = told["lines"]
    if {(line["size"], line["whole"]) for line in lines} != {(size, True)}:
        raise RuntimeError(f"not a world of {size} members with the state: {lines}")
    noticed = max(line["noticed"] for line in lines if "noticed" in line)
    return 1e3 * (max(line["first"] for line in lines) - told["at"]), 1e3 * (noticed - told["at"])


def measure(run: Run) -> Iterator[Figure]:
    """Each kind of change, again and again."""
    kinds = run.options.kinds or KINDS
    if {*kinds} - {"step/ddp"}:
        run.progress("starting processes")
        with Ranks("benchmarks.growth.rank:make", count=2) as (herd, meeting):
            herd.call("meet", store=meeting.call("address"))
            if "advance/idle" in kinds:
                yield _idle(run, herd)
            if "grow" in kinds:
                yield from _grown(run, herd)
            if "replace/100MB" in kinds:
                yield _replaced(run, herd)
    if "step/ddp" in kinds:
        yield _trained(run)


def _idle(run: Run, herd: Any) -> Figure:
    run.progress("advance/idle")
    found = [herd.call("idle", world=f"idle{each}", repeat=_REPEAT) for each in range(run.pick(3, 9))]
    return summary(
        "growth", "advance/idle", found, "us", goal=_IDLE, note="`World.advance` where nothing is due"
    )


def _grown(run: Run, herd: Any) -> Iterator[Figure]:
    rounds = run.options.rounds or run.pick(5, 100)
    grown, left = Changes(), Changes()
    herd.call("gather", world="grow", count=MEMBERS)
    for number in range(rounds + run.options.warm_up):
        run.progress(f"grow, {number + 1} of {rounds + run.options.warm_up}")
        came, went = herd.call("visit", timeout=150.0, world="grow", number=number)
        if number >= run.options.warm_up:
            grown.add(came, MEMBERS + 1)
            left.add(went, MEMBERS)
    herd.call("scatter")
    yield held("grow/held", grown, "a fourth member comes: the longest `advance` of the three")
    yield held("leave/held", left, "it leaves again: the same")


def held(name: str, found: Changes, note: str) -> Figure:
    """The 99th percentile of the longest advances, which has the goal; whole steps beside it."""
    spread, step = distribution(found.held), distribution(found.step)
    few = f"; fewer than {TAIL} changes cannot show it for certain" if len(found.held) < TAIL else ""
    return Figure(
        "growth", name, spread["p99"], "ms", quantile(found.held, 0.95), spread["max"], len(found.held),
        goal=_HELD,
        note=f"{note}; p99, its spread is from the 95th percentile to the largest (the longest step: "
        f"median {step['p50']:.1f} ms, p99 {step['p99']:.1f}){few}",
        quantiles=spread,
        series={
            "held": [round(each, 3) for each in found.held],
            "step": [round(each, 3) for each in found.step],
        },
    )  # fmt: skip


def _replaced(run: Run, herd: Any) -> Figure:
    rounds, took, noticed = run.options.rounds or run.pick(3, 20), [], []
    for number in range(rounds + run.options.warm_up):
        run.progress(f"replace/100MB, {number + 1} of {rounds + run.options.warm_up}")
        herd.call("stand", timeout=150.0, world=f"replace{number}", count=MEMBERS + 1, size=STATE)
        time.sleep(_WAITING)
        told = herd.call("replace", timeout=150.0, number=number % (MEMBERS + 1))
        herd.call("scatter")
        if number >= run.options.warm_up:
            one, known = replaced(told, MEMBERS + 1)
            took.append(one)
            noticed.append(known)
    return summary(
        "growth", "replace/100MB", took, "ms", goal=_REPLACED,
        note="4 members with 100 MB of state lose one, a loaded process waits in its join: kill to the last "
        f"one's operation among 4 again (known after {quantile(noticed, 0.5):.0f} ms)",
        quantiles=distribution(took), series={"ms": [round(each, 3) for each in took]},
    )  # fmt: skip


def _trained(run: Run) -> Figure:
    rounds = run.options.rounds or run.pick(30, 200)
    ours: list[float] = []
    stock: list[float] = []
    with Ranks("benchmarks.growth.training_rank:make", count=2, env={"GLOO_SOCKET_IFNAME": "lo"}) as ranks:
        port = ranks[0].call("serve")
        ranks.call("meet", timeout=120.0, port=port)
        for first in (-2, *range(0, rounds, _CHUNK)):
            run.progress(f"step/ddp, {max(first, 0)} of {rounds}")
            count = 2 if first < 0 else min(_CHUNK, rounds - first)
            told = ranks.call("rounds", timeout=150.0, first=first, rounds=count, repeat=_STEPS)
            if first >= 0:
                stock += [max(each) for each in zip(*(line["stock"] for line in told), strict=True)]
                ours += [max(each) for each in zip(*(line["elastic"] for line in told), strict=True)]
    return ratio(
        "growth", "step/ddp", ours, stock, goal=_STEP, absolute_unit="ms",
        note="a training step of two members, 263,000 parameters: DDP with `World.elastic_group`, and "
        "`advance`; beside it DDP on torch's own group",
    )  # fmt: skip


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=KINDS, metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--warm-up", type=int, default=1, help="changes of each kind that are dropped (1)")
    parser.add_argument("--rounds", type=int, help="of each kind (default: a few; 20 to 200 with --full)")


PART = Part(
    name="growth",
    title="Growth",
    description="Three members make steps of an all_reduce, 2 ms of work and an `advance`; a fourth joins, "
    "and leaves soon after. Four members with 100 MB of state lose one while another process waits to join. "
    "What an `advance` costs where nothing is due, and a training step in an elastic world beside plain DDP.",
    measure=measure,
    add_options=_options,
)
