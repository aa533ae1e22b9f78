"""Latency and throughput of each operation, beside plain torch.distributed in the same processes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks.figures.figure import Figure, Goal, quantile, ratio, summary
from benchmarks.measuring.part import Part, Run
from benchmarks.measuring.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

KB, MB = 1 << 10, 1 << 20
MAIN = ("send_recv", "all_reduce")
"""The operations with goals: measured at every size, in every form."""
OTHERS = (
    "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier",
)  # fmt: skip
FORMS = ("stock", "pg", "world", "with", "with_round", "aio", "communicator")
"""Stock and the plain group stand together: what is put into torch for the others is taken out once in a round."""
CHUNK = 20
"""Rounds that the ranks do on their own before they tell."""
TAIL_ROUNDS, TAIL_NEEDS = 10, 200
"""Rounds for the 99th percentile, and operations of each form in one."""
WARM_UP_ROUNDS = 2
TIMEOUT = 300.0
"""Seconds that a chunk may take: much more than it does."""
GATHERED = 64 * KB
"""Up to this size all forms begin with the threads of each rank on one core."""
Tail = dict[str, float]
"""What `benchmarks.measuring.timing.told` tells of the operations in a chunk."""
AWAITED = frozenset({"aio", "communicator"})
_COMMUNICATED = frozenset({*MAIN, "broadcast", "reduce", "all_gather", "gather", "scatter"})
_PLAIN = frozenset({*MAIN, "broadcast", "barrier"})
_TAIL = ("send_recv", 4, 2, "aio")
WORDS = {
    "with": "`with w:` around each call",
    "with_round": "`with w:` around all calls",
    "world": "`World`'s method",
    "aio": "`await World.aio`'s",
    "communicator": "`await WorldCommunicator`'s",
    "pg": "the plain ProcessGroup object: a floor, for orientation",
}


@dataclass(frozen=True)
class Case:
    """One operation at one size among so many members.

    Attributes:
        op: "send_recv", or torch.distributed's name of a collective.
        size: bytes that one member has for one other.
        members: of the group and of the world.
        forms: what is compared, "stock" first.
        rounds: that count.
        repeat: operations of each form in a round.
        warm_up: further operations before them.
    """

    op: str
    size: int
    members: int
    forms: tuple[str, ...]
    rounds: int
    repeat: int
    warm_up: int

    @property
    def name(self) -> str:
        """As in "send_recv/4B/2"."""
        return f"{self.op}/{size_name(self.size)}/{self.members}"


def size_name(size: int) -> str:
    """Bytes for people: "4B", "64KB", "16MB"."""
    for unit, step in (("MB", MB), ("KB", KB)):
        if size >= step:
            return f"{size // step}{unit}"
    return f"{size}B"


def parse_size(text: str) -> int:
    """What `size_name` wrote, in bytes.

    Raises:
        argparse.ArgumentTypeError: it is none, or not a multiple of 4.
    """
    number = text.upper().removesuffix("B")
    step = {"K": KB, "M": MB}.get(number[-1:], 1)
    digits = number.rstrip("KM")
    if not digits.isdigit() or int(digits) * step % 4 or not int(digits):
        raise argparse.ArgumentTypeError(f"{text!r}: a size is a multiple of 4 bytes, as in 4B, 64KB or 1MB")
    return int(digits) * step


def goal_of(op: str, size: int, members: int, form: str) -> Goal | None:
    """The limit of ours/stock at the median, where one is set: between two members.

    Four on a small machine wait for a core more than for each other.
    """
    if op not in MAIN or members != 2:
        return None
    match form:
        case "world" if size == 4:
            return Goal(at_most=0.90)
        case "world" if 64 * KB <= size <= 64 * MB:
            return Goal(at_most=1.01)
        case "with" if size in (4, MB):
            return Goal(at_most=1.04 if size == 4 else 1.01)
        case "aio" if op == "send_recv" and size == 4:
            return Goal(at_most=1.8)
        case "aio" if op == "send_recv" and size >= MB:
            return Goal(at_most=1.02)
    return None


def forms_of(op: str, size: int, *, full: bool) -> tuple[str, ...]:
    """What is compared; the quick form leaves out what differs by little, where there is no goal."""
    left_out = set()
    if op not in _COMMUNICATED:
        left_out.add("communicator")
    if op not in _PLAIN:
        left_out.add("pg")
    if not full and (op not in MAIN or size >= MB):
        left_out |= {"with_round", "communicator"}
    if not full and (op not in MAIN or size > MB):
        left_out |= {"with", "pg"}
    return tuple(form for form in FORMS if form not in left_out)


def rounds_of(op: str, size: int, members: int, *, full: bool) -> tuple[int, int, int]:
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
    if full and members == 2:
        rounds *= 2
    elif members > 2:
        rounds //= 2  # they take turns on the cores: each operation takes longer, and says less
    if op not in MAIN:
        return rounds // 4, max(1, repeat // 2), warm_up
    return rounds, repeat, warm_up


def cases_of(run: Run, members: int) -> list[Case]:
    """What is measured among so many members, the operations with goals first."""
    options = run.options
    found = []
    for op in options.ops or [*MAIN, *OTHERS]:
        sizes = options.sizes or _sizes(op, members, full=run.full)
        for size in sizes if op != "barrier" else sizes[:1]:
            rounds, repeat, warm_up = rounds_of(op, size, members, full=run.full)
            wanted = options.forms or FORMS
            forms = [form for form in forms_of(op, size, full=run.full) if form in wanted and form != "stock"]
            found.append(
                Case(op, size, members, ("stock", *forms), options.rounds or rounds, repeat, warm_up)
            )
    return found


def _sizes(op: str, members: int, *, full: bool) -> list[int]:
    if op in MAIN:
        if full and members == 2:
            return [4, KB, 16 * KB, 64 * KB, MB, 4 * MB, 16 * MB, 64 * MB]
        return [4, 64 * KB, MB, 16 * MB]
    return [4, 64 * KB, MB, 16 * MB] if full and members == 2 else [4, MB]


def figures_of(
    case: Case, rounds: dict[str, list[float]], chunks: dict[str, list[Tail]], tails: dict[str, list[Tail]]
) -> Iterator[Figure]:
    """The figures of a case, all in microseconds.

    Args:
        case: what was measured.
        rounds: for each form the median of each round.
        chunks: for each form what is told of each chunk of rounds.
        tails: the same of rounds that are long enough for a 99th percentile, of the forms that have them.
    """
    stock = rounds["stock"]
    told = {"op": case.op, "bytes": case.size, "members": case.members}
    yield summary(
        "latency", f"{case.name}/stock", stock, "us",
        note="torch.distributed, as it is without multiworld",
        quantiles=_quantiles(stock, tails.get("stock", chunks["stock"])),
        series={**told, "form": "stock", "gb_per_s": _throughput(case, stock)},
    )  # fmt: skip
    long = {form: [tail["p50"] for tail in found] for form, found in tails.items()}
    if long:
        yield summary(
            "latency", f"{case.name}/stock_long", long["stock"], "us",
            note="stock in long rounds, as what is awaited is measured",
        )  # fmt: skip
    for form in case.forms[1:]:
        ours, base = rounds[form], stock
        if form in tails:
            # What is awaited learns from one operation for the next ones, as it does in a program.
            ours, base = long[form], long["stock"]
        series = {
            **told, "form": form, "gb_per_s": _throughput(case, ours), "microseconds": _quantiles(ours, tails.get(form, chunks[form]))
        }  # fmt: skip
        yield ratio(
            "latency", f"{case.name}/{form}", ours, base,
            goal=goal_of(case.op, case.size, case.members, form), note=WORDS[form], absolute_unit="us", series=series,
        )  # fmt: skip
        if form in tails:
            late = [tail["p99"] for tail in tails[form]]
            goal = Goal(at_most=3.0) if (case.op, case.size, case.members, form) == _TAIL else None
            yield ratio(
                "latency", f"{case.name}/{form}/p99", late, [tail["p99"] for tail in tails["stock"]],
                goal=goal, note="99th percentile against stock's", absolute_unit="us", series={**told, "form": form},
            )  # fmt: skip
            yield ratio(
                "latency", f"{case.name}/{form}/p99_to_median", late, base,
                note="99th percentile against stock's median", absolute_unit="us", series={**told, "form": form},
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


def measure(run: Run) -> Iterator[Figure]:
    """Every case among two members; in the long form fewer sizes among four as well."""
    for members in run.options.members or run.pick([2], [2, 4]):
        with Ranks(
            "benchmarks.latency.rank:make", members,
            args={"pin": run.options.pin}, env={"GLOO_SOCKET_IFNAME": "lo"},
        ) as ranks:  # fmt: skip
            port = ranks[0].call("serve")
            ranks.call("meet", port=port)
            refused: dict[str, str] = {}
            for case in cases_of(run, members):
                if case.op in refused:
                    continue
                run.progress(f"{case.name.replace('/', ', ')} members")
                why = [
                    each
                    for each in ranks.call("prepare", op=case.op, size=case.size, forms=case.forms)
                    if each
                ]
                if why:
                    refused[case.op] = why[0]
                    run.remark(f"{case.op}: torch.distributed does not do it on gloo: {why[0]}")
                    continue
                yield from _measured(ranks, case)
            ranks.call("leave")


def _measured(ranks: Ranks, case: Case) -> Iterator[Figure]:
    rounds: dict[str, list[float]] = {form: [] for form in case.forms}
    chunks: dict[str, list[Tail]] = {form: [] for form in case.forms}
    for first in (-WARM_UP_ROUNDS, *range(0, case.rounds, CHUNK)):
        count = min(CHUNK, case.rounds - first) if first >= 0 else WARM_UP_ROUNDS
        told = _rounds(ranks, case, case.forms, first, count)
        for form in case.forms if first >= 0 else ():
            # A collective is over when it is over for the slowest.
            rounds[form] += [max(each) for each in zip(*(rank[form]["rounds"] for rank in told), strict=True)]
            chunks[form].append(_slowest(told, form))
    yield from figures_of(case, rounds, chunks, _tails(ranks, case))


def _tails(ranks: Ranks, case: Case) -> dict[str, list[Tail]]:
    """Long rounds of stock and of what is awaited, with threads wherever they happen to be: moving them makes tails."""
    forms = [form for form in case.forms if form == "stock" or form in AWAITED]
    if case.op not in MAIN or case.size > 4 * KB or len(forms) == 1:
        return {}
    tails: dict[str, list[Tail]] = {form: [] for form in forms}
    long = replace(case, repeat=TAIL_NEEDS, warm_up=TAIL_NEEDS // 10)
    for number in range(-1, min(TAIL_ROUNDS, case.rounds)):
        told = _rounds(ranks, long, forms, number, 1, gather=False)
        for form in forms if number >= 0 else ():
            tails[form].append(_slowest(told, form))
    return tails


def _rounds(
    ranks: Ranks, case: Case, forms: Sequence[str], first: int, count: int, *, gather: bool = True
) -> list[Any]:
    told = ranks.call(
        "rounds", forms=forms, first=first, rounds=count, repeat=case.repeat, warm_up=case.warm_up,
        gather=gather and case.size <= GATHERED, timeout=TIMEOUT,
    )  # fmt: skip
    return told[:1] if case.op == "send_recv" else told  # rank 0 times the way to and fro


def _slowest(told: list[Any], form: str) -> Tail:
    slowest: Tail = max((rank[form]["chunk"] for rank in told), key=lambda tail: tail["p50"])
    return slowest


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which cases; everything by default."""
    parser.add_argument(
        "--ops", nargs="+", choices=[*MAIN, *OTHERS], metavar="OP", help="only these operations"
    )
    parser.add_argument("--sizes", nargs="+", type=parse_size, metavar="SIZE", help="4B, 64KB, 1MB, ...")
    parser.add_argument("--forms", nargs="+", choices=FORMS, help="only these, and stock")
    parser.add_argument(
        "--members", nargs="+", type=int, choices=range(2, 9), metavar="N", help="2 to 8; 2 and 4"
    )
    parser.add_argument("--rounds", type=int, help="that count, of each case")
    parser.add_argument(
        "--pin",
        action="store_true",
        help="each rank with all its threads on one core: steadier, and not what people run",
    )


PART = Part(
    name="latency",
    title="Latency and throughput",
    description=(
        "Every operation from 4 B up in the ways to call it, beside plain torch.distributed in the same "
        "processes, "
        "over the same tensors. send_recv is half the time of a message to and fro between ranks 0 and 1; a "
        "collective's time is its slowest member's. Sizes are what one member has for one other. All forms "
        "take turns "
        "in each round, some milliseconds each; a ratio is the median over rounds of ours/stock of the same "
        "round. Up "
        "to 64 KB each form begins a round with the threads of a rank on one core, free to move; but what "
        "is awaited is compared "
        "with stock up to 4 KB in long rounds, with threads wherever the system puts them. In stock's "
        "turns, and "
        "in those of the plain process group, multiworld's routing is taken out of torch. Columns: "
        "`stock_long`, stock in those "
        "long rounds; `pg`, the plain ProcessGroup object; `with`, a block around each call; `with_round`, "
        "one around all; "
        "`aio/p99` and `aio/p99_to_median`, the 99th percentile over stock's and over stock's median."
    ),
    measure=measure,
    add_options=add_options,
)
