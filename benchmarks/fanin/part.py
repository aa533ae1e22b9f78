"""Fan-in: a leader that receives from many, each in a world of its own, beside one group of them all."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from benchmarks.figures.figure import Figure, Goal, quantile, ratio, summary
from benchmarks.figures.sizes import KB, MB, parse_size, size_name
from benchmarks.measuring.part import Part, Run
from benchmarks.measuring.ranks import Ranks
from benchmarks.measuring.rounds import interleaved

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

STOCK = ("stock_irecv", "stock_threads")
OURS = ("irecv", "threads", "aio", "communicator")
LIKE_STOCK = ("irecv", "threads")
"""Of ours, those that do what `STOCK` does: the best is of as many on either side."""
WORDS = {
    "stock_irecv": "torch.distributed, one group: irecv from each, and wait",
    "stock_threads": "torch.distributed, one group: a thread for each that receives",
    "irecv": "one thread: World.irecv from each, and wait",
    "threads": "a thread for each world, World.recv",
    "aio": "a task for each world, await World.aio.recv",
    "communicator": "a task for each world, await WorldCommunicator.recv",
}
ROUND_SECONDS = 0.05
"""What a round is to last, in each form."""
MOST = 4000
"""Messages of each worker in a round."""
FAIR_SIZE = 4 * KB


def jain(counts: Sequence[float]) -> float:
    """Jain's index of fairness: 1 for equal shares, 1/n where one has all (Jain, Chiu, Hawe 1984).

    Raises:
        ValueError: all shares are zero.
    """
    if not any(counts):
        raise ValueError(f"{list(counts)}: fairness of nothing")
    return sum(counts) ** 2 / (len(counts) * sum(each * each for each in counts))


def best(rates: dict[str, list[float]], forms: Sequence[str]) -> str:
    """The form with the highest median."""
    return max(forms, key=lambda form: quantile(rates[form], 0.5))


def goal_of(workers: int, size: int, form: str) -> Goal | None:
    """The limit of a form's throughput over the best of stock's, where one is set: for 16, awaited."""
    if workers != 16 or form != "aio":
        return None
    return Goal(at_least=1.4 if size <= 4 * KB else 2.0)


def fairness_goal_of(workers: int, form: str) -> Goal | None:
    """The limit of Jain's index, where one is set."""
    return Goal(at_least=0.995) if (workers, form) == (16, "aio") else None


def figures_of(workers: int, size: int, rates: dict[str, list[float]]) -> Iterator[Figure]:
    """The figures of one number of workers and one size.

    Args:
        workers: how many the leader receives from.
        size: bytes of a message.
        rates: for each form and round, messages in a second, from all of them together.
    """
    name, many = f"{workers}/{size_name(size)}", size >= 64 * KB
    unit, factor = ("GB/s", size / 1e9) if many else ("1/s", 1.0)
    told = {form: [factor * rate for rate in rounds] for form, rounds in rates.items()}
    common = {"workers": workers, "bytes": size}
    for form in STOCK:
        yield summary(
            "fanin", f"{name}/{form}", told[form], unit,
            note=WORDS[form], series={**common, "form": form, "rates": told[form]},
        )  # fmt: skip
    stock, ours = best(rates, STOCK), best(rates, LIKE_STOCK)
    for form in OURS:
        yield ratio(
            "fanin", f"{name}/{form}", told[form], told[stock], absolute_unit=unit,
            goal=goal_of(workers, size, form),
            note=f"{WORDS[form]}; throughput against {stock}",
            series={**common, "form": form, "rates": told[form]},
        )  # fmt: skip
    yield ratio(
        "fanin", f"{name}/best", told[ours], told[stock], absolute_unit=unit,
        note=f"throughput, best against best: {ours} against {stock}",
        series={**common, "form": "best", "of": ours},
    )  # fmt: skip


def fairness_of(workers: int, size: int, form: str, rounds: list[list[int]]) -> Iterator[Figure]:
    """How evenly the leader received: of each round, Jain's index, and the least over the most."""
    name = f"fairness/{workers}/{size_name(size)}/{form}"
    series = {"workers": workers, "bytes": size, "form": form, "messages": rounds}
    yield summary(
        "fanin", f"{name}/jain", [jain(counts) for counts in rounds], "index",
        goal=fairness_goal_of(workers, form), note=WORDS[form], series=series,
    )  # fmt: skip
    yield summary(
        "fanin", f"{name}/least_to_most", [min(counts) / max(counts) for counts in rounds], "ratio",
        absolute_unit="1/s",  # both sides are messages in the same time: more is better
        note="messages from the worker that got the least in, over those from the one that got the most in",
    )  # fmt: skip


