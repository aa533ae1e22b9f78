"""Rebuild: time from a world's break to the first good operation of its next generation, four members."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.figures.figure import Figure, Goal, distribution, quantile, summary
from benchmarks.measuring.part import Part, Run
from benchmarks.measuring.ranks import Ranks

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

SEATS = 4
PHASES = ("noticed", "began", "active", "first")
"""Of a member: it knows of the break; its join begins; the next generation is active; its first operation is done."""

_GOAL = Goal(at_most=100.0)
_WAITING = 0.3
"""Seconds that a replacement is in its join before the one whose seat it wants is killed."""
_WAITING_LONG = 10.0
_WORLDS = """
[roles]
member = 4

[worlds.planned]
members = ["member:*"]
timeout = 60
hang_timeout = 30
"""
_NOTES = {
    "floor/join": "four members that are all there join a new world and use it: no break, nothing to clean "
    "up",
    "left/on_break": "one closes and rejoins; the others rejoin() in on_break",
    "left/loop": "one closes and rejoins; the others are blocked in a receive from it, then rejoin()",
    "closed/all": "all close and rejoin",
    "crash/loop": "one is killed, its replacement waits; the others are blocked in a receive, then rejoin()",
    "crash/on_break": "one is killed, its replacement waits; the others rejoin() in on_break",
    "crash/join_all": "one is killed, its replacement waits in join_all; the others wait_active()",
    "crash/long_wait": f"as crash/loop, but the replacement has waited for {_WAITING_LONG:g} s",
}


@dataclass
class Rebuilds:
    """Rounds of one kind.

    Attributes:
        took: ms from the break to the last member's first operation.
        phases: ms from the break until the last member was there, by phase.
        retries: how many joins came to nothing, and were made again.
    """

    took: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    retries: int = 0

    def add(self, at: float, lines: Sequence[dict[str, Any]]) -> None:
        """Take in one round.

        Args:
            at: when the world was broken.
            lines: of each member.

        Raises:
            RuntimeError: the members are not all in one generation, or were there before the break.
        """
        if len({line["generation"] for line in lines}) != 1:
            raise RuntimeError(f"members of different generations: {lines}")
        firsts = [line["times"]["first"] for line in lines]
        if min(firsts) <= at:
            raise RuntimeError(f"the first operation came {at - min(firsts):.3f} s before the break")
        self.took.append(1e3 * (max(firsts) - at))
        self.retries += sum(line["retries"] for line in lines)
        for phase in PHASES:
            times = [line["times"][phase] for line in lines if phase in line["times"]]
            self.phases[phase].append(1e3 * (max(times) - at))


class Session:
    """The processes: four members, and the zygote of the last seat. The last member keeps the store.

    Args:
        ranks: all of them.
        warm_up: rounds of each kind that are dropped.
    """

    def __init__(self, ranks: Ranks, warm_up: int = 2) -> None:
        self.warm_up = warm_up
        self.members = [ranks[seat] for seat in range(SEATS)]
        self.zygote = ranks[SEATS]
        self.meeting = self.members[-1]
        store = self.meeting.call("address")
        for rank in (*self.members, self.zygote):
            rank.call("meet", store=store)
        self._worlds = 0

    def every(self, name: str, seats: int = SEATS, **args: Any) -> list[Any]:
        """A command in the first so many members at once."""
        for rank in self.members[:seats]:
            rank.start(name, **args)
        return [rank.result(90.0) for rank in self.members[:seats]]

    def fresh(self) -> str:
        """A name that no world had yet."""
        self._worlds += 1
        return f"rebuild{self._worlds}"

    def joins(self, rounds: int) -> list[float]:
        """New worlds, ms from the first member's call to the last one's first operation."""
        took = []
        for _ in range(rounds + self.warm_up):
            lines = self.every("join", world=self.fresh())
            took.append(1e3 * (max(each["first"] for each in lines) - min(each["began"] for each in lines)))
            self.every("close")
        return took[self.warm_up :]

    def left(self, how: str, rounds: int) -> Rebuilds:
        """The last seat closes and rejoins."""
        found = Rebuilds()
        self.every("join", world=self.fresh())
        for number in range(rounds + self.warm_up):
            self.every("arm", SEATS - 1, how=how)
            leaver = self.members[-1].call("leave")
            lines = [leaver, *self.every("rebuilt", SEATS - 1)]
            if number >= self.warm_up:
                found.add(leaver["times"]["at"], lines)
        self.every("close")
        return found

    def closed(self, rounds: int) -> Rebuilds:
        """All close and rejoin."""
        found = Rebuilds()
        self.every("join", world=self.fresh())
        for number in range(rounds + self.warm_up):
            lines = self.every("leave")
            if number >= self.warm_up:
                found.add(min(line["times"]["at"] for line in lines), lines)
        self.every("close")
        return found

    def crashed(self, how: str, rounds: int, waiting: float, progress: Callable[[int], None]) -> Rebuilds:
        """The last seat is killed while its replacement waits; which is the next to be killed."""
        found, name = Rebuilds(), self.fresh()
        control = self.meeting.call("launch", worlds=_WORLDS) if how == "join_all" else ""
        joining = {"control": control} if control else {"world": name}
        for rank in self.members[:-1]:
            rank.start("join_planned" if control else "join", **joining)
        seated = self.zygote.call("replacement", world=name, control=control, attempt=0)
        for rank in self.members[:-1]:
            rank.result()
        self.zygote.call("told", pid=seated)
        for number in range(rounds + self.warm_up):
            progress(number)
            waits = self.zygote.call("replacement", world=name, control=control, attempt=number + 1)
            self.every("arm", SEATS - 1, how=how)
            time.sleep(waiting if number >= self.warm_up else _WAITING)
            at = self.zygote.call("kill", pid=seated)
            lines = [*self.every("rebuilt", SEATS - 1), self.zygote.call("told", pid=waits, timeout=90.0)]
            if number >= self.warm_up:
                found.add(at, lines)
            seated = waits
        self.every("close", SEATS - 1)
        self.zygote.call("kill", pid=seated)
        return found


def measure(run: Run) -> Iterator[Figure]:
    """Each kind of break, again and again."""
    rounds, kinds = run.options.rounds or run.pick(10, 50), run.options.kinds or [*_NOTES]
    run.progress("starting processes")
    with Ranks("benchmarks.rebuild.rank:make", count=SEATS + 1) as ranks:
        session = Session(ranks, run.options.warm_up)

        def crashed(kind: str, how: str, times: int = rounds, waiting: float = _WAITING) -> Figure:
            def progress(number: int) -> None:
                run.progress(f"{kind}, {number + 1} of {times + session.warm_up}")

            return figure(run, kind, session.crashed(how, times, waiting, progress), goal=_GOAL)

        if "floor/join" in kinds:
            joined, note = session.joins(rounds), _NOTES["floor/join"]
            yield summary("rebuild", "floor/join", joined, "ms", quantiles=distribution(joined), note=note)
        for kind in kinds:
            run.progress(kind)
            what, _, how = kind.partition("/")
            if what == "left":
                yield figure(run, kind, session.left(how, rounds))
            elif what == "closed":
                yield figure(run, kind, session.closed(rounds))
            elif kind == "crash/long_wait":
                if run.full:
                    yield crashed(kind, "loop", 10, _WAITING_LONG)
            elif what == "crash":
                yield crashed(kind, how)
        session.meeting.call("hang_up")


def figure(run: Run, kind: str, found: Rebuilds, goal: Goal | None = None) -> Figure:
    """What one kind of break gave; `series` has the time line: the median, over rounds, of when the last member was there."""
    if found.retries:
        run.remark(f"rebuild/{kind}: {found.retries} joins came to nothing and were made again")
    line = {phase: round(quantile(times, 0.5), 3) for phase, times in found.phases.items()}
    way = f"known after {line['noticed']:.0f} ms, joining after {line['began']:.0f}, active after {line['active']:.0f}"
    return summary(
        "rebuild", kind, found.took, "ms", goal=goal, note=f"{_NOTES[kind]} ({way})", quantiles=distribution(found.took),
        series={"timeline": line, "ms": [round(each, 3) for each in found.took]},
    )  # fmt: skip


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kinds", nargs="+", choices=[*_NOTES], metavar="KIND", help=f"of {', '.join(_NOTES)}"
    )
    parser.add_argument("--warm-up", type=int, default=2, help="rounds of each kind that are dropped (2)")
    parser.add_argument("--rounds", type=int, help="of each kind (default: 10; 50 with --full)")


PART = Part(
    name="rebuild",
    title="Rebuild",
    description="From the break of a four-member world to the last member's first all_reduce in the next generation: "
    "one is killed while its replacement waits in its join, one leaves and comes back, all close and come back.",
    measure=measure,
    add_options=_options,
)
