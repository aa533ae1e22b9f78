"""Comparison with pymultiworld 0.2.3, on the same torch 2.4.0: the same program on both."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figures.figure import Figure, Goal, ratio, summary
from benchmarks.figures.sizes import KB, MB, size_name
from benchmarks.measuring.part import Part, Run
from benchmarks.measuring.ports import held_port
from benchmarks.measuring.ranks import RankError, Ranks
from benchmarks.measuring.rounds import interleaved
from benchmarks.peers.environments import TORCH
from benchmarks.peers.held import held_pair

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from benchmarks.peers.environments import Pair

THEIRS, PLAIN, BLOCKING, COMMUNICATOR, AIO = "pymultiworld", "plain", "world", "communicator", "aio"
OURS = (BLOCKING, COMMUNICATOR, AIO)
FORMS = (THEIRS, PLAIN, *OURS)
WORDS = {
    PLAIN: "torch's plain ProcessGroup object, blocking, in the same processes as ours",
    BLOCKING: "World.send and recv, blocking, which pymultiworld has not",
    COMMUNICATOR: "the same program on WorldManager and WorldCommunicator",
    AIO: "World.aio in the same worlds",
}
WORLD = "bench"


class _Sides:
    """Two processes of each."""

    def __init__(self, held: Pair, stack: contextlib.ExitStack) -> None:
        lo = {"GLOO_SOCKET_IFNAME": "lo"}
        make, args = "benchmarks.peers.rank:make", {"backend": "gloo"}
        # Both packages have the same name: what stands first on the path is taken.
        theirs = Ranks(
            make, 2, python=held.theirs.python, args=args, env={**lo, "PYTHONPATH": str(held.theirs.site)}
        )
        ours = Ranks(make, 2, python=held.ours.python, args=args, env=lo)
        self._theirs, self._ours = stack.enter_context(theirs), stack.enter_context(ours)
        for ranks, folder in ((self._theirs, held.theirs.site), (self._ours, None)):
            for who in ranks.call("who"):
                here = folder is not None and Path(who["package"]).is_relative_to(folder)
                if here != (folder is not None) or who["torch"].partition("+")[0] != TORCH:
                    raise RankError(f"{who}: not what was to be measured")

        self._ours.call("meet", port=self._ours[0].call("serve"))

    def of(self, form: str) -> Ranks:
        """The processes that a form runs in."""
        return self._theirs if form == THEIRS else self._ours

    def call(self, form: str, command: str, **args: int) -> list[Any]:
        """Run a command of `benchmarks.peers.rank` in the world, in that form; return both answers."""
        face = COMMUNICATOR if form == THEIRS else form
        return self.of(form).call(command, world=WORLD, face=face, **args)

    def create(self, form: str, name: str) -> float:
        """Make a world; milliseconds, of the slower member."""
        with held_port() as port:
            return float(max(self.of(form).call("create", world=name, port=port)))


def measure(run: Run) -> Iterator[Figure]:
    """Latency, throughput and creation."""
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(held_pair(run, run.options.torch_python))
        run.progress("starting processes")
        sides = _Sides(held, stack)
        for form in (THEIRS, COMMUNICATOR):
            sides.create(form, WORLD)
        for size in (4, 64 * KB):
            run.progress(f"latency at {size_name(size)}")
            yield from _latency(sides, size, run)
        run.progress("throughput at 4MB")
        yield from _throughput(sides, 4 * MB, run)
        run.progress("creation of worlds")
        yield from _creation(sides, run)


def _latency(sides: _Sides, size: int, run: Run) -> Iterator[Figure]:
    repeat = run.pick(100, 300)

    def one(form: str) -> dict[str, float]:
        return dict(sides.call(form, "round_trips", size=size, repeat=repeat, warm_up=20)[0])

    values = interleaved(FORMS, run.options.rounds or run.pick(10, 30), one)
    name = f"latency/{size_name(size)}"
    theirs = [value["p50"] for value in values[THEIRS]]
    yield summary("peers", f"{name}/{THEIRS}", theirs, "us", note="await communicator.send and recv")
    for form in FORMS[1:]:
        yield ratio(
            "peers", f"{name}/{form}", [value["p50"] for value in values[form]], theirs,
            goal=Goal(at_most=0.09) if form == COMMUNICATOR else None, note="latency over pymultiworld's: "
                f"{WORDS[form]}", absolute_unit="us",
            series={"bytes": size, "form": form},
        )  # fmt: skip


def _throughput(sides: _Sides, size: int, run: Run) -> Iterator[Figure]:
    messages = run.pick(8, 32)

    def one(form: str) -> float:
        # The receiver has them when all are there.
        return float(sides.call(form, "stream", size=size, messages=messages)[1])

    values = interleaved(FORMS, run.options.rounds or run.pick(10, 30), one)
    name = f"throughput/{size_name(size)}"
    yield summary(
        "peers", f"{name}/{THEIRS}", values[THEIRS], "GB/s", note="await communicator.send and recv"
    )
    for form in FORMS[1:]:
        yield ratio(
            "peers", f"{name}/{form}", values[form], values[THEIRS],
            goal=Goal(at_least=3.0) if form == COMMUNICATOR else None, note="throughput over pymultiworld's: "
                f"{WORDS[form]}", absolute_unit="GB/s",
            series={"bytes": size, "form": form},
        )  # fmt: skip


def _creation(sides: _Sides, run: Run) -> Iterator[Figure]:
    made = 0

    def one(form: str) -> float:
        nonlocal made
        made += 1
        return sides.create(form, f"extra{made}")

    values = interleaved((THEIRS, COMMUNICATOR), run.pick(5, 15), one, warm_up=1)
    yield summary(
        "peers", f"create/{THEIRS}", values[THEIRS], "ms", note="await manager.initialize_world, two members"
    )
    yield ratio(
        "peers", f"create/{COMMUNICATOR}", values[COMMUNICATOR], values[THEIRS],
        note="time to make a world over pymultiworld's: the same program", absolute_unit="ms",
    )  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """What to lean on."""
    parser.add_argument(
        "--torch-python", type=Path, metavar="PYTHON",
        help=f"a Python with torch {TORCH} to lean on, instead of an environment made in the cache",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, help="that count, of each measurement")


PART = Part(
    name="peers",
    title="Beside pymultiworld",
    description=(
        "pymultiworld 0.2.3 on the torch 2.4.0 that it is pinned to and patches, and this package beside it "
        "on the "
        "same torch as it is. One program for both, with pymultiworld's names; rounds of the two take "
        "turns, each in "
        "two processes of its own; ratios are over pymultiworld's. Its environment is made in the cache "
        "once; where it cannot be installed, the "
        "part says so and has no figures."
    ),
    measure=measure,
    add_options=add_options,
    torch=TORCH,
)
