"""What becomes of an advance at which the next generation is due: interrupts, and what other threads do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from multiworld._core.state_machine import Announced, Broke, Joined, Stage
from multiworld._generation.stage import StateMachine
from multiworld._join.advancing import Advancing
from multiworld._join.preparing import Following
from multiworld.events import Breakage, Cause, State


class Leaver:
    """A member of a world of its own, which leaves at its first advance; that is agreed on."""

    def __init__(self):
        machine = StateMachine("w", 0)
        machine.bind(lambda actions, _: actions.clear())
        machine.apply(Joined())
        self.machine, self.told = machine, []

        class Gen:
            world, number, rank, state = "w", 1, 0, property(lambda _: machine.state)

        self.gen = Gen()
        self.gen.machine = machine
        world = SimpleNamespace(
            name="w",
            _gen=self.gen,
            _closes=0,
            _plan=SimpleNamespace(meets_at="tcp://a:1", timeout=10.0),
            _generation_closed=self.told.append,
        )
        self.advancing = Advancing(world, print)
        self.advancing.begin(0)
        self.following = Following(None)
        # As the background does it, which asks a store.
        preparing = self.advancing._preparing
        preparing.watched, preparing.following = self.gen, self.following
        self.advancing._counter.decide(1)

    def interrupted_at(self, it, name):
        """Ctrl-C comes at the end of the next call of this method."""
        function = getattr(it, name)

        def interrupted(*arguments):
            setattr(it, name, function)
            function(*arguments)
            raise KeyboardInterrupt

        setattr(it, name, interrupted)


@pytest.fixture
def opening():
    return Leaver()


@pytest.fixture
def leaver(opening):
    opening.machine.apply(Announced())
    return opening


def test_a_member_that_is_interrupted_before_it_enters_does_so_at_the_next_call(leaver):
    leaver.interrupted_at(leaver.advancing._counter, "enters")
    with pytest.raises(KeyboardInterrupt):
        leaver.advancing.advance()
    assert (leaver.gen.state, leaver.following.entered.is_set()) == (State.ACTIVE, False)
    assert leaver.advancing.advance()
    assert (leaver.gen.state, leaver.advancing.count) == (State.CLOSED, 1)


def test_an_advance_at_which_what_follows_is_undone_already_is_over(leaver):
    assert leaver.following.take(), "by the background"
    assert not leaver.advancing.advance()
    leaver.advancing._counter.withdraw()
    assert (leaver.advancing.advance(), leaver.advancing.count) == (False, 2)


@pytest.mark.parametrize("lost", [False, True])
def test_the_next_generation_is_due_while_subscribers_still_hear_of_the_present_one(opening, lost):
    """It was joined in the background, where they are told; to the program it is active before."""
    if lost:
        opening.machine.apply(Broke(Breakage(Cause.CRASHED, (1,), "rank 1 crashed", 1.0)))
    assert opening.gen.state is State.ACTIVE
    assert opening.advancing.advance()
    assert opening.machine.apply(Announced()) is Stage.REPLACED
    assert opening.machine.breakage is None


def interrupted(actions, _):
    actions.clear()
    raise KeyboardInterrupt


@pytest.mark.parametrize("at", ["the wait", "the entry"])
def test_a_member_that_is_interrupted_as_it_leaves_is_told_that_its_world_is_closed(leaver, at):
    if at == "the wait":
        leaver.interrupted_at(leaver.advancing._preparing, "stop")
    else:
        leaver.machine.bind(interrupted)
    with pytest.raises(KeyboardInterrupt):
        leaver.advancing.advance()
    assert leaver.told == [leaver.gen]
    assert leaver.following.entered.is_set()
