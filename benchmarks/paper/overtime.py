"""The two experiments over time: one worker is killed, one joins, while another sends to the same leader."""

from __future__ import annotations

import itertools
import os
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.paper.layout import CAUGHT, MULTI, PLAIN, SINGLE, worlds_of
from benchmarks.paper.program import PACKAGES, Program

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.peers.environments import Pair

BUCKET = 0.1
"""Seconds of a bar of the rate."""
_LEADER, _STAYS, _OTHER = 0, 2, 3
"""Ranks with two senders: the second receiving process (1) is not used here."""


@dataclass(frozen=True)
class Trial:
    """One run of an experiment; seconds from its beginning.

    Attributes:
        event: when the kill was sent, or the join began.
        until: when it was over.
        stays: arrivals from the sender that goes on.
        other: arrivals from the other.
        error: of the other's receive: when, the exception's name, its message; () without one.
        stays_error: the same of the one that goes on.
        join: when the join ended; None where there was none.
    """

    event: float
    until: float
    stays: tuple[float, ...]
    other: tuple[float, ...]
    error: tuple[Any, ...] = ()
    stays_error: tuple[Any, ...] = ()
    join: float | None = None
    more: dict[str, Any] = field(default_factory=dict)


def rates(at: Sequence[float], until: float, bucket: float = BUCKET) -> list[float]:
    """Arrivals in a second, for each bucket. Pure."""
    counts = [0] * max(1, round(until / bucket))
    for each in at:
        if 0 <= each < len(counts) * bucket:
            counts[min(int(each / bucket), len(counts) - 1)] += 1
    return [count / bucket for count in counts]


def rate_between(at: Sequence[float], begin: float, end: float) -> float:
    """Arrivals in a second in a span. Pure.

    Raises:
        ValueError: the span is empty.
    """
    if end <= begin:
        raise ValueError(f"{begin} to {end}: a span ends after it begins")
    return sum(begin <= each < end for each in at) / (end - begin)


def longest_gap(at: Sequence[float], begin: float, end: float) -> float:
    """The longest time without an arrival within a span; its ends count as arrivals. Pure."""
    inside = [begin, *(each for each in at if begin < each < end), end]
    return max(after - before for before, after in itertools.pairwise(inside))


def killed(held: Pair | None, form: str, size: int, seconds: float) -> Trial:
    """Two workers send; after a third of the time one of them gets SIGKILL."""
    package = PACKAGES.get(form, PLAIN)
    topology = SINGLE if form in (PLAIN, CAUGHT) else MULTI
    with Program(package, held, 2, worlds=worlds_of(2, processes=False)) as program:
        began, _ = program.watch(form, 2, size, seconds, topology=topology)
        time.sleep(max(0.0, began + seconds / 3 - time.monotonic()))
        at = time.monotonic()
        # It is this process's own child, not reaped before the program ends.
        os.kill(program.ranks[_OTHER].pid, signal.SIGKILL)
        told = program.ranks[_LEADER].result(timeout=seconds + 90.0)
    return _trial(told, began, at, seconds)


def joined(held: Pair | None, form: str, size: int, seconds: float) -> Trial:
    """One worker sends; after a third of the time another joins a second world, and sends as well."""
    # Alone in a world before: what it loads with its first world is no part of joining another.
    worlds = {f"{MULTI}-1": worlds_of(2)[f"{MULTI}-1"], "before": (_OTHER,)}
    members = [_LEADER, _OTHER]
    with Program(PACKAGES[form], held, 2, worlds=worlds) as program:
        port = program.port()
        join = {
            "world": f"{MULTI}-2", "members": members, "port": port, "peer": _OTHER, "after": seconds / 3
        }  # fmt: skip
        began, join = program.watch(form, 1, size, seconds, topology=MULTI, join=join)
        newcomer = program.ranks[_OTHER]
        newcomer.call("join_at", world=join["world"], members=members, port=port, at=join["at"])
        newcomer.start("feed_on", form=form, world=join["world"], peer=_LEADER, size=size)
        told = program.ranks[_LEADER].result(timeout=seconds + 90.0)
    begin, end = told["join"]
    return _trial(told, began, begin, seconds, end)


def _trial(told: dict[str, Any], began: float, at: float, seconds: float, join: float | None = None) -> Trial:
    found = []
    for peer in (_STAYS, _OTHER):
        seen = told["seen"].get(str(peer), {"at": [], "error": []})
        error = seen["error"]
        found.append(
            (
                tuple(each - began for each in seen["at"]),
                (error[0] - began, error[1], error[2]) if error else (),
            )
        )
    (stays, stays_error), (other, error) = found
    return Trial(
        at - began, seconds, stays, other, error, stays_error, None if join is None else join - began
    )
