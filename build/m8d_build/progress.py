"""Progress of a build on the terminal: step, elapsed and remaining time."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Console", "Progress", "Reporter", "Silent"]


class Reporter(Protocol):
    """What the toolchain tells while it works."""

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Enclose one named step."""

    def note(self, text: str) -> None:
        """Say one line inside a step."""


class Silent:
    """A reporter that says nothing and remembers the steps (for tests and for library use)."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.notes: list[str] = []

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Remember the step."""
        self.steps.append(name)
        yield

    def note(self, text: str) -> None:
        """Remember the line."""
        self.notes.append(text)


class Progress:
    """Prints each step as it starts and ends, with elapsed and remaining time.

    Args:
        expected: (step, seconds) in order: how long each step took when it was last measured. The remaining
            time is the sum of the steps not yet done, scaled by how this run compares so far.
        console: where to print.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        expected: Sequence[tuple[str, float]],
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._expected = dict(expected)
        self._left = dict(expected)
        self._console = console or Console(highlight=False)
        self._clock = clock
        self._start = clock()
        self._done = 0
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Print the step before and after it runs."""
        total = max(len(self._expected), self._done + 1)
        self._console.print(f"[{self._done + 1}/{total}] {name} ... {self.remaining()}", markup=False)
        began = self._clock()
        try:
            yield
        except BaseException:
            self._console.print(f"      {name}: stopped after {self._clock() - began:.1f} s", markup=False)
            raise
        took = self._clock() - began
        self.seconds[name] = took
        self._left.pop(name, None)
        self._done += 1
        elapsed = self._clock() - self._start
        self._console.print(f"      {name}: {took:.1f} s (elapsed {elapsed:.0f} s)", markup=False)

    def note(self, text: str) -> None:
        """Print one line inside the step."""
        self._console.print(f"      {text}", markup=False, soft_wrap=True)

    def remaining(self) -> str:
        """Return "about N s left", "" when nothing is known."""
        left = sum(self._left.values())
        planned = sum(self._expected[name] for name in self.seconds if name in self._expected)
        spent = sum(took for name, took in self.seconds.items() if name in self._expected)
        if planned > 0 and spent > 0:
            left *= min(max(spent / planned, 0.5), 2.0)  # a slow download says little about the rest
        return f"about {left:.0f} s left" if left >= 1 else ""
