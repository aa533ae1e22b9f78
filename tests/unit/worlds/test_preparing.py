"""When a member of a world that works looks again who waits to come in."""

from __future__ import annotations

from types import SimpleNamespace

from multiworld._join.preparing import AGAIN_AT_MOST, LOOK_EVERY, Preparing
from multiworld.errors import StoreUnreachableError
from multiworld.events import State


class Store:
    """Answers or does not, in turn."""

    def __init__(self, answers):
        self.answers = list(answers)

    def follow(self, gen): ...

    def reopen(self): ...

    def of(self, gen):
        return self

    def due(self):
        if not self.answers.pop(0):
            raise StoreUnreachableError("w", "The store gave no answer")
        return False


def looks(answers):
    """Pauses after looks at a store that answers so."""
    gen = SimpleNamespace(world="w", number=1, rank=0, state=State.ACTIVE)
    world = SimpleNamespace(name="w", _gen=gen, _plan=SimpleNamespace(present=None))
    preparing = Preparing(world, print, SimpleNamespace(look=lambda: None))
    preparing._store = Store(answers)
    return [preparing._look(gen, 0) for _ in answers]


def test_a_store_that_is_served_elsewhere_in_a_moment_is_looked_at_soon():
    """A newcomer waits meanwhile."""
    assert looks([False, True, False]) == [LOOK_EVERY] * 3


def test_a_store_that_stays_silent_is_looked_at_less_and_less():
    assert looks([False] * 4) == [0.2, 1.0, AGAIN_AT_MOST, AGAIN_AT_MOST]
