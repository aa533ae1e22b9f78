"""Figures of what was measured. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.figures.figure import Figure, quantile, ratio, summary
from benchmarks.figures.sizes import size_name
from benchmarks.paper.layout import PLAIN, SINGLE, TOPOLOGY_WORDS, WORDS
from benchmarks.paper.overtime import longest_gap, rate_between, rates

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchmarks.paper.overtime import Trial

PART = "paper"
SETTLE = 0.3
"""Seconds after the beginning of a trial that do not count: the first messages connect."""


def throughput_of(
    count: int, size: int, found: Mapping[tuple[str, str], Sequence[float]]
) -> Iterator[Figure]:
    """The figures of one number of senders and one size.

    Args:
        count: how many send.
        size: bytes of a message.
        found: for each form and topology, messages a second of each round.
    """
    told = {cell: [rate * size / 1e6 for rate in rounds] for cell, rounds in found.items()}
    base = told[PLAIN, SINGLE]
    for (form, topology), rounds in told.items():
        name = f"throughput/{count}/{size_name(size)}/{topology}/{form}"
        series = {"senders": count, "bytes": size, "topology": topology, "form": form, "rates": rounds}
        note = f"{WORDS[form]}; {TOPOLOGY_WORDS[topology]}"
        if (form, topology) == (PLAIN, SINGLE):
            yield summary(PART, name, rounds, "MB/s", note=note, series=series)
        else:
            yield ratio(
                PART, name, rounds, base, absolute_unit="MB/s", series=series,
                note=f"{note}: over torch's single world",
            )  # fmt: skip
    for form in dict.fromkeys(form for form, _ in told):
        single = told.get((form, SINGLE))
        for topology in [each for other, each in told if other == form and each != SINGLE]:
            if single:
                yield ratio(
                    PART, f"kept/{count}/{size_name(size)}/{topology}/{form}", told[form, topology], single,
                    absolute_unit="MB/s", note=f"{WORDS[form]}: over its own single world",
                    series={"senders": count, "bytes": size, "kept": topology, "form": form},
                )  # fmt: skip


def fault_of(form: str, words: str, trials: Sequence[Trial]) -> Iterator[Figure]:
    """What a kill of one worker does to the rate of the other."""
    before = [rate_between(each.stays, SETTLE, each.event) for each in trials]
    after = [rate_between(each.stays, each.event + SETTLE, each.until) for each in trials]
    shown = trials[0]
    series = {
        "form": form, "event": shown.event, "until": shown.until, "bucket": 0.1,
        "stays": rates(shown.stays, shown.until), "other": rates(shown.other, shown.until),
        "error": [*shown.error], "stays_error": [*shown.stays_error],
        "before": before, "after": after,
    }  # fmt: skip
    yield ratio(
        PART, f"fault/{form}", after, before, absolute_unit="1/s", series=series,
        note=f"{words}: messages from the worker that lives, after the kill of the other over before",
    )  # fmt: skip
    known = [1e3 * (each.error[0] - each.event) for each in trials if each.error]
    if known:
        yield summary(
            PART, f"fault/{form}/noticed", known, "ms",
            note=f"{words}: from SIGKILL until the receive from it raised {shown.error[1:2]}",
        )  # fmt: skip


def join_of(form: str, words: str, trials: Sequence[Trial]) -> Iterator[Figure]:
    """What a join of a second worker costs, and takes."""
    ended = [each.join if each.join is not None else each.until for each in trials]
    before = [rate_between(each.stays, SETTLE, each.event) for each in trials]
    during = [rate_between(each.stays, each.event, end) for each, end in zip(trials, ended, strict=True)]
    gaps = [1e3 * longest_gap(each.stays, each.event, end) for each, end in zip(trials, ended, strict=True)]
    usual = [1e3 * longest_gap(each.stays, SETTLE, each.event) for each in trials]
    took = [1e3 * (end - each.event) for each, end in zip(trials, ended, strict=True)]
    shown = trials[0]
    series = {
        "form": form, "event": shown.event, "until": shown.until, "bucket": 0.1, "join": shown.join,
        "stays": rates(shown.stays, shown.until), "other": rates(shown.other, shown.until),
        "stays_error": [*shown.stays_error],
    }  # fmt: skip
    yield summary(
        PART, f"join/{form}", took, "ms",
        note=f"{words}: until the second world is there, at the leader, which receives meanwhile",
        series=series,
    )  # fmt: skip
    yield ratio(
        PART, f"join/{form}/rate", during, before, absolute_unit="1/s",
        note=f"{words}: messages from the first worker while the second joins, over before",
    )  # fmt: skip
    yield summary(
        PART, f"join/{form}/gap", gaps, "ms",
        note=f"{words}: longest time without a message of the first worker meanwhile; before: up to "
        f"{quantile(usual, 0.5):.3g} ms",
    )  # fmt: skip
