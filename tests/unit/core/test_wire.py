from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld._core.liveness import wire
from multiworld._core.liveness.connection import PeerConnection
from multiworld._core.liveness.wire import (
    Asked,
    Attach,
    Attached,
    Beat,
    Broken,
    Close,
    Goodbye,
    Hello,
    Need,
    Parser,
    Reason,
    Refused,
    Told,
    Unread,
    encode,
)
from multiworld.events import Cause

processes = st.binary(min_size=16, max_size=16).map(bytes.hex)
keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=120).filter(
    lambda key: len(key.encode()) <= wire.MAX_KEY
)
ranks = st.integers(0, 2**32 - 1)
frames = st.one_of(
    st.builds(Hello, processes, processes, st.binary(min_size=16, max_size=16)),
    st.builds(Attach, keys, ranks, st.binary(min_size=32, max_size=32)),
    st.builds(Attached, keys, ranks),
    st.builds(Refused, keys, ranks, st.sampled_from(Reason), ranks),
    st.builds(Goodbye, keys, ranks),
    st.builds(Unread, keys, ranks),
    st.builds(Asked, keys, ranks, ranks, st.booleans()),
    st.builds(Told, keys, ranks, ranks, st.binary(max_size=3072), st.booleans()),
    st.builds(
        Broken, keys, st.sampled_from(Cause), st.lists(ranks, max_size=40).map(tuple),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=200),
    ),
    st.builds(Beat, ranks),
    st.builds(Need, st.integers(1, 10**7).map(lambda number: number / 1000)),
    st.just(Close()),
)  # fmt: skip


