"""What ends joining a broken world again in the background, and what does not."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from multiworld._join import rejoining
from multiworld.errors import StaleGenerationError
from multiworld.events import State


class Joins:
    """A broken world whose joins raise what is said, in turn; the one after them succeeds."""

    def __init__(self, *errors):
        self.errors, self.tries = list(errors), 0
        self.world = SimpleNamespace(
            name="w",
            state=State.BROKEN,
            breakage=None,
            _closes=0,
            on_break=lambda broke: setattr(self, "broke", broke),
        )
        self.rejoiner = rejoining.Rejoiner(self.world, self._again)

    def _again(self, world, closed):
        self.tries += 1
        if self.errors:
            raise self.errors.pop(0)
        world.state = State.ACTIVE


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
    monkeypatch.setattr(rejoining, "AGAIN", 0.0)


@pytest.mark.parametrize(
    "error", [RuntimeError("can't start new thread"), OSError(24, "Too many open files")]
)
def test_an_error_of_the_host_does_not_end_it(error, caplog):
    joins = Joins(error, error, error)
    joins.broke(joins.world)
    assert (joins.world.state, joins.tries) == (State.ACTIVE, 4)
    told = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert told == [f"world 'w' is not joined again yet: {error}"], "once"
    joins.rejoiner.wait_idle(0.0)


def test_a_stale_generation_ends_it():
    joins = Joins(StaleGenerationError("w", "its rank is taken"))
    joins.broke(joins.world)
    assert (joins.world.state, joins.tries) == (State.BROKEN, 1)
