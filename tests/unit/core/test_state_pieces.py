"""How tensors are cut and put together, and what the two ends tell each other."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld._core import state_notes
from multiworld._core.state_notes import Kind, Note
from multiworld._core.state_pieces import TOGETHER, cuts, parts, pieces
from multiworld.errors import StateError

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


def elements(shape, index):
    """The numbers of the elements that an index picks, in order."""
    ranges = [range(size) for size in shape]
    for at, each in enumerate(index):
        ranges[at] = range(shape[at])[each] if isinstance(each, slice) else [each]
    strides = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    return [sum(map(int.__mul__, each, strides)) for each in itertools.product(*ranges)]


@given(shapes, st.sampled_from([1, 2, 8]), st.integers(8, 100))
def test_a_tensor_is_cut_in_order_and_whole(shape, itemsize, most):
    pieces = [elements(shape, index) for index in cuts(shape, itemsize, most)]
    assert all(0 < len(each) * itemsize <= most for each in pieces)
    assert list(itertools.chain(*pieces)) == list(range(math.prod(shape)))


def test_a_large_tensor_has_few_pieces():
    assert list(cuts((1000, 100), 4, 64_000)) == [
        (slice(at, min(at + 160, 1000)),) for at in range(0, 1000, 160)
    ]
    assert list(cuts((2, 1, 10), 4, 20)) == [(a, 0, slice(b, b + 5)) for a in (0, 1) for b in (0, 5)]


@given(st.lists(st.tuples(shapes, st.sampled_from([1, 2, 8])), max_size=8), st.integers(8, 100))
def test_parts_are_full_and_in_order(tensors, most):
    given_ = [(number, shape, itemsize) for number, (shape, itemsize) in enumerate(tensors)]
    found = list(parts(given_, most))
    assert all(0 < sum(piece.size for piece in part) <= most for part in found)
    for part, following in itertools.pairwise(found):
        assert sum(piece.size for piece in part) + following[0].size > most
    for number, shape, itemsize in given_:
        mine = [piece for part in found for piece in part if piece.tensor == number]
        assert [piece.at for piece in mine] == list(cuts(shape, itemsize, most))
        assert [piece.size for piece in mine] == [itemsize * len(elements(shape, each.at)) for each in mine]


def test_a_part_has_not_too_many_pieces():
    found = list(parts([(number, (), 4) for number in range(2 * TOGETHER + 1)], 1 << 20))
    assert [len(part) for part in found] == [TOGETHER, TOGETHER, 1]


def test_a_tensor_is_asked_for_when_the_pieces_of_the_one_before_were_taken():
    asked, taken = [], []

    def tensors():
        for number in range(3):
            asked.append(number)
            yield number, (4,), 8

    for begins, piece in pieces(tensors(), 16):
        taken.append((piece.tensor, begins))
        assert asked[-1] == piece.tensor
    assert taken == [(number, True) for number in (0, 0, 1, 1, 2, 2)]


# -- notes -----------------------------------------------------------------------------------------------------


@given(st.sampled_from(Kind), st.lists(st.integers(0, 2**64 - 1), max_size=4), st.text(max_size=50))
def test_a_note(kind, numbers, text):
    data = state_notes.pack(kind, *numbers, text=text)
    assert len(data) == state_notes.SIZE
    assert state_notes.unpack(data) == Note(kind, tuple(numbers + [0] * (4 - len(numbers))), text)


def test_a_long_reason_is_cut():
    note = state_notes.unpack(state_notes.pack(Kind.FAILED, text="é" * 1000))
    assert len(note.text) > 200
    assert set(note.text[:-1]) == {"é"}


@pytest.mark.parametrize("at", [0, 4, 6, 40], ids=["magic", "version", "kind", "length"])
def test_what_is_no_note_is_refused(at):
    data = bytearray(state_notes.pack(Kind.GO))
    data[at + 1 if at == 40 else at] = 99
    with pytest.raises(StateError, match="a note"):
        state_notes.unpack(data)
