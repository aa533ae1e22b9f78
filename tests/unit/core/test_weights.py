"""How versions of weights are laid out, which are kept, and which engines are served."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld._core.weights import (
    ALIGNED,
    Entry,
    Head,
    Roster,
    encode,
    laid_out,
    layout,
    message,
    superseded,
)

SIZES = {"float32": 4, "bfloat16": 2, "bool": 1, "complex128": 16}
entries = st.lists(
    st.builds(
        Entry,
        st.text(max_size=3),
        st.sampled_from(sorted(SIZES)),
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
    ),
    max_size=12,
)


def head(**other):
    told = Head("s", 3, 64, (Entry("a", "float32", (2, 3)), Entry("b", "bool", ())), ("00", "11"))
    return told._replace(**other)


@given(entries, st.integers(16, 500))
def test_buckets_hold_each_byte_once_where_its_dtype_may_lie(found, most):
    covered = dict.fromkeys(range(len(found)), 0)
    buckets = layout(found, SIZES, most)
    for pieces, size in buckets:
        end = 0
        assert pieces or (found and buckets == [([], 0)])
        assert sum(each.piece.size for each in pieces) <= most
        for each in pieces:
            assert each.at % ALIGNED == 0
            assert each.at >= end, "pieces overlap"
            end = each.at + each.piece.size
            covered[each.piece.tensor] += each.piece.size
        assert end <= size < end + ALIGNED
    for number, each in enumerate(found):
        count = SIZES[each.dtype]
        for length in each.shape:
            count *= length
        assert covered[number] == count


def test_an_empty_bucket():
    assert laid_out([]) == ([], 0)


def test_a_head_survives_its_message():
    assert Head.of(message(encode(head().told()))) == head()


@pytest.mark.parametrize(
    "change",
    [
        {"version": -1},
        {"bucket": 0},
        {"tensors": [["a", "float32", [-1]]]},
        {"tensors": [["a", "float32"]]},
        {"tensors": None},
        {"digests": 1},
        {"version": "x"},
        {"version": None},
    ],
)
def test_what_is_no_head_is_refused(change):
    told = json.loads(encode(head().told())) | change
    with pytest.raises(ValueError, match=r"is no version of weights|a size is negative|invalid literal"):
        Head.of(told)
    with pytest.raises(ValueError, match="is no version"):
        Head.of({"kind": "version"})


@pytest.mark.parametrize("data", [b"", b"[1]", b"\xff"])
def test_what_is_no_message_is_refused(data):
    with pytest.raises(ValueError, match=r".+"):
        message(data)


@given(st.sets(st.integers(0, 20), max_size=6), st.sets(st.integers(0, 20), max_size=6), st.integers(2, 5))
def test_few_versions_are_kept_and_the_oldest_transfer_goes_on(sent, waiting, most):
    newest = 21
    cut = superseded(newest, sent, waiting, most)
    kept = (sent | waiting) - set(cut)
    assert len(kept) + 1 <= most
    assert set(cut) <= sent | waiting
    assert not sent or min(sent) in kept, "else an engine that is slow never gets one"
    assert not kept - sent or sent <= kept, "engines that only wait cost another one its version"


def test_the_newest_version_is_not_cut():
    assert superseded(3, [3, 2, 1, 0], [], 2) == [1, 2]
    assert superseded(3, [3, 2, 1, 0], [3], 3) == [2]
    assert superseded(3, [2], [3, 2, 1, 0], 3) == [1]
    assert superseded(3, [3], [3], 2) == []


def test_an_engine_is_served_by_one_thread():
    roster = Roster()
    assert roster.announced(["b", "a"]) == ["a", "b"]
    assert roster.announced(["b", "c"]) == ["c"]
    assert roster.serving == {"a", "b", "c"}
    assert roster.ended("b") is True, "it was started again"
    assert roster.announced(["b"]) == []
    assert roster.ended("b") is True
    assert roster.ended("b") is False
    assert roster.announced(["b"]) == ["b"]
    assert roster.ended("a") is False
    assert roster.serving == {"b", "c"}