@given(st.lists(frames, max_size=8), st.data())
def test_what_is_sent_arrives_however_it_is_cut(sent, data):
    stream = b"".join(map(encode, sent))
    parser, received = Parser(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        received += parser.feed(stream[:size])
        stream = stream[size:]
    assert received == sent
    assert parser.error is None


@given(st.binary(max_size=6000), st.lists(st.integers(1, 500), max_size=5))
def test_random_bytes_are_refused_or_waited_for(data, cuts):
    parser = Parser()
    for cut in cuts:
        parser.feed(data[:cut])
        data = data[cut:]
    parser.feed(data)
    assert len(parser._buffer) <= wire.MAX_PAYLOAD + 6
    if parser.error is not None:
        assert parser.feed(encode(Beat(1))) == []


@given(frames, st.integers(0, 5000), st.integers(0, 255))
def test_a_changed_byte_never_breaks_the_parser(frame, position, value):
    data = bytearray(encode(frame))
    data[position % len(data)] = value
    parser = Parser()
    parser.feed(bytes(data))
    assert isinstance(parser.error, str | None)


@given(frames, st.binary(max_size=80))
def test_a_payload_of_the_wrong_length_is_refused_or_another_detail(frame, more):
    data = encode(frame)
    payload = data[6:] + more
    parser = Parser()
    found = parser.feed(data[:4] + len(payload).to_bytes(2, "big") + payload)
    assert parser.error is not None or not more or isinstance(frame, Broken | Told)
    assert len(found) <= 1


def test_frames_before_garbage_are_still_heard():
    parser = Parser()
    assert parser.feed(encode(Beat(1)) + b"GET / HTTP/1.1\r\n\r\n") == [Beat(1)]
    assert "begins with" in parser.error


@pytest.mark.parametrize(
    "data",
    [
        b"xx\x01\x07\x00\x04....",
        b"m8\x02\x07\x00\x04....",
        b"m8\x01\x63\x00\x04....",
        b"m8\x01\x07\x10\x01",
        b"m8\x01\x07\x00\x05.....",
        b"m8\x01\x03\x00\x06\x00\x00\x00\x00\x02\x01",
        b"m8\x01\x03\x00\x06\x00\x00\x00\x00\x00\x09",
        b"m8\x01\x04\x00\x0b\x00\x00\x00\x00\x00\x00\x09\x00\x00\x00\x00",
        b"m8\x01\x06\x00\x09\x00\x00\x00\x00\x00\x00\x09\x00\x00",
        b"m8\x01\x06\x00\x09\x00\x00\x00\x00\x00\x00\x00\x03\x00",
        b"m8\x01\x06\x00\x0a\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff",
    ],
)
def test_what_is_no_frame_is_an_error_with_its_reason(data):
    parser = Parser()
    assert parser.feed(data) == []
    assert parser.error


def test_long_details_and_many_ranks_are_cut_and_still_fit():
    frame = Broken("k" * wire.MAX_KEY, Cause.HUNG, tuple(range(5000)), "ä" * 5000 + "\ud800")
    [read] = Parser().feed(encode(frame))
    assert read.ranks == tuple(range(wire.MAX_RANKS))
    assert read.detail == "ä" * (wire.MAX_DETAIL // 2)


@pytest.mark.parametrize(
    "frame",
    [
        Attached("k" * 513, 0), Attached("k", -1), Hello("ab", "cd", b"n" * 16), Attach("k", 0, b"short"),
        Hello("0" * 32, "0" * 32, b"n"),
    ],
)  # fmt: skip
def test_a_field_that_does_not_fit_cannot_be_sent(frame):
    with pytest.raises(ValueError, match="bytes"):
        encode(frame)


def test_intervals_are_whole_milliseconds_and_never_nothing():
    assert Parser().feed(encode(Need(0.0000001))) == [Need(0.001)]


# -- who proves what to whom


def pair():
    dialer = PeerConnection(1, "1" * 32, b"a" * 16, dialed=True, since=0.0, peer="2" * 32)
    listener = PeerConnection(2, "2" * 32, b"b" * 16, dialed=False, since=0.0)
    assert listener.greet(dialer.hello())
    assert dialer.greet(listener.hello())
    return dialer, listener


def test_a_proof_holds_for_its_token_place_and_direction_only():
    dialer, listener = pair()
    place = ("w/1", 0)
    given_ = dialer.offer(b"t" * 16, place).proof
    assert listener.holds(b"t" * 16, place, given_)
    assert not listener.holds(b"u" * 16, place, given_)
    assert not listener.holds(b"t" * 16, ("w/1", 1), given_)
    assert not listener.holds(b"t" * 16, ("w/2", 0), given_)
    assert not dialer.holds(b"t" * 16, place, given_), "handed back to its maker"
    assert dialer.holds(b"t" * 16, place, listener.offer(b"t" * 16, place).proof)


def test_a_proof_does_not_hold_on_another_connection():
    dialer, _ = pair()
    given_ = dialer.offer(b"t" * 16, ("w/1", 0)).proof
    other = PeerConnection(3, "2" * 32, b"c" * 16, dialed=False, since=0.0)
    other.greet(dialer.hello())
    assert not other.holds(b"t" * 16, ("w/1", 0), given_)


def test_greetings_that_are_none():
    dialer = PeerConnection(1, "1" * 32, b"a" * 16, dialed=True, since=0.0, peer="2" * 32)
    assert not dialer.greet(Hello("3" * 32, "1" * 32, b"n" * 16))
    assert not dialer.greet(Hello("2" * 32, "3" * 32, b"n" * 16))
    listener = PeerConnection(2, "2" * 32, b"b" * 16, dialed=False, since=0.0)
    assert not listener.greet(Hello("2" * 32, "2" * 32, b"n" * 16))
    assert listener.greet(Hello("1" * 32, "2" * 32, b"n" * 16))
    assert not listener.knocking
    assert not listener.greet(Hello("1" * 32, "2" * 32, b"n" * 16))
    late = PeerConnection(3, "2" * 32, b"b" * 16, dialed=False, since=0.0)
    assert late.greet(Hello("3" * 32, "2" * 32, b"n" * 16))
    assert late.knocking
