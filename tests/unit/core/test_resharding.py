"""Who gives which part of a tensor to whom: on arrays of numbers."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld._core.resharding import Box, ShardPart, overlap, plan, without

SHAPE = (5, 4)


def cells(box):
    return set(itertools.product(*(range(at, at + size) for at, size in zip(*box, strict=True))))


def in_one_dimension(length):
    return st.integers(0, length).flatmap(
        lambda start: st.tuples(st.just(start), st.integers(0, length - start))
    )


BOXES = st.tuples(*map(in_one_dimension, SHAPE)).map(lambda each: Box(*zip(*each, strict=True)))
STATES = st.lists(st.dictionaries(st.sampled_from("ab"), BOXES, max_size=2), min_size=4, max_size=4)


@given(BOXES, BOXES)
def test_what_two_boxes_have_in_common_and_the_rest(one, other):
    common = overlap(one, other)
    assert cells(common) == cells(one) & cells(other)
    if all(common.size):
        rest = without(one, common)
        assert all(all(each.size) for each in rest)
        assert sum(math.prod(each.size) for each in rest) == len(cells(one)) - len(cells(common))
        assert set().union(*map(cells, rest)) == cells(one) - cells(common)


@given(STATES, STATES)
def test_everyone_gets_what_it_wants_once_from_those_that_have_it(have, want):
    pieces, missing = plan(have, want)
    assert [each.name for each in pieces] == sorted(each.name for each in pieces)
    for name in "ab":
        there = set().union(*(cells(each[name]) for each in have if name in each))
        wanted = [cells(each[name]) if name in each else set() for each in want]
        assert (name in missing) == any(each - there for each in wanted)
        for rank, each in enumerate(wanted):
            mine = [piece for piece in pieces if (piece.name, piece.target) == (name, rank)]
            got = [cells(piece.box) for piece in mine]
            assert all(cells(piece.box) <= cells(have[piece.source][name]) for piece in mine)
            assert sum(map(len, got)) == len(set().union(*got))
            assert set().union(*got) == each & there
            own = set().union(*(cells(piece.box) for piece in mine if piece.source == rank))
            assert own == (each & cells(have[rank][name]) if name in have[rank] else set())


def test_replicas_give_in_turns():
    whole, half = Box((0,), (4,)), Box((2,), (2,))
    pieces, missing = plan([{"t": whole}, {"t": whole}, {}, {}], [{}, {}, {"t": half}, {"t": whole}])
    assert not missing
    assert pieces == [ShardPart("t", 0, 2, half), ShardPart("t", 0, 3, whole)]
    assert plan([{}, {"t": half}], [{"t": half}, {"t": half}])[0] == [
        ShardPart("t", 1, 0, half),
        ShardPart("t", 1, 1, half),
    ]


@pytest.mark.parametrize("box", [Box((), ()), Box((1, 2), (3, 1))])
def test_one_number_is_a_box_too(box):
    assert plan([{"t": box}], [{"t": box}]) == ([ShardPart("t", 0, 0, box)], [])
    assert without(box, box) == []


def test_no_more_members_are_asked_once_a_shard_is_whole():
    """For each of a hundred members, and each tensor, a hundred would be."""
    asked = []

    class Shards(dict):
        def __contains__(self, name):
            asked.append(name)
            return super().__contains__(name)

    shards = [Shards(a=Box((rank,), (1,))) for rank in range(100)]
    pieces, missing = plan(shards, shards)
    assert (len(pieces), missing) == (100, [])
    assert len(asked) == 2 * 100, "what each wants and has itself"
