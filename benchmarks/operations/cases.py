"""A case, one operation at one size among so many members, and the figures that are made of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.figures.figure import Figure, Goal, quantile, ratio, summary
from benchmarks.figures.sizes import size_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Tail = dict[str, float]
"""What `benchmarks.measuring.timing.told` tells of the operations in a chunk."""
AWAITED = frozenset({"aio", "communicator"})
WORDS = {
    "stock": "torch.distributed, as it is without multiworld",
    "floor": "the floor: a plain socket pair between the same processes, driven from Python",
    "world": "`World`'s method",
    "wire": "`World`'s method, no member's memory read: through the connection",
    "with": "`with w:` around each call",
    "with_round": "`with w:` around all calls",
    "aio": "`await World.aio`'s",
    "communicator": "`await WorldCommunicator`'s",
    "checked": "`World`'s method with M8D_CHECK=1",
    "lane": "`World`'s method with M8D_LANE=1",
    "p2p": "`World`'s method with M8D_LANE=p2p: collectives are gloo's",
    "memcpy": "the limit: the same bytes copied within a process",
    "mpi": "MPI (mpi4py), between two processes of its own",
}
BESIDE = {
    ("world", "floor"): "`World`'s method against the floor",
    ("wire", "world"): "what not reading memory costs",
    ("checked", "world"): "what M8D_CHECK=1 costs",
    ("world", "mpi"): "`World`'s method against MPI",
    ("world", "memcpy"): "`World`'s method against copying the same bytes",
}
"""Forms that are compared with another one than the first, where both were measured."""


@dataclass(frozen=True)
class Case:
    """One operation at one size among so many members.

    Attributes:
        part: which measures it.
        op: "send_recv", or torch.distributed's name of a collective.
        size: bytes that one member has for one other.
        members: of the group and of the world.
        forms: what is compared; the others with the first.
        rounds: that count.
        repeat: operations of each form in a round.
        warm_up: further operations before them.
        over: where its names begin with what it goes over, "10Gbit/".
    """

    part: str
    op: str
    size: int
    members: int
    forms: tuple[str, ...]
    rounds: int
    repeat: int
    warm_up: int
    over: str = ""

    @property
    def name(self) -> str:
        """As in "send_recv/4B/2"."""
        return f"{self.over}{self.op}/{size_name(self.size)}/{self.members}"

    @property
    def base(self) -> str:
        """What the others are compared with."""
        return self.forms[0]


def figures_of(
    case: Case,
    rounds: dict[str, list[float]],
    chunks: dict[str, list[Tail]],
    tails: dict[str, list[Tail]],
    goal_of: Callable[[Case, str], Goal | None],
) -> Iterator[Figure]:
    """The figures of a case, all in microseconds.

    Args:
        case: what was measured.
        rounds: for each form the median of each round.
        chunks: for each form what is told of each chunk of rounds.
        tails: the same of rounds that are long enough for a 99th percentile, of the forms that have them.
        goal_of: the limit of a form's ratio, where one is set; of "FORM/p99" and of "FORM:OTHER", too.
    """
    stock = rounds[case.base]
    told = {"op": case.op, "bytes": case.size, "members": case.members}
    yield summary(
        case.part, f"{case.name}/{case.base}", stock, "us",
        note=WORDS[case.base],
        quantiles=_quantiles(stock, tails.get(case.base, chunks[case.base])),
        series={**told, "form": case.base, "gb_per_s": _throughput(case, stock)},
    )  # fmt: skip
    long = {form: [tail["p50"] for tail in found] for form, found in tails.items()}
    if long:
        yield summary(
            case.part, f"{case.name}/{case.base}_long", long[case.base], "us",
            note=f"{case.base} in long rounds, as what is awaited is measured",
        )  # fmt: skip
    for form in case.forms[1:]:
        ours, base = rounds[form], stock
        if form in tails:
            # What is awaited learns from one operation for the next ones, as it does in a program.
            ours, base = long[form], long[case.base]
        series = {
            **told, "form": form, "gb_per_s": _throughput(case, ours),
            "microseconds": _quantiles(ours, tails.get(form, chunks[form]))
        }  # fmt: skip
        yield ratio(
            case.part, f"{case.name}/{form}", ours, base,
            goal=goal_of(case, form), note=WORDS[form], absolute_unit="us", series=series,
        )  # fmt: skip
        if form in tails:
            late = [tail["p99"] for tail in tails[form]]
            yield ratio(
                case.part, f"{case.name}/{form}/p99", late, [tail["p99"] for tail in tails[case.base]],
                goal=goal_of(case, f"{form}/p99"), note=f"99th percentile against {case.base}'s",
                absolute_unit="us", series={**told, "form": form},
            )  # fmt: skip
    for (form, other), note in BESIDE.items():
        if form in rounds and other in rounds and other != case.base:
            yield ratio(
                case.part, f"{case.name}/{form}:{other}", rounds[form], rounds[other],
                goal=goal_of(case, f"{form}:{other}"), note=note, absolute_unit="us",
            )  # fmt: skip


def _quantiles(rounds: list[float], chunks: list[Tail]) -> dict[str, float]:
    """Of one operation: the medians over rounds and chunks, and the largest of all."""
    return {
        "p50": quantile(rounds, 0.5),
        "p99": quantile([chunk["p99"] for chunk in chunks], 0.5),
        "max": max(chunk["max"] for chunk in chunks),
    }


def _throughput(case: Case, micro: list[float]) -> list[float]:
    """GB/s (10^9) in each round: what one member has for one other, over the time of the operation."""
    return [] if case.op == "barrier" else [float(f"{case.size / each / 1e3:.4g}") for each in micro]
