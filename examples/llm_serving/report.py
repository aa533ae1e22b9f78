"""Report of a measured load, as a table and as a picture."""

from __future__ import annotations

import bisect
import sys
from itertools import pairwise
from pathlib import Path

from load import Story

__all__ = ["finish", "merged", "numbers"]

AFTER = 3.0
"""Seconds after a kill in which a stream's longest gap counts as its stall."""


def percentile(values: list[float], part: float) -> float:
    """The value that `part` of all do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


def stalls(story: Story) -> list[float]:
    """For each kill, and each stream that it met, the longest gap between two tokens that it can have caused."""
    found = []
    for kill in story.kills:
        for answer in story.answers:
            times = [answer.begun, *answer.times]
            if times[0] < kill < times[-1]:
                first = bisect.bisect(times, kill) - 1
                gaps = [after - before for before, after in pairwise(times[first:]) if before < kill + AFTER]
                found.append(max(gaps))
    return found


def merged(name: str, parts: list[Story]) -> Story:
    """Several loads as one."""
    whole = Story(name, parts[0].began, parts[-1].ended, seconds=sum(part.seconds for part in parts))
    for part in parts:
        whole.answers += part.answers
        whole.kills += part.kills
    return whole


def numbers(story: Story) -> dict[str, float]:
    """All that is told of a load."""
    answers = story.answers
    gaps = [after - before for answer in answers for before, after in pairwise(answer.times)]
    first = [answer.times[0] - answer.begun for answer in answers if answer.times]
    stall = stalls(story)
    return {
        "requests": len(answers),
        "lost": sum(not answer.whole for answer in answers),
        "wrong": sum(answer.wrong for answer in answers),
        "kills": len(story.kills),
        "tokens": sum(len(answer.tokens) for answer in answers),
        "tokens/s": story.rate(),
        "first token p50 ms": 1000 * percentile(first, 0.5),
        "first token p99 ms": 1000 * percentile(first, 0.99),
        "gap p50 ms": 1000 * percentile(gaps, 0.5),
        "gap p99 ms": 1000 * percentile(gaps, 0.99),
        "gap max ms": 1000 * max(gaps, default=0.0),
        "stall at a kill p50 ms": 1000 * percentile(stall, 0.5),
        "stall at a kill p99 ms": 1000 * percentile(stall, 0.99),
        "stall at a kill max ms": 1000 * max(stall, default=0.0),
    }


def table(stories: list[Story]) -> None:
    """Print the numbers, a column for each load."""
    columns = [numbers(story) for story in stories]
    rows = [[name, *(f"{column[name]:.0f}" for column in columns)] for name in columns[0]]
    try:
        from rich.console import Console  # noqa: PLC0415  (nice to have)
        from rich.table import Table  # noqa: PLC0415  (nice to have)
    except ImportError:
        width = max(len(row[0]) for row in rows)
        print("\n".join(f"{row[0]:{width}} " + " ".join(f"{cell:>12}" for cell in row[1:]) for row in rows))
        return
    made = Table("", *(story.name for story in stories))
    for row in rows:
        made.add_row(*row)
    for column in made.columns[1:]:
        column.justify = "right"
    Console().print(made)


def plot(story: Story, file: str) -> None:
    """Draw tokens per second, and the longest gap and wait for a first token of each second, with the kills."""
    seconds = int(story.ended - story.began)
    rate, longest, first = ([0.0] * (seconds + 1) for _ in range(3))
    for answer in story.answers:
        for at in answer.times:
            rate[int(at - story.began)] += 1
        for at in answer.times[:1]:
            second = int(at - story.began)
            first[second] = max(first[second], 1000 * (at - answer.begun))
        for before, after in pairwise(answer.times):
            second = int(after - story.began)
            longest[second] = max(longest[second], 1000 * (after - before))
    kills = [kill - story.began for kill in story.kills]
    replicas = [(at - story.began, count) for at, count in story.replicas]
    draw(file, rate[:seconds], longest[:seconds], first[:seconds], kills, replicas)


def draw(
    file: str,
    rate: list[float],
    longest: list[float],
    first: list[float],
    kills: list[float],
    replicas: list[tuple[float, int]],
) -> None:
    """Draw `rate`, `longest` and `first` by second; `kills` and changes of `replicas` are at seconds, too."""
    sys.path.append(str(Path(__file__).parents[1]))  # where load.py is started by itself
    import _picture  # noqa: PLC0415  (only for a picture)

    canvas, (above, middle, below) = _picture.panels(f"Three stages, {len(kills)} kills", 1.9, 1.2, 1.2)
    above.plot(rate, color=_picture.BLUE, linewidth=1)
    middle.plot(longest, color=_picture.GREEN, linewidth=1)
    below.plot(first, color=_picture.GREEN, linewidth=1)
    for axes in (above, middle, below):
        for kill in kills:
            axes.axvline(kill, color=_picture.RED, linewidth=0.7, alpha=0.35)
        for at, count in replicas:
            axes.axvline(at, color="#75507b", linestyle="--", linewidth=1)
            if axes is above:
                axes.text(at, 0, f" {count} replicas" if count > 1 else " 1 replica", color="#75507b")
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, len(rate))
    above.set_ylabel("tokens per second")
    middle.set_ylabel("longest gap, ms")
    below.set_ylabel("first token, ms")
    below.set_xlabel("seconds; red: SIGKILL of a stage")
    _picture.save(canvas, file)


def finish(stories: list[Story], file: str | None) -> int:
    """Tell all; returns the exit code: 1 if a request was lost or a token was wrong."""
    table(stories)
    for answer in [answer for story in stories for answer in story.answers if answer.error][:5]:
        print(f"lost: {answer.error}")
    if file:
        plot(stories[-1], file)
    return int(any(not answer.whole or answer.wrong for story in stories for answer in story.answers))