def measure(run: Run) -> Iterator[Figure]:
    """All numbers of workers with the same processes: those who are not asked wait."""
    numbers = run.options.workers or run.pick([1, 4, 16], [1, 4, 16, 32])
    sizes = run.options.sizes or run.pick([4, 4 * KB, MB], [4, 4 * KB, MB, 4 * MB])
    rounds = run.options.rounds or run.pick(8, 16)
    run.progress(f"starting {max(numbers) + 1} processes")
    with (
        tempfile.NamedTemporaryFile(prefix="m8d-fanin-") as flag,
        Ranks(
            "benchmarks.fanin.rank:make", max(numbers) + 1,
            args={"flag": _one_byte(flag.name)}, env={"GLOO_SOCKET_IFNAME": "lo"}, start_timeout=300.0,
        ) as ranks,
    ):  # fmt: skip
        port = ranks[0].call("serve")
        run.progress(f"one group, and {max(numbers)} worlds")
        ranks.call("meet", port=port, timeout=180.0)
        for workers in numbers:
            for size in sizes:
                run.progress(f"{workers} workers, messages of {size_name(size)}")
                more = 2 if goal_of(workers, size, "aio") else 1  # what has a goal is looked at longer
                yield from figures_of(workers, size, _rates(ranks, workers, size, more * rounds))
        workers = 16 if 16 in numbers else max(numbers)
        run.progress(f"fairness among {workers} workers")
        yield from _fairness(ranks, workers, run)
        ranks.call("leave")


def _one_byte(name: str) -> str:
    with open(name, "wb") as file:  # noqa: PTH123  (a name of tempfile's)
        file.write(b"\0")
    return name


def _rates(ranks: Ranks, workers: int, size: int, rounds: int) -> dict[str, list[float]]:
    def one(form: str, messages: int) -> float:
        ranks[0].call("lower_flag")
        for worker in range(1, workers + 1):
            ranks[worker].start("feed", form=form, size=size, messages=messages)
        seconds = ranks[0].call("drain", form=form, workers=workers, size=size, messages=messages)
        for worker in range(1, workers + 1):
            ranks[worker].result()
        return float(workers * messages / seconds)

    def enough(form: str) -> int:
        """Messages of each worker that make a round as long as wanted, in this form."""
        one(form, 4)
        messages = 8
        for _ in range(2):  # the first guess is of a few messages
            rate = one(form, messages)
            messages = max(4, min(MOST, int(ROUND_SECONDS * rate / workers)))
        return messages

    messages = {form: enough(form) for form in (*STOCK, *OURS)}
    return interleaved([*STOCK, *OURS], rounds, lambda form: one(form, messages[form]), warm_up=1)


def _fairness(ranks: Ranks, workers: int, run: Run) -> Iterator[Figure]:
    seconds = run.options.fair or run.pick(0.15, 1.0)

    def one(form: str) -> list[int]:
        ranks[0].call("lower_flag")
        for worker in range(1, workers + 1):
            ranks[worker].start("feed_on", form=form, size=FAIR_SIZE)
        counts = ranks[0].call("drain_for", form=form, workers=workers, size=FAIR_SIZE, seconds=seconds)
        for worker in range(1, workers + 1):
            ranks[worker].result()
        return list(counts)

    for form, rounds in interleaved([*STOCK, *OURS], run.pick(3, 8), one, warm_up=1).items():
        yield from fairness_of(workers, FAIR_SIZE, form, rounds)


def add_options(parser: argparse.ArgumentParser) -> None:
    """How many workers, and what they send."""
    parser.add_argument("--workers", nargs="+", type=int, choices=range(1, 65), metavar="N", help="1 to 64")
    parser.add_argument("--sizes", nargs="+", type=parse_size, metavar="SIZE", help="4B, 4KB, 1MB, ...")
    parser.add_argument("--rounds", type=int, help="that count, of each number and size")
    parser.add_argument("--fair", type=float, metavar="SECONDS", help="of a round that fairness is seen in")


PART = Part(
    name="fanin",
    title="Fan-in",
    description=(
        "A leader receives from 1 to 32 workers, each in a two-member world with it, by threads, by irecv "
        "and wait, and by asyncio, beside one torch.distributed group of the same processes. Rates are of "
        "all messages together, from the moment when all workers are let go; a ratio is ours over the best "
        "stock way, round by round. "
        "Fairness: messages from each worker while all of them send as fast as they can, for a fixed time."
    ),
    measure=measure,
    add_options=add_options,
)
