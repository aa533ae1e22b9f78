"""Chaos: what is left of a world's steps while something happens to it every two seconds."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from statistics import harmonic_mean
from typing import TYPE_CHECKING, Any, TypeAlias

from benchmarks.figures.figure import Figure, Goal, distribution, ratio, summary
from benchmarks.measuring.part import Part, Run
from benchmarks.measuring.ranks import Ranks
from benchmarks.secure.certificates import certificates

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

MEMBERS = 6
"""Of a calm world: as many as there are on average while things happen. Fewer members make more steps."""
_CALM, _WILD = 20.0, 300.0
"""Seconds of the phases, in turns."""
_PATIENCE = 150.0
_STEPS, _NONE = Goal(at_least=0.95), Goal(at_most=0.0)
_DESCRIPTORS = Goal(at_most=32.0)


Track: TypeAlias = "Sequence[tuple[float, int, int]]"
"""Times, in seconds, each with the generation that a member was in, and the steps that it had made."""


def way(track: Track) -> list[tuple[float, int]]:
    """Times, in order, each with the steps that the world had made by then.

    What a member tells that was stopped, and does not know yet that the others have gone on, is left out.

    Raises:
        RuntimeError: the number goes back by more than members are apart: the world began anew.
    """
    newest = most = 0
    found = list[tuple[float, int]]()
    for at, generation, steps in sorted(track):
        if generation < newest:
            continue
        if steps < most - 2:
            raise RuntimeError(
                f"after {most} steps, in generation {newest}, there were {steps} in {generation}"
            )
        newest, most = generation, max(most, steps)
        found.append((at, most))
    return found


def rate(track: Track) -> float:
    """Steps a second of a world."""
    steps = way(track)
    (began, first), (ended, last) = steps[0], steps[-1]
    return (last - first) / (ended - began)


def standstill(track: Track) -> float:
    """The longest time for which the number of steps did not rise; seconds."""
    steps = way(track)
    longest, (since, most) = 0.0, steps[0]
    for at, made in steps:
        if made > most:
            longest, since, most = max(longest, at - since), at, made
    return longest


@dataclass
class Told:
    """What the members told, by phase.

    Attributes:
        calm, wild: steps a second.
        sizes: of the world in wild phases, as members have told them.
        still: ms of the longest standstill of each wild phase.
        reformed: ms of each reform of each member.
        broken: worlds that broke though nothing was done to their members.
        held: descriptors after each wild phase: how many more a member has than when it had joined, at most.
    """

    calm: list[float] = field(default_factory=list)
    wild: list[float] = field(default_factory=list)
    still: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    reformed: list[float] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    held: list[float] = field(default_factory=list)


def measure(run: Run) -> Iterator[Figure]:
    """Calm and wild phases in turns."""
    options, told, faults = run.options, Told(), Counter[str]()
    left = max(1, int((options.seconds or run.pick(120.0, 1800.0)) / options.every))  # faults
    at_once = max(1, int(_WILD / options.every))
    run.progress("starting processes")
    with contextlib.ExitStack() as stack:
        env = stack.enter_context(certificates()) if options.secure else None
        (crowd,) = stack.enter_context(Ranks("benchmarks.chaos.crowd:make", count=1, env=env))
        crowd.call(
            "begin", timeout=_PATIENCE, members=MEMBERS, hang_timeout=options.hang_timeout, seed=options.seed
        )
        while left > 0:
            run.progress(f"calm; {sum(faults.values())} faults so far, {left} to go")
            _heard(crowd, min(_CALM, left * options.every), told, told.calm)
            for _ in range(min(at_once, left)):
                faults[crowd.call("fault", timeout=_PATIENCE)] += 1
                crowd.call("wait", seconds=options.every)
            left -= min(at_once, left)
            track, sizes = _heard(crowd, 0.0, told, told.wild)
            told.still.append(1e3 * standstill(track))
            told.sizes += sizes
            crowd.call("settle", timeout=_PATIENCE, members=MEMBERS)
            told.held.append(float(_reports(crowd, told)["more_descriptors"]))
        crowd.call("end", timeout=_PATIENCE)
    for each in told.broken:
        run.remark(f"chaos: a world broke though nothing was done to its members: {each}")
    yield from figures(told, faults, options)


def _heard(crowd: Any, seconds: float, told: Told, rates: list[float]) -> tuple[Track, list[float]]:
    """Hear the members for so long, take in what they told; the way of the steps, and the world's sizes."""
    crowd.call("wait", timeout=_PATIENCE, seconds=seconds)
    found = _reports(crowd, told)
    track: Track = [(at, generation, steps) for at, generation, steps in found["track"]]
    rates.append(rate(track))
    return track, found["sizes"]


def _reports(crowd: Any, told: Told) -> dict[str, Any]:
    """What was told since the last call; reforms and breaks count in every phase, as members settle too."""
    found: dict[str, Any] = crowd.call("reports")
    told.reformed += [1e3 * each for each in found["reformed"]]
    told.broken += found["broken"]
    return found


def figures(told: Told, faults: Counter[str], options: argparse.Namespace) -> Iterator[Figure]:
    """What came of it."""
    what = ", ".join(f"{count} {name}" for name, count in sorted(faults.items()))
    # Each member tells the size at the same intervals: a world of n tells it n times as often.
    members = harmonic_mean(told.sizes)
    yield ratio(
        "chaos", "steps", told.wild, told.calm, goal=_STEPS, absolute_unit="1/s",
        note=f"steps a second while something happens every {options.every:g} s ({what}), of "
        f"{members:.1f} members on average, beside calm phases of {MEMBERS}; "
        f"hang_timeout {options.hang_timeout:g} s{', secure mode' if options.secure else ''}",
        series={"wild": _short(told.wild), "calm": _short(told.calm), "faults": dict(faults)},
    )  # fmt: skip
    yield summary(
        "chaos", "standstill", told.still, "ms", quantiles=distribution(told.still),
        note="the longest time without a step, of each wild phase",
    )  # fmt: skip
    yield summary(
        "chaos", "reform", told.reformed, "ms", quantiles=distribution(told.reformed),
        note="a member's `reform`, until the next generation is active and has its state",
    )  # fmt: skip
    count = float(len(told.broken))
    yield Figure(
        "chaos", "healthy/broken", count, "worlds", count, count, 1, goal=_NONE,
        note="worlds of two that broke though nothing was done to their members",
    )  # fmt: skip
    yield summary(
        "chaos", "descriptors", told.held, "more", goal=_DESCRIPTORS, series={"held": told.held},
        note="after a wild phase: how many more a member has than when it had joined, at most",
    )  # fmt: skip


def _short(values: list[float]) -> list[float]:
    return [round(each, 3) for each in values]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds", type=float, help="of wild phases in all (default: 120; 1800 with --full)"
    )
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two faults (2)")
    parser.add_argument("--hang-timeout", type=float, default=0.5, help="of all worlds (0.5)")
    parser.add_argument("--secure", action="store_true", help="in secure mode: all connections are TLS")
    parser.add_argument("--seed", type=int, default=1, help="of what happens (1)")


PART = Part(
    name="chaos",
    title="Chaos",
    description="A world of up to eight members makes steps: 20 ms of work, an all_reduce of 256 KiB, an "
    "`advance`. Every two seconds something happens: a member is killed, stopped (and goes on later), asked "
    "to leave, or comes, or the process that serves the store, a list of three addresses, is killed. "
    "Newcomers get the state from the others. Each sum, and the state after each step, is looked at. Each "
    "member is in a world of two as well, and sends messages there: those to whose members nothing was done "
    "must not break.",
    measure=measure,
    add_options=_options,
)
