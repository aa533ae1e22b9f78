"""Detection: time from the signal that ends or stops a member to the exception elsewhere."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.detection.session import HANG, Fault, Session
from benchmarks.figures.figure import Figure, Goal, distribution, quantile, summary
from benchmarks.measuring.part import Part, Run
from benchmarks.measuring.ranks import Ranks

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

WAYS = ("recv", "aio", "told")
_WORDS = {
    "recv": "a thread blocked in recv",
    "aio": "a task that awaits aio.recv",
    "told": "on_break of an idle process",
}
_THIRD_EVERY = 5
_P50, _P99 = Goal(at_most=3.0), Goal(at_most=20.0)


@dataclass
class Times:
    """What was seen of the faults of one kind with one number of worlds, in ms after the signal.

    Attributes:
        by_way: by the observer's way of noticing.
        floor: when a plain TCP connection of the same victim ended.
        beyond: what the observer took longer than that.
        third: by a third member, which was blocked in a receive from somebody else.
        causes: what the world's break was put down to.
        early: how many breaks came before the signal: the machine stood still, and a healthy member
            looked hung.
    """

    by_way: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    floor: list[float] = field(default_factory=list)
    beyond: list[float] = field(default_factory=list)
    third: list[float] = field(default_factory=list)
    causes: Counter[str] = field(default_factory=Counter)
    early: int = 0

    @property
    def every(self) -> list[float]:
        """All of the observer's."""
        return [each for way in WAYS for each in self.by_way[way]]

    def counts(self, fault: Fault) -> bool:
        """Whether every break came after the signal; takes their causes in then.

        Raises:
            RuntimeError: what came was not a break of the world.
        """
        wrong = {seen["error"] for seen in fault.seen} - {"", "BrokenWorldException"}
        if wrong:
            raise RuntimeError(f"{', '.join(wrong)} came where a member was lost, not BrokenWorldException")
        early = sum(seen["at"] < fault.at for seen in fault.seen)
        self.early += early
        if not early:
            self.causes.update(seen["cause"] for seen in fault.seen)
        return not early

    def remark(self, run: Run, name: str, expected: str) -> None:
        """Say what was not as it should be."""
        wrong = {cause: number for cause, number in self.causes.items() if cause != expected}
        if wrong or self.early:
            run.remark(
                f"detection/{name}: {self.early} breaks before the signal (left out), "
                f"causes other than {expected!r}: {wrong or 'none'}"
            )

    def add(self, way: str, fault: Fault) -> None:
        """Take one fault in.

        Raises:
            RuntimeError: what came was not a break of the world.
        """
        (seen,) = fault.seen
        if not self.counts(fault):
            return
        self.by_way[way].append(1e3 * (seen["at"] - fault.at))
        if fault.ended is not None:
            self.floor.append(1e3 * (fault.ended - fault.at))
            self.beyond.append(1e3 * (seen["at"] - fault.ended))
        if fault.third is not None:
            self.third.append(1e3 * (fault.third["at"] - fault.at))


def measure(run: Run) -> Iterator[Figure]:
    """Faults of victims that are forked for that; the worlds that they are not in stay as they are."""
    counts = run.options.counts or run.pick([1, 100], [1, 30, 100])
    kills = run.options.kills or run.pick(30, 210)
    stops = _given(run.options.stops, run.pick(3, 105))
    whole = _given(run.options.whole, run.pick(4, 20))
    run.progress("starting processes")
    with Ranks("benchmarks.detection.rank:make", count=3) as ranks:
        session = Session(ranks)
        yield from _first(session)
        yield from _at_once(run, session, counts[-1], _given(run.options.at_once, run.pick(1, 5)))
        for count in counts:
            session.steady(count - 1)
            yield from figures(run, "crash", count, _faults(run, session, "kill", count, kills))
            if stops:
                yield from figures(run, "stop", count, _faults(run, session, "stop", count, stops))
        if whole:
            yield from _whole(run, session, whole)


def _given(option: int | None, default: int) -> int:
    return default if option is None else option


def _first(session: Session) -> Iterator[Figure]:
    """The first fault that a process sees; two more, one for each way of receiving, warm it up."""
    fault = session.fault("kill", "recv")
    took = [1e3 * (fault.seen[0]["at"] - fault.at)]
    yield summary(
        "detection", "crash/first", took, "ms", note="the first fault of the observer's life, blocked in recv"
    )
    for way in ("recv", "aio"):
        session.fault("kill", way)


def _faults(run: Run, session: Session, signal: str, count: int, faults: int) -> Times:
    times = Times()
    for number in range(faults):
        run.progress(f"{signal} {number + 1} of {faults}, {count} worlds")
        third = number % _THIRD_EVERY == _THIRD_EVERY - 1
        way = WAYS[number % len(WAYS)]
        times.add(way, session.fault(signal, way, third=third))
    return times


