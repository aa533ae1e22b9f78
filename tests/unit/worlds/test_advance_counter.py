"""The count of advances, and where it stops until the members have agreed on the next generation."""

from __future__ import annotations

import time

import pytest

from multiworld._generation.advance_counter import AdvanceCounter


def works():
    return True


@pytest.fixture
def late():
    """A counter whose advance has timed out at the limit that its member said."""
    counter = AdvanceCounter()
    assert counter.propose() == 1
    assert counter.advance()
    with pytest.raises(TimeoutError, match="advance 1: the members have not agreed"):
        counter.enters(works, time.monotonic())
    return counter


def test_an_advance_that_timed_out_is_made_again_at_the_limit(late):
    assert late.advance(), "it has said that it does not pass this one"
    with pytest.raises(TimeoutError):
        late.enters(works, time.monotonic())
    assert late.advance()
    late.decide(1)
    assert (late.enters(works, time.monotonic()), late.count) == (True, 1)


def test_others_may_have_agreed_on_a_later_one_meanwhile(late):
    late.decide(3)
    assert not late.advance()
    assert (late.advance(), late.advance(), late.count) == (False, True, 3)
    assert late.enters(works, time.monotonic())


def test_nothing_may_have_come_of_it_meanwhile(late):
    late.withdraw()
    assert not late.advance()
    assert (late.advance(), late.count) == (False, 2)


def test_a_generation_begins_with_a_new_step(late):
    late.begin(1)
    assert (late.advance(), late.count) == (False, 2)


def test_an_interrupt_at_the_limit_does_not_let_the_member_pass_it():
    def interrupted():
        raise KeyboardInterrupt

    counter = AdvanceCounter()
    assert (counter.propose(), counter.advance()) == (1, True)
    with pytest.raises(KeyboardInterrupt):
        counter.enters(interrupted, time.monotonic() + 30)
    assert (counter.advance(), counter.count) == (True, 1), "others may have agreed on this one"
    counter.decide(1)
    assert counter.enters(works, time.monotonic())
    assert (counter.advance(), counter.count) == (True, 1), "it has not entered there yet"
    counter.passed()
    assert (counter.advance(), counter.count) == (False, 2), "that one is over"
