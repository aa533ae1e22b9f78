"""Each sample of an epoch is taken once, whatever the members do: with members that are values."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld._core.sampling import Epochs, Place, share

LENGTHS = st.integers(1, 60)
SIZES = st.integers(1, 7)


def test_a_step_is_cut_into_shares():
    assert [list(share(10, 7, rank, 3)) for rank in range(3)] == [[10, 11], [12, 13], [14, 15, 16]]


@given(st.integers(0, 99), st.integers(1, 40), st.integers(1, 9))
def test_shares_are_a_step_and_differ_by_one_at_most(taken, per_step, members):
    shares = [share(taken, per_step, rank, members) for rank in range(members)]
    assert [each for one in shares for each in one] == list(range(taken, taken + per_step))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(("drop_last", "steps"), [(True, 2), (False, 3)])
def test_the_end_of_an_epoch(drop_last, steps):
    epochs = Epochs(11, 4, drop_last)
    assert epochs.steps_left(Place()) == steps
    assert epochs.after(Place(5), 1) == Place(5, 4)
    assert epochs.here(Place(5, 4)) == Place(5, 4)
    assert epochs.here(epochs.after(Place(5), steps)) == Place(6)
    with pytest.raises(ValueError, match=f"{steps + 1} steps were made where the epoch had {steps}"):
        epochs.after(Place(), steps + 1)


@given(LENGTHS, st.integers(1, 9), st.lists(SIZES, min_size=1, max_size=60), st.booleans(), st.booleans())
def test_every_sample_once_in_an_epoch(length, batch, sizes, per_member, drop_last):
    """Members are `sizes` in turn, a step each."""
    place, taken = Place(), Counter[int]()
    most = batch * (max(sizes) if per_member else 1)
    for size in sizes * length:
        epochs = Epochs(length, batch * size if per_member else batch, drop_last)
        place = epochs.here(place)
        if place.epoch:
            break
        if epochs.steps_left(place) <= 0:
            assert drop_last
            return
        for rank in range(size):
            taken.update(each % length for each in share(place.taken, epochs.per_step, rank, size))
        place = epochs.after(place, 1)
    missing = length - len(taken)
    twice = sum(taken.values()) - len(taken)
    if drop_last:
        assert twice == 0
        assert 0 <= missing < most
        assert set(taken) == set(range(len(taken)))
    else:
        assert missing == 0
        assert 0 <= twice < most
