"""What a member that has left a world knows of its wish when it comes back."""

from __future__ import annotations

from types import SimpleNamespace

from multiworld._join.advancing import Advancing
from multiworld._join.preparing import Following
from multiworld.events import State

PLAN = SimpleNamespace(meets_at="tcp://a:1", timeout=10.0)


def test_a_member_that_has_left_and_comes_back_stays():
    gen = SimpleNamespace(world="w", number=1, rank=0, state=State.ACTIVE)
    gen.machine = SimpleNamespace(apply=lambda _: setattr(gen, "state", State.CLOSED))
    world = SimpleNamespace(name="w", _gen=gen, _closes=0, _plan=PLAN, _generation_closed=lambda _: None)
    advancing = Advancing(world, print)
    advancing.begin(0)
    preparing = advancing._preparing
    # As `leave` and the background do it, which ask a store.
    preparing.watched, preparing.leaving, preparing.following = gen, True, Following(None)
    advancing._counter.decide(1)
    assert advancing.advance()
    assert (gen.state, preparing.following.entered.is_set()) == (State.CLOSED, True)
    advancing.begin(1)
    assert not preparing.leaving


def test_a_wish_to_leave_lasts_over_a_breakage():
    world = SimpleNamespace(name="w", _gen=SimpleNamespace(state=State.BROKEN), _closes=0, _plan=PLAN)
    advancing = Advancing(world, print)
    advancing._preparing.leaving = True
    advancing.begin(1)
    assert advancing._preparing.leaving
    world._closes = 1
    advancing.begin(1)
    assert not advancing._preparing.leaving
