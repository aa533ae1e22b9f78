"""What came of the tests, stock and in a world. Decides; no torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FAILED", "PASSED", "SKIPPED", "Difference", "compare", "counted"]

PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"


@dataclass(frozen=True)
class Difference:
    """A test that ended otherwise in a world.

    Attributes:
        test: its name.
        stock: how it ended on stock torch, or "not run".
        world: how it ended in a world, or "not run".
        said: the last line of the error in the world.
    """

    test: str
    stock: str
    world: str
    said: str


def compare(stock: dict[str, tuple[str, str]], world: dict[str, tuple[str, str]]) -> list[Difference]:
    """Return the tests that ended differently, by name.

    Args:
        stock: how each test ended, and what was said of it.
        world: the same, in a world.
    """
    missing = ("not run", "")
    found = []
    for test in sorted(stock.keys() | world.keys()):
        (before, _), (after, said) = stock.get(test, missing), world.get(test, missing)
        if before != after:
            lines = said.strip().splitlines() or [""]
            found.append(Difference(test, before, after, lines[-1]))
    return found


def counted(ended: dict[str, tuple[str, str]]) -> dict[str, int]:
    """Return how many tests ended in which way."""
    return {way: sum(each == way for each, _ in ended.values()) for way in (PASSED, SKIPPED, FAILED)}
