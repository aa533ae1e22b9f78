"""Blocks that end out of turn: those of generators, which last while these are suspended."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import multiworld as mw
from multiworld._c10d.routing.selection import current
from multiworld.errors import RouterError


@pytest.fixture
def worlds():
    made = [mw.join(name, 0, 1, store=dist.HashStore(), timeout=60) for name in ("a", "b")]
    yield made
    for each in made:
        each.close()
    assert current() is None


def name():
    """Of the world that is selected."""
    state = current()
    return None if state is None else state.name


def steps(w):
    with w:
        for _ in range(2):
            yield name()


def test_a_generator_that_is_closed_in_another_block_leaves_its_own(worlds):
    a, b = worlds
    suspended = steps(a)
    assert next(suspended) == "a"
    with b:
        suspended.close()
        assert name() == "b"
    assert name() is None


def test_blocks_that_end_out_of_turn_say_so_and_leave_their_own(worlds):
    a, b = worlds
    first, second = steps(a), steps(b)
    assert [next(each) for each in (first, second, first, second)] == ["a", "b", "b", "b"]
    with pytest.raises(RouterError, match="'a' ended inside the block of world 'b'"):
        next(first)
    assert name() == "b"
    with pytest.raises(StopIteration):
        next(second)
    assert name() is None


def test_an_error_that_ends_a_block_out_of_turn_stays(worlds):
    a, b = worlds
    suspended = steps(a)
    next(suspended)
    with b:
        with pytest.raises(ZeroDivisionError):
            suspended.throw(ZeroDivisionError())
        assert name() == "b"


def test_a_block_that_is_left_where_it_was_not_entered_leaves_the_others(worlds):
    a, b = worlds
    with b:
        with pytest.raises(RouterError, match="'a' ended inside the block of world 'b'"):
            a.__exit__(None, None, None)
        assert name() == "b"
