"""Queries of a store's clients: rules, bounds, parts of queries, and what is no query."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld._net.stores.queries import MOST_KEY, MOST_KEYS, MOST_VALUE, Dialogue, MalformedQueryError

HELLO = struct.pack("=BI", 0, 0x3C85F7CE)
PLENTY = 1 << 30


def bits(value: bytes) -> bytes:
    return struct.pack("=Q", len(value)) + value


def put(key: bytes, value: bytes) -> bytes:
    return b"\1" + bits(key) + bits(value)


def compare_set(key: bytes, expected: bytes, desired: bytes) -> bytes:
    return b"\2" + bits(key) + bits(expected) + bits(desired)


def add(key: bytes, amount: int) -> bytes:
    return b"\4" + bits(key) + struct.pack("=q", amount)


def check(*keys: bytes) -> bytes:
    return b"\5" + struct.pack("=Q", len(keys)) + b"".join(map(bits, keys))


def append(key: bytes, value: bytes) -> bytes:
    return b"\x09" + bits(key) + bits(value)


def delete(key: bytes) -> bytes:
    return b"\x08" + bits(key)


COUNT = b"\7"


def number(value: int) -> bytes:
    return struct.pack("=q", value)


def begun(values: dict[bytes, bytes] | None = None) -> Dialogue:
    dialogue = Dialogue({} if values is None else values)
    dialogue.take(HELLO)
    assert dialogue.answers(PLENTY) == b""
    return dialogue


def asked(dialogue: Dialogue, query: bytes) -> bytes:
    dialogue.take(query)
    return dialogue.answers(PLENTY)


@pytest.mark.parametrize(
    ("there", "expected", "desired", "answer", "then"),
    [
        (None, b"", b"new", b"new", b"new"),
        (None, b"x", b"new", b"x", None),
        (b"old", b"old", b"new", b"new", b"new"),
        (b"old", b"x", b"new", b"old", b"old"),
        (b"old", b"", b"new", b"old", b"old"),
        (b"", b"", b"new", b"new", b"new"),
        (None, b"", b"", b"", b""),
    ],
)
def test_compare_set(
    there: bytes | None, expected: bytes, desired: bytes, answer: bytes, then: bytes | None
) -> None:
    values = {} if there is None else {b"k": there}
    assert asked(begun(values), compare_set(b"k", expected, desired)) == bits(answer)
    assert values.get(b"k") == then


def test_every_other_query() -> None:
    values: dict[bytes, bytes] = {}
    dialogue = begun(values)
    assert asked(dialogue, put(b"a", b"0")) == b""
    assert asked(dialogue, put(b"a", b"1")) == b""
    assert asked(dialogue, append(b"t", b"one")) == asked(dialogue, append(b"t", b", two")) == b""
    assert values.pop(b"t") == b"one, two"
    assert asked(dialogue, check(b"a")) == b"\0"
    assert asked(dialogue, check(b"a", b"b")) == asked(dialogue, check(b"b", b"a")) == b"\1"
    assert asked(dialogue, check()) == b"\0"
    assert asked(dialogue, add(b"a", -3)) == number(-2)
    assert asked(dialogue, add(b"n", 5)) == number(5)
    assert asked(dialogue, COUNT) == number(2)
    assert values == {b"a": b"-2", b"n": b"5"}
    assert asked(dialogue, delete(b"a")) == number(1)
    assert asked(dialogue, delete(b"a")) == number(0)
    assert values == {b"n": b"5"}


@pytest.mark.parametrize(
    ("value", "amount", "total"),
    [(b"12abc", 1, 13), (b" +7", 1, 8), (b"9223372036854775807", 1, -(1 << 63)), (b"-5", 5, 0)],
)
def test_what_add_reads_as_a_number(value: bytes, amount: int, total: int) -> None:
    assert asked(begun({b"k": value}), add(b"k", amount)) == number(total)


@pytest.mark.parametrize("value", [b"", b"abc", b"9223372036854775808", b"1" * 20, b"1" * 5000])
def test_what_is_no_number_to_add_to_ends_the_connection(value: bytes) -> None:
    values = {b"k": value}
    with pytest.raises(MalformedQueryError, match="no number"):
        asked(begun(values), add(b"k", 1))
    assert values == {b"k": value}


@pytest.mark.parametrize(
    "sent",
    [
        b"\1" + bits(b"k"),  # no VALIDATE
        struct.pack("=BI", 0, 0x3C85F7CF),
        b"GET / HTTP/1.1\r\n\r\n",
        HELLO + b"\3",  # GET and WAIT are TCPStore's, and not this package's clients'
        HELLO + b"\6",
        HELLO + HELLO,
        HELLO + b"\xff",
        HELLO + b"\1" + struct.pack("=Q", MOST_KEY + 1),
        HELLO + b"\1" + bits(b"k") + struct.pack("=Q", MOST_VALUE + 1),
        HELLO + b"\2" + bits(b"k") + bits(b"") + struct.pack("=Q", 1 << 63),
        HELLO + b"\5" + struct.pack("=Q", MOST_KEYS + 1),
        HELLO + b"\x09" + bits(b"k") + struct.pack("=Q", MOST_VALUE + 1),
        HELLO + b"\x08" + struct.pack("=q", -1),
    ],
)
def test_what_is_no_query_ends_the_connection(sent: bytes) -> None:
    values: dict[bytes, bytes] = {}
    with pytest.raises(MalformedQueryError):
        asked(Dialogue(values), sent)
    assert values == {}


def test_what_came_before_a_malformed_query_counts() -> None:
    values: dict[bytes, bytes] = {}
    with pytest.raises(MalformedQueryError):
        asked(begun(values), put(b"a", b"1") + b"\xff" + put(b"b", b"1"))
    assert values == {b"a": b"1"}


def test_the_largest_key_and_value_are_taken() -> None:
    values: dict[bytes, bytes] = {}
    key, value = b"k" * MOST_KEY, b"v" * MOST_VALUE
    dialogue = begun(values)
    query = put(key, value)
    for at in range(0, len(query), 65536):
        assert asked(dialogue, query[at : at + 65536]) == b""
    assert values == {key: value}


def test_what_others_append_while_one_arrives_stays() -> None:
    values: dict[bytes, bytes] = {}
    slow, other = begun(values), begun(values)
    query = append(b"k", b"slow, ")
    assert asked(slow, query[:-3]) == asked(other, append(b"k", b"other, ")) == asked(slow, query[-3:]) == b""
    assert values == {b"k": b"other, slow, "}


def test_a_value_grows_to_the_largest_one_and_no_further() -> None:
    values = {b"k": b"v" * (MOST_VALUE - 1)}
    dialogue = begun(values)
    assert asked(dialogue, append(b"k", b"v")) == b""
    with pytest.raises(MalformedQueryError, match="bytes is more than"):
        asked(dialogue, append(b"k", b"v"))
    assert len(values[b"k"]) == MOST_VALUE


def test_a_query_of_many_keys_is_not_kept() -> None:
    dialogue = begun()
    key = bits(b"k" * MOST_KEY)
    tracemalloc.start()
    try:
        dialogue.take(b"\5" + struct.pack("=Q", 5000))
        for _ in range(5000):
            dialogue.take(key)
            last = dialogue.answers(PLENTY)
        assert last == b"\1"
        assert tracemalloc.get_traced_memory()[1] < 1_000_000  # of 40 MB
    finally:
        tracemalloc.stop()


def test_replies_come_in_portions() -> None:
    dialogue = begun({b"k": b"v" * 1000})
    dialogue.take(compare_set(b"k", b"?", b"?") * 10 + COUNT)
    portions = []
    while portion := dialogue.answers(2500):
        portions.append(portion)
    assert [len(each) for each in portions] == [3024, 3024, 3024, 1016]
    assert portions[-1].endswith(number(1))


KEYS = st.sampled_from([b"", b"a", b"b", b"/m8d/w"])
VALUES = st.sampled_from([b"", b"0", b"1", b"-7", b"text"])
QUERIES = st.one_of(
    st.builds(put, KEYS, VALUES),
    st.builds(append, KEYS, VALUES),
    st.builds(compare_set, KEYS, VALUES, VALUES),
    st.builds(lambda keys: check(*keys), st.lists(KEYS, max_size=3)),
    st.builds(delete, KEYS),
    st.just(COUNT),
)


@given(st.lists(QUERIES, max_size=12), st.lists(st.integers(1, 40), min_size=1), st.integers(0, 50))
def test_how_queries_are_cut_changes_no_reply(queries: list[bytes], cuts: list[int], most: int) -> None:
    whole, cut = dict[bytes, bytes](), dict[bytes, bytes]()
    text = HELLO + b"".join(queries)
    replies = asked(Dialogue(whole), text)
    dialogue, at, turn, got = Dialogue(cut), 0, 0, bytearray()
    while at < len(text):
        size = cuts[turn % len(cuts)]
        turn += 1
        dialogue.take(text[at : at + size])
        at += size
        while some := dialogue.answers(most):
            got += some
    assert bytes(got) == replies
    assert cut == whole


@given(st.binary(max_size=200))
def test_any_bytes_are_queries_or_refused(sent: bytes) -> None:
    values: dict[bytes, bytes] = {}
    try:
        replies = asked(begun(values), sent)
    except MalformedQueryError:
        return
    assert len(replies) <= 8 * len(sent) + 8
