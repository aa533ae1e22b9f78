from __future__ import annotations

import io

import pytest
from rich.console import Console

from m8d_build.progress import Progress, Silent


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def shown(clock: Clock, *expected: tuple[str, float]) -> tuple[Progress, io.StringIO]:
    text = io.StringIO()
    return Progress(expected, Console(file=text, width=200), clock), text


def test_a_step_shows_its_number_its_time_and_what_is_left(clock: Clock) -> None:
    progress, text = shown(clock, ("fetch", 10), ("compile", 40))
    with progress.step("fetch"):
        clock.now += 10
    assert progress.remaining() == "about 40 s left"
    lines = text.getvalue().splitlines()
    assert lines[0] == "[1/2] fetch ... about 50 s left"
    assert "fetch: 10.0 s (elapsed 10 s)" in lines[1]


@pytest.mark.parametrize(("took", "left"), [(20, "about 80 s left"), (5, "about 20 s left")])
def test_what_is_left_follows_how_this_run_compares(clock: Clock, took: float, left: str) -> None:
    progress, _ = shown(clock, ("fetch", 10), ("compile", 40))
    with progress.step("fetch"):
        clock.now += took
    assert progress.remaining() == left


def test_one_step_out_of_proportion_does_not_carry_the_estimate_away(clock: Clock) -> None:
    progress, _ = shown(clock, ("fetch", 1), ("compile", 40))
    with progress.step("fetch"):
        clock.now += 1000  # a slow download says nothing about compiling
    assert progress.remaining() == "about 80 s left"


def test_a_step_that_fails_is_not_done(clock: Clock) -> None:
    progress, text = shown(clock, ("fetch", 10))
    with pytest.raises(OSError, match="gone"), progress.step("fetch"):
        clock.now += 3
        raise OSError("gone")
    assert "fetch: stopped after 3.0 s" in text.getvalue()
    assert progress.seconds == {}


def test_a_step_nobody_planned_is_shown_too(clock: Clock) -> None:
    progress, text = shown(clock)
    with progress.step("surprise [brackets]"):
        progress.note("a [note]")
    assert "[1/1] surprise [brackets]" in text.getvalue()
    assert "a [note]" in text.getvalue()


def test_the_silent_reporter_remembers() -> None:
    silent = Silent()
    with silent.step("one"):
        silent.note("two")
    assert (silent.steps, silent.notes) == (["one"], ["two"])