def _at_once(run: Run, session: Session, count: int, faults: int) -> Iterator[Figure]:
    for way in ("recv", "aio"):
        times, floor, first, last = Times(), list[float](), list[float](), list[float]()
        for number in range(faults):
            run.progress(f"a victim in {count} worlds, {way}, {number + 1} of {faults}")
            fault = session.fault("kill", way, worlds=count)
            if not times.counts(fault):
                continue
            first.append(1e3 * (min(each["at"] for each in fault.seen) - fault.at))
            last.append(1e3 * (max(each["at"] for each in fault.seen) - fault.at))
            floor.append(1e3 * ((fault.ended or fault.at) - fault.at))
        times.remark(run, f"crash/at_once/{count}/{way}", "crashed")
        if not first:
            continue
        for which, values in (("first", first), ("last", last)):
            note = f"one kill breaks {count} worlds: the {which} of {count} pending receives raised"
            note += f" ({_WORDS[way]})"
            yield summary("detection", f"crash/at_once/{count}/{way}/{which}", values, "ms", note=note)
        note = "the floor: end of file on a plain TCP connection of the same victims"
        yield summary("detection", f"crash/at_once/{count}/{way}/end_of_file", floor, "ms", note=note)


def _whole(run: Run, session: Session, victims: int) -> Iterator[Figure]:
    """Processes started as such; a forked one leaves to their end whatever it shares with its parent."""
    run.progress(f"starting {victims} victims")
    times = Times()
    with Ranks("benchmarks.detection.rank:make_victim", count=victims) as ranks:
        for number, victim in enumerate(ranks):
            run.progress(f"kill {number + 1} of {victims} whole processes")
            way = WAYS[number % len(WAYS)]
            times.add(way, session.fault("kill", way, fresh=victim))
    times.remark(run, "crash/whole_process", "crashed")
    if not times.every:
        return
    note = "victims that were started, not forked"
    yield _spread("crash/whole_process", times.every, f"{note}: signal to the program's knowing")
    yield _spread(
        "crash/whole_process/floor", times.floor, f"{note}: signal to end of file on a plain TCP connection"
    )
    yield _spread(
        "crash/whole_process/beyond", times.beyond, f"{note}: how much later than that the program knew"
    )


def _spread(name: str, values: Sequence[float], note: str, **more: Any) -> Figure:
    return summary("detection", name, values, "ms", quantiles=distribution(values), note=note, **more)


def figures(run: Run, kind: str, count: int, times: Times) -> Iterator[Figure]:
    """All that one kind of fault gives with one number of worlds.

    Args:
        run: hears what was not as it should be.
        kind: "crash", or "stop", where times count from the moment when `hang_timeout` was over.
        count: of worlds.
        times: what was seen.
    """
    crash = kind == "crash"
    less = 0.0 if crash else 1e3 * HANG
    since = "" if crash else f", beyond the hang_timeout of {HANG:g} s"
    expected = "crashed" if crash else "hung"
    times.remark(run, f"{kind}/{count}", expected)
    every = [each - less for each in times.every]
    if not every:
        return
    spread = distribution(every)
    yield _spread(
        f"{kind}/{count}/p50", every, f"signal to the program's knowing, {count} worlds, all ways{since}",
        goal=_P50 if crash else None, series={"ms": [round(each, 3) for each in sorted(every)]},
    )  # fmt: skip
    yield Figure(
        "detection", f"{kind}/{count}/p99", spread["p99"], "ms", quantile(every, 0.95), spread["max"],
        len(every),
        goal=_P99 if crash else None, note="the same; its spread is from the 95th percentile to the largest",
        quantiles=spread,
    )  # fmt: skip
    for way, values in times.by_way.items():
        if values:
            yield _spread(
                f"{kind}/{count}/{way}", [each - less for each in values], f"signal to {_WORDS[way]}{since}"
            )
    if times.third:
        note = f"a third member, blocked in a receive from somebody else{since}"
        yield _spread(f"{kind}/{count}/third", [each - less for each in times.third], note)
    if times.floor:
        note = "the floor: signal to end of file on a plain TCP connection of the same victims"
        yield _spread(f"{kind}/{count}/floor", times.floor, note)
        yield _spread(f"{kind}/{count}/beyond", times.beyond, "how much later than that the program knew")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--counts",
        type=int,
        nargs="+",
        metavar="N",
        help="worlds of the observer, ascending (default: by form)",
    )
    parser.add_argument("--kills", type=int, help="for each number of worlds (30; 210 with --full)")
    parser.add_argument("--at-once", type=int, help="kills that break as many worlds as there are (1; 5)")
    parser.add_argument("--whole", type=int, help="kills of processes that were started, not forked (4; 20)")
    parser.add_argument("--stops", type=int, help="for each number of worlds (3; 105 with --full)")


PART = Part(
    name="detection",
    title="Detection",
    description="From SIGKILL or SIGSTOP of a member to the exception in another one: blocked in recv, "
    "awaiting aio.recv, or idle with on_break; while it is in 1, 30 and 100 worlds, which go on and are used "
    "after each fault.",
    measure=measure,
    add_options=_options,
)
