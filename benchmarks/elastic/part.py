"""Elastic: time from the kill of a member to the first good operation of the world without it."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.elastic import environments
from benchmarks.elastic.torchrun import WORKERS, lose, torchrun
from benchmarks.figures.figure import Figure, Goal, distribution, quantile, summary
from benchmarks.measuring.part import Part, Run
from benchmarks.measuring.ranks import Ranks
from m8d_build.errors import BuildError
from m8d_build.settings import Settings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

PHASES = ("noticed", "began", "active", "first")
"""Of a survivor: it knows of the loss, its new process has begun (torchrun), its group is there, it has done
its first operation."""

_WORDS = {
    "noticed": "known", "began": "started again", "active": "active",
}  # fmt: skip
_GOALS = {4: Goal(at_most=50.0), 32: Goal(at_most=250.0)}
_NOTES = {
    "4/file/reform": "4 members lose one, the others reform(); store file://",
    "4/tcp/reform": "the same, store tcp://, served by a process that stays",
    "4/file/shrink": 'the same with on_loss="shrink" and wait_active(); store file://',
    "32/file/reform": "32 members lose one, the others reform(); store file://",
    "32/tcp/reform": "the same, store tcp://, served by a process that stays",
    "torchrun/4": "plain torchrun, gloo: 4 workers lose one, all are started again and meet",
    "torchft/4": "torchft 0.2.0, gloo: 4 replicas lose one, until the others' next committed step",
    "torchft/4/heartbeat_1s": "the same, a replica is dead after 1 s without heartbeat (default: 5 s)",
}
_TORCHFT = {"torchft/4": None, "torchft/4/heartbeat_1s": 1000}
_REPEATED = 3
"""Kills of what is beside us."""
_WAITING = {4: 0.3, 32: 1.0}
"""Seconds that the members operate before one of them is killed."""


@dataclass
class Losses:
    """Kills of one kind.

    Attributes:
        took: ms from the kill to the last survivor's first operation.
        phases: ms from the kill until the last survivor was there, by phase.
        retries: how many reforms or operations after the loss came to nothing, and were made again.
    """

    took: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    retries: int = 0

    def add(self, at: float, lines: Sequence[Mapping[str, Any]], size: int | None = None) -> None:
        """Take in one kill.

        Args:
            at: when.
            lines: of each survivor.
            size: that the world has without the lost; None where that is not ours to say.

        Raises:
            RuntimeError: the survivors are not together, or were there before the kill.
        """
        if size is not None and {(line["generation"], line["size"]) for line in lines} != {
            (lines[0]["generation"], size)
        }:
            raise RuntimeError(f"the survivors are not in one generation of {size}: {lines}")
        firsts = [line["times"]["first"] for line in lines]
        if min(firsts) <= at:
            raise RuntimeError(f"the first operation came {at - min(firsts):.3f} s before the kill")
        self.took.append(1e3 * (max(firsts) - at))
        self.retries += sum(line.get("retries", 0) for line in lines)
        for phase in PHASES:
            times = [line["times"][phase] for line in lines if phase in line["times"]]
            if times:
                self.phases[phase].append(1e3 * (max(times) - at))


class Session:
    """The processes: the one that members are forked from, and one that keeps the store for tcp://.

    Args:
        ranks: both.
        folder: where stores of file:// are.
    """

    def __init__(self, ranks: Ranks, folder: str) -> None:
        self._herd, meeting = ranks
        self._tcp = meeting.call("address")
        self._folder = folder
        self._worlds = 0

    def lose(self, members: int, store: str, on_loss: str, number: int) -> tuple[float, list[dict[str, Any]]]:
        """Have a world of new processes lose one; when it was killed, and what the others tell.

        Args:
            members: before it.
            store: "file" or "tcp".
            on_loss: of the join.
            number: of the kill; the lost member is another one each time.
        """
        self._worlds += 1
        name = f"elastic{self._worlds}"
        where = self._tcp if store == "tcp" else f"file://{self._folder}/{name}"
        self._herd.call("gather", timeout=150.0, count=members, world=name, store=where, on_loss=on_loss)
        time.sleep(_WAITING[members])
        told = self._herd.call("lose", timeout=150.0, number=number % members)
        self._herd.call("scatter")
        return told["at"], told["lines"]


def measure(run: Run) -> Iterator[Figure]:
    """Each kind of loss, again and again."""
    kinds = run.options.kinds or [
        kind for kind in _NOTES if run.full or not kind.startswith(("torchrun", "torchft"))
    ]
    ours = [kind for kind in kinds if kind[0].isdigit()]
    if ours:
        yield from _ours(run, ours)
    if "torchrun/4" in kinds:
        yield figure(run, "torchrun/4", _torchrun(run))
    theirs = [kind for kind in kinds if kind in _TORCHFT]
    if theirs:
        yield from _torchft(run, theirs)


def _ours(run: Run, kinds: Sequence[str]) -> Iterator[Figure]:
    run.progress("starting processes")
    with (
        tempfile.TemporaryDirectory(prefix="m8d-elastic-") as folder,
        Ranks("benchmarks.elastic.rank:make", count=2) as ranks,
    ):
        session = Session(ranks, folder)
        for kind in kinds:
            size, store, how = kind.split("/")
            members, found = int(size), Losses()
            rounds = run.options.rounds or (run.pick(5, 20) if members == WORKERS else run.pick(2, 20))
            for number in range(rounds + run.options.warm_up):
                run.progress(f"{kind}, {number + 1} of {rounds + run.options.warm_up}")
                told = session.lose(members, store, "shrink" if how == "shrink" else "break", number)
                if number >= run.options.warm_up:
                    found.add(*told, members - 1)
            yield figure(run, kind, found, goal=_GOALS[members])


def _torchrun(run: Run) -> Losses:
    found, repeated = Losses(), run.options.repeated
    run.progress("torchrun/4, starting")
    with torchrun(restarts=repeated) as started:
        for attempt in range(repeated):
            started.workers(attempt)
            time.sleep(_WAITING[WORKERS])
            run.progress(f"torchrun/4, {attempt + 1} of {repeated}")
            found.add(*lose(started, attempt))
    return found


def _torchft(run: Run, kinds: Sequence[str]) -> Iterator[Figure]:
    settings = Settings.load()
    log = settings.out / "bench-torchft.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    run.progress(f"packages of {environments.PEER}")
    try:
        folder = environments.packages(settings, log=log)
    except BuildError as error:
        run.remark(f"{environments.PEER} cannot be had here: {error}")
        return
    env = {"PYTHONPATH": str(folder), "GLOO_SOCKET_IFNAME": "lo"}
    with Ranks("benchmarks.elastic.torchft_rank:make", count=2, env=env) as (herd, lighthouse):
        for kind in kinds:
            found = Losses()
            for number in range(run.options.repeated):
                run.progress(f"{kind}, {number + 1} of {run.options.repeated}")
                where = lighthouse.call("serve", heartbeat_ms=_TORCHFT[kind])
                herd.call("gather", timeout=150.0, count=WORKERS, lighthouse=where)
                time.sleep(_WAITING[WORKERS])
                told = herd.call("lose", timeout=150.0, number=number % WORKERS)
                herd.call("scatter")
                found.add(told["at"], told["lines"])
            yield figure(run, kind, found)


def figure(run: Run, kind: str, found: Losses, goal: Goal | None = None) -> Figure:
    """The figure of one kind of loss; `series` has the median times at which the last survivor got there."""
    if found.retries:
        run.remark(f"elastic/{kind}: {found.retries} reforms came to nothing and were made again")
    line = {phase: round(quantile(times, 0.5), 3) for phase, times in found.phases.items() if times}
    way = ", ".join(f"{word} after {line[phase]:.0f} ms" for phase, word in _WORDS.items() if phase in line)
    return summary(
        "elastic", kind, found.took, "ms", goal=goal, note=f"{_NOTES[kind]} ({way})",
        quantiles=distribution(found.took),
        series={"timeline": line, "ms": [round(each, 3) for each in found.took]},
    )  # fmt: skip


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kinds", nargs="+", choices=[*_NOTES], metavar="KIND", help=f"of {', '.join(_NOTES)}"
    )
    parser.add_argument("--warm-up", type=int, default=1, help="kills of each kind that are dropped (1)")
    parser.add_argument(
        "--rounds", type=int, help="kills of each kind (default: 5, of 32 members 2; 20 with --full)"
    )
    parser.add_argument(
        "--repeated", type=int, default=_REPEATED, help=f"kills under torchrun and torchft ({_REPEATED})"
    )


PART = Part(
    name="elastic",
    title="Elastic",
    description="From the kill of a member to the last survivor's first all_reduce of 4 bytes in the world "
    "without it. All members are in a loop of all_reduce; each kill has new processes, and another member is "
    "killed each time. Beside it, with --full, the same loss under plain torchrun, which starts all workers "
    "again, and with torchft.",
    measure=measure,
    add_options=_options,
)
