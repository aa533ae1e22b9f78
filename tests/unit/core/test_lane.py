"""The lane's protocol: what a user of two connected members sees, and what a connection may not do."""

from __future__ import annotations

import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.lanekit import Network, payload

from multiworld._core.lane import frames
from multiworld._core.lane.frames import ProtocolError, pack
from multiworld._core.lane.lane import Lane
from multiworld._core.lane.operations import SizesDifferError

SIZES = [
    0, 1, 4, 4064, 4065, frames.READ_FROM, frames.READ_FROM + 1, frames.EAGER_LIMIT, frames.EAGER_LIMIT + 1,
    3 * frames.CHUNK + 5,
]  # fmt: skip


def over(*operations):
    assert all(each.done and each.error is None for each in operations), operations


@pytest.mark.parametrize("readable", [False, True], ids=["wire", "memory"])
@pytest.mark.parametrize("first", ["send", "receive"])
@pytest.mark.parametrize("size", SIZES)
def test_a_message(size, first, readable):
    net = Network(2, readable=readable)
    data = payload(size, 7)
    if first == "send":
        sent = net.send(0, 1, data)
        net.settle()
        got = net.receive(1, 0, size)
    else:
        got = net.receive(1, 0, size)
        net.settle()
        sent = net.send(0, 1, data)
    net.settle()
    over(sent, got)
    assert bytes(got.view) == data
    assert got.sender == 0
    assert net.lanes[1].take_finished() == [got]
    assert net.lanes[1].peers[0].incoming.between_frames


def test_a_channel_has_what_came_and_no_receive_took():
    net = Network(2)
    net.send(0, 1, payload(4, 1), channel=7)
    assert not net.lanes[1].has_come(7)
    net.settle()
    assert net.lanes[1].has_come(7)
    assert not net.lanes[1].has_come(8)
    net.receive(1, 0, 4, channel=7)
    assert not net.lanes[1].has_come(7)


def test_an_announced_message_stays_with_its_sender_until_it_is_asked_for():
    net = Network(2)
    sent = net.send(0, 1, payload(1 << 20, 1))
    net.settle()
    assert not sent.done
    got = net.receive(1, 0, 1 << 20)
    net.settle()
    over(sent, got)


@pytest.mark.parametrize("size", [4, 1 << 20])
@pytest.mark.parametrize("first", ["send", "receive"])
@pytest.mark.parametrize("expected", [0, 3, 5, 2 << 20])
def test_a_size_that_differs_is_told_and_the_next_message_is_whole(size, first, expected):
    net = Network(2)
    data = payload(size, 9)
    if first == "send":
        sent = net.send(0, 1, data)
        net.settle()
    wrong = net.receive(1, 0, expected)
    if first == "receive":
        sent = net.send(0, 1, data)
    net.settle()
    assert isinstance(wrong.error, SizesDifferError)
    assert (wrong.error.sent, wrong.error.expected) == (size, expected)
    assert not any(wrong.view), "not a byte is written"
    over(sent)
    after, got = net.send(0, 1, data), net.receive(1, 0, size)
    net.settle()
    over(after, got)
    assert bytes(got.view) == data


def test_channels_and_tags_keep_apart():
    net = Network(2)
    keys = [(0, 0), (1, 0), (0, 1), (2**56 - 1, 2**32 - 1)]
    for number, (channel, tag) in enumerate(keys):
        net.send(0, 1, payload(8, number), channel, tag)
    got = [net.receive(1, 0, 8, channel, tag) for channel, tag in reversed(keys)]
    net.settle()
    assert [bytes(each.view) for each in got] == [payload(8, number) for number in (3, 2, 1, 0)]


def test_any_source_takes_sources_in_turns():
    net = Network(4)
    for number in range(6):
        for src in (1, 2, 3):
            net.send(src, 0, payload(8, number))
    net.settle()
    senders = []
    for _ in range(18):
        got = net.receive(0, None, 8)
        over(got)
        senders.append(got.sender)
    turns = [frozenset(senders[at : at + 3]) for at in range(0, 18, 3)]
    assert turns == [frozenset((1, 2, 3))] * 6


def test_the_receive_that_was_posted_first_gets_the_message():
    net = Network(3)
    whoever, named = net.receive(0, None, 8), net.receive(0, 1, 8)
    net.send(1, 0, payload(8, 1))
    net.send(1, 0, payload(8, 2))
    net.settle()
    assert [bytes(each.view) for each in (whoever, named)] == [payload(8, 1), payload(8, 2)]


@pytest.mark.parametrize("size", [8, 1 << 20])
@pytest.mark.parametrize("steps", range(12))
def test_a_cancelled_receive_loses_nothing(size, steps):
    """Wherever it is cancelled: before its message, while that comes, or too late."""
    net = Network(2, seed=steps, most=100_000)
    first = net.receive(1, 0, size)
    net.send(0, 1, payload(size, 1))
    net.send(0, 1, payload(size, 2))
    for _ in range(steps):
        net.step()
    was_done, kept = first.done, bytes(first.view)
    assert net.lanes[1].cancel(first) is not was_done
    for _ in range(steps):
        net.step()
    rest = [net.receive(1, 0, size) for _ in range(2 - was_done)]
    net.settle()
    got = [first, *rest] if was_done else rest
    over(*got)
    assert [bytes(each.view) for each in got] == [payload(size, 1), payload(size, 2)]
    assert bytes(first.view) == kept, "its buffer is the caller's again"


def until_read(net):
    while not (read := net.lanes[1].next_read()):
        assert net.step()
    return read


@pytest.mark.parametrize("how", ["cancel", "take_back"])
@pytest.mark.parametrize("succeeded", [True, False])
@pytest.mark.parametrize("next_one", ["waits", "comes later"])
def test_a_receive_is_cancelled_whose_message_is_being_read_from_memory(how, succeeded, next_one):
    """The read that was under way is void; the sender keeps the message, which is read for the next receive."""
    size = 1 << 20
    net = Network(2, readable=True)
    lane, first = net.lanes[1], net.receive(1, 0, size)
    if next_one == "waits":
        following = net.receive(1, 0, size)
    sent = net.send(0, 1, payload(size, 1))
    void = until_read(net)
    getattr(lane, how)(first)
    assert first.done
    if next_one == "comes later":
        assert not lane.next_read()
        following = net.receive(1, 0, size)
    read = lane.next_read()
    lane.read(void, succeeded=succeeded)
    assert not sent.done
    assert not following.done
    read.view[:] = payload(size, 1)
    lane.read(read, succeeded=True)
    net.settle()
    over(sent, following)
    assert bytes(following.view) == payload(size, 1)
    assert not any(first.view)
    assert following not in lane._state.matched


def test_messages_are_read_from_memory_in_turns_a_piece_at_a_time(monkeypatch):
    monkeypatch.setattr(frames, "PIECE", 400_000)
    net, size = Network(2, readable=True), 1_000_000
    lane = net.lanes[1]
    for number in range(2):
        net.send(0, 1, payload(size, number), tag=number)
    net.settle()
    got = [net.receive(1, 0, size, tag=tag) for tag in range(2)]
    pieces = []
    while (read := lane.next_read()) is not None:
        at = read.arrival.received
        read.view[:] = net.memory[read.address - at][at : at + len(read.view)]
        pieces.append((read.arrival.tag, len(read.view)))
        lane.read(read, succeeded=True)
    assert pieces == [(tag, count) for count in (400_000, 400_000, 200_000) for tag in (0, 1)]
    net.settle()
    over(*got)
    assert [bytes(each.view) for each in got] == [payload(size, number) for number in range(2)]


def test_memory_that_cannot_be_read_any_more(monkeypatch):
    """After the first piece: the bytes travel, all of them."""
    monkeypatch.setattr(frames, "PIECE", 400_000)
    net, size = Network(2, readable=True), 1_000_000
    sent, got = net.send(0, 1, payload(size, 1)), net.receive(1, 0, size)
    read = until_read(net)
    read.view[:] = payload(400_000, 1)
    net.lanes[1].read(read, succeeded=True)
    net.lanes[1].read(net.lanes[1].next_read(), succeeded=False)
    assert net.lanes[1].next_read() is None
    net.settle()
    over(sent, got)
    assert bytes(got.view) == payload(size, 1)
    net.send(0, 1, payload(size, 2))
    again = net.receive(1, 0, size)
    net.settle()
    assert bytes(again.view) == payload(size, 2)


def test_a_read_that_was_not_taken_goes_with_its_receive():
    net = Network(2, readable=True)
    net.send(0, 1, payload(1 << 20, 1))
    net.settle()
    assert net.lanes[1].cancel(net.receive(1, 0, 1 << 20))
    assert not net.lanes[1].next_read()


@pytest.mark.parametrize("readable", [False, True], ids=["wire", "memory"])
@pytest.mark.parametrize("size", [0, 8, frames.EAGER_LIMIT, 1 << 20])
def test_a_receive_that_is_over_is_taken_back(size, readable):
    """Its message goes before later ones, which wait already; of other tags and sources nothing changes."""
    net = Network(3, readable=readable)
    for number in range(3):
        net.send(0, 1, payload(size, number))
        net.send(2, 1, payload(size, 10 + number))
    got = [net.receive(1, 0, size) for _ in range(2)]
    net.settle()
    over(*got)
    lane = net.lanes[1]
    for each in reversed(got):  # whatever the order in which they are taken back
        lane.take_back(each)
        lane.take_back(each)  # once more: nothing
        assert each.done
        assert not lane.cancel(each)
        each.view[:] = bytes(size)
    again = [net.receive(1, 0, size) for _ in range(3)]
    others = [net.receive(1, 2, size) for _ in range(3)]
    net.settle()
    over(*again, *others)
    assert [bytes(each.view) for each in again] == [payload(size, number) for number in range(3)]
    assert [bytes(each.view) for each in others] == [payload(size, 10 + number) for number in range(3)]
    assert not net.receive(1, 0, size).done, "each message is there once"


def test_what_is_taken_back_goes_to_a_receive_that_waits():
    net = Network(2)
    net.send(0, 1, payload(8, 1))
    net.settle()
    first, second = net.receive(1, 0, 8), net.receive(1, 0, 8)
    net.lanes[1].take_back(first)
    over(second)
    assert bytes(second.view) == payload(8, 1)
    assert second.sender == 0


def test_a_receive_that_is_under_way_is_taken_back():
    net = Network(2)
    first, second = net.receive(1, 0, 8), net.receive(1, 0, 8)
    net.lanes[1].take_back(first)
    net.send(0, 1, payload(8, 1))
    net.settle()
    over(second)
    assert first not in net.lanes[1].take_finished()


def test_what_was_cancelled_half_way_is_not_taken_back_as_well():
    net = Network(2, most=10_000)
    first = net.receive(1, 0, 1 << 20)
    net.send(0, 1, payload(1 << 20, 1))
    while first.arrival is None or not first.arrival.received:
        net.step()
    lane = net.lanes[1]
    assert lane.cancel(first)
    lane.take_back(first)
    net.settle()
    assert lane._state.matching.arrivals == 1


def test_an_announced_message_that_is_taken_back_costs_as_little_as_before():
    """So that its bytes, which the sender was not credited for, do not keep other messages from coming."""
    net = Network(2)
    net.send(0, 1, payload(8 << 20, 1))
    theirs, before = net.lanes[1].peers[0], net.lanes[1].peers[0]._owed
    got = net.receive(1, 0, 8 << 20)
    net.settle()
    assert theirs._owed == before + frames.OVERHEAD
    for _ in range(2):
        net.lanes[1].take_back(got)
        assert theirs._owed == before
        got = net.receive(1, 0, 8 << 20)
        assert theirs._owed == before + frames.OVERHEAD


def test_what_cannot_be_taken_back():
    """Errors, what was cancelled, and what had come before the lane's end."""
    net = Network(2)
    wrong, cancelled, over_before, waits = (net.receive(1, 0, size) for size in (4, 8, 8, 9))
    net.lanes[1].cancel(cancelled)
    for number in (1, 2):
        net.send(0, 1, payload(8, number))
    net.settle()
    assert isinstance(wrong.error, SizesDifferError)
    over(over_before)
    for each in (wrong, cancelled):
        net.lanes[1].take_back(each)
    assert not waits.done
    net.lanes[1].fail(ConnectionError("over"))
    for each in (over_before, waits):
        net.lanes[1].take_back(each)
    assert isinstance(waits.error, ConnectionError)
    assert not net.lanes[1]._state.matching.arrivals


def test_a_message_is_credited_once_however_often_it_is_taken_back():
    net = Network(2)
    mine, theirs = net.lanes[0].peers[1], net.lanes[1].peers[0]
    for number in range(40):
        net.send(0, 1, payload(frames.EAGER_LIMIT, number))
        got = net.receive(1, 0, frames.EAGER_LIMIT)
        net.settle()
        for _ in range(3):
            net.lanes[1].take_back(got)
            got = net.receive(1, 0, frames.EAGER_LIMIT)
            net.settle()
        assert bytes(got.view) == payload(frames.EAGER_LIMIT, number)
        assert mine.outgoing._credit + theirs._owed == frames.BUDGET


# -- what owns the buffers ------------------------------------------------------------------------------------------


class Owner:
    """Of memory that a view lies in."""


def owned(size):
    return memoryview(bytearray(size)), (owner := Owner()), weakref.ref(owner)


@pytest.mark.parametrize("readable", [False, True], ids=["wire", "memory"])
@pytest.mark.parametrize("first", ["send", "receive"])
@pytest.mark.parametrize("size", SIZES)
def test_owners_are_kept_until_the_end_of_their_operations(size, first, readable):
    net = Network(2, readable=readable)
    sends, owner, source = owned(size)
    net.memory[1 << 32] = sends
    posted = []
    for what in (first, "receive" if first == "send" else "send"):
        if what == "send":
            posted.append(net.lanes[0].send(1, 0, 0, sends, int(readable) << 32, keep=owner))
            del owner
        else:
            receives, target, sink = owned(size)
            posted.append(net.lanes[1].receive(0, 0, 0, receives, keep=target))
            del target
        for each in posted:
            assert (each.keep is None) is each.done
    net.settle()
    over(*posted)
    assert source() is None
    assert sink() is None


@pytest.mark.parametrize("size", [8, 1 << 20])
@pytest.mark.parametrize("how", ["cancel", "fail", "fail before", "sizes"])
@pytest.mark.parametrize("steps", [0, 3, 6])
def test_owners_are_released_however_operations_end(size, how, steps):
    net = Network(2, most=1000)
    if how == "fail before":
        net.lanes[0].fail(ConnectionError("over"))
        net.lanes[1].fail(ConnectionError("over"))
    sends, owner, source = owned(size)
    send = net.lanes[0].send(1, 0, 0, sends, keep=owner)
    receives, target, sink = owned(size - (how == "sizes"))
    receive = net.lanes[1].receive(0, 0, 0, receives, keep=target)
    del owner, target
    for _ in range(steps):
        net.step()
    if how == "cancel":
        net.lanes[1].cancel(receive)
    elif how == "fail":
        for lane in net.lanes:
            lane.fail(ConnectionError("over"))
    elif how == "sizes":
        net.settle()
    assert sink() is None
    if how != "cancel":
        assert source() is None
    assert receive.done
    assert send.done is (source() is None)


# -- the budget -----------------------------------------------------------------------------------------------------


def unclaimed(net, rank=1):
    """Bytes that this member keeps without a receive."""
    arrivals = net.lanes[rank]._state.matching._arrivals
    found = [one for sources in arrivals.values() for came in sources.values() for one in came]
    return sum(frames.OVERHEAD + (one.size if one.view is not None else 0) for one in found)


@pytest.mark.parametrize("size", [0, 100, 50_000, frames.EAGER_LIMIT, frames.EAGER_LIMIT + 1])
def test_messages_without_a_receive_are_bounded(size, monkeypatch):
    monkeypatch.setattr(frames, "BUDGET", 1 << 19 if size <= frames.EAGER_LIMIT else 1 << 16)
    net = Network(2)
    each = frames.cost(size) if size <= frames.EAGER_LIMIT else frames.OVERHEAD
    count = 3 * frames.BUDGET // each
    sends = [net.send(0, 1, payload(size, number)) for number in range(count)]
    net.settle()
    assert unclaimed(net) <= frames.BUDGET
    assert not sends[-1].done
    got = [net.receive(1, 0, size) for _ in range(count)]
    net.settle()
    over(*sends, *got)
    assert all(bytes(each.view) == payload(size, number) for number, each in enumerate(got))


@pytest.mark.parametrize("source", [0, None])
@pytest.mark.parametrize("posted", ["before", "after"])
def test_a_message_with_a_receive_does_not_wait_for_those_without(source, posted):
    net = Network(2)
    if posted == "before":
        got = net.receive(1, source, 8, tag=1)
    for number in range(frames.BUDGET // frames.OVERHEAD + 10):
        net.send(0, 1, b"", tag=0)
        if posted == "before" and number == frames.BUDGET // frames.OVERHEAD + 5:
            net.settle()  # it is asked for before it is sent
    sent = net.send(0, 1, payload(8, 1), tag=1)
    net.settle()
    if posted == "after":
        assert not sent.done
        got = net.receive(1, source, 8, tag=1)
        net.settle()
    over(sent, got)


def test_held_messages_follow_as_others_are_taken():
    net = Network(2)
    count = frames.BUDGET // frames.OVERHEAD
    sends = [net.send(0, 1, b"") for _ in range(count + 2)]
    net.settle()
    assert [each.done for each in sends[-3:]] == [True, False, False]
    net.receive(1, 0, 0)
    net.settle()
    assert [each.done for each in sends[-3:]] == [True, True, False]


def test_a_message_is_credited_once_however_often_its_receive_is_cancelled():
    net = Network(2, most=1000)
    net.send(0, 1, payload(frames.EAGER_LIMIT, 1))
    for _ in range(60):
        got = net.receive(1, 0, frames.EAGER_LIMIT)
        net.step()
        assert net.lanes[1].cancel(got)
    got = net.receive(1, 0, frames.EAGER_LIMIT)
    net.settle()
    over(got)


def test_what_was_asked_for_while_messages_were_held_is_forgotten_with_them():
    net = Network(2)
    count = frames.BUDGET // frames.OVERHEAD + 1
    for _ in range(count):
        net.send(0, 1, b"")
    net.settle()
    net.lanes[1].cancel(net.receive(1, 0, 8, tag=1))
    for _ in range(count):
        net.receive(1, 0, 0)
    net.settle()
    sent = net.send(0, 1, payload(8, 1), tag=1)
    net.settle()
    over(sent)  # at once, not announced


# -- the end --------------------------------------------------------------------------------------------------------


def test_the_end_fails_all_that_is_not_over():
    net = Network(2, most=100_000)
    done = net.receive(1, 0, 8)
    net.send(0, 1, payload(8, 0))
    net.settle()
    sent = [net.send(0, 1, payload(size, 1)) for size in (8, 1 << 20)]
    got = [net.receive(1, 0, size) for size in (8, 1 << 20, 8)]
    for _ in range(12):
        net.step()
    error = ConnectionError("over")
    for lane in net.lanes:
        lane.fail(error)
        lane.fail(ValueError("again"))
    assert done.error is None
    for each in (sent[1], got[1], got[2]):
        assert each.done
        assert each.error is error
    assert net.receive(1, 0, 8).error is error
    assert net.send(0, 1, b"x").error is error
    assert len(net.lanes[1].take_finished()) == 5


@pytest.mark.parametrize("cancelled", [False, True])
def test_the_end_leaves_a_buffer_to_who_reads_into_it(cancelled):
    net = Network(2, readable=True)
    for tag in (0, 1):
        net.send(0, 1, payload(1 << 20, tag), tag=tag)
    got = [net.receive(1, 0, 1 << 20, tag=tag) for tag in (0, 1)]
    lane, error = net.lanes[1], ConnectionError("over")
    net._read = lambda rank: None  # nothing is read yet
    while len(lane.reads) < 2:
        net.step()
    read = lane.next_read()
    assert read.arrival is got[0].arrival
    lane.fail(error, read.arrival)
    assert (got[0].done, got[1].done) == (False, True)
    assert lane.next_read() is None
    if cancelled:
        assert lane.cancel(got[0])
    lane.read(read, succeeded=True)
    assert got[0].done
    assert got[0].error is (None if cancelled else error)
    assert lane.take_finished() == ([got[1]] if cancelled else [got[1], got[0]])


@pytest.mark.parametrize("readable", [False, True], ids=["wire", "memory"])
def test_messages_of_a_channel_are_dropped_and_credited(readable):
    net = Network(2, readable=readable)
    sent = [
        net.send(0, 1, payload(size, 3), channel=5, tag=tag) for tag in (0, 1) for size in (8, 4000, 1 << 20)
    ]
    kept = net.send(0, 1, payload(8, 4), channel=6)
    net.settle()
    assert not sent[-1].done
    net.lanes[1].drop(5)
    net.settle()
    over(*sent, kept)
    assert net.lanes[0].peers[1].outgoing._credit + net.lanes[1].peers[
        0
    ]._owed == frames.BUDGET - frames.cost(8)
    assert not net.receive(1, 0, 8, channel=5).done
    over(net.receive(1, 0, 8, channel=6))


@pytest.mark.parametrize("size", [200_000, 1 << 20])
def test_a_message_is_dropped_whose_rest_is_to_come(size):
    net = Network(2, most=100_000)
    sent = net.send(0, 1, payload(size, 3), channel=5)
    if size > frames.EAGER_LIMIT:
        got = net.receive(1, 0, size, channel=5)
        while not (got.arrival and got.arrival.received):
            net.step()
        net.lanes[1].cancel(got)
    else:
        while not net.lanes[1]._state.matching.arrivals:
            net.step()
    net.lanes[1].drop(5)
    net.settle()
    over(sent)
    assert net.lanes[1].peers[0].incoming.between_frames
    assert net.lanes[0].peers[1].outgoing._credit + net.lanes[1].peers[0]._owed == frames.BUDGET


# -- strangers ------------------------------------------------------------------------------------------------------


def feed(incoming, data, step=1 << 20):
    while data:
        want = incoming.want()
        count = min(len(want), len(data), step)
        want[:count] = data[:count]
        incoming.got(count)
        data = data[count:]


def fed(data, step=1 << 20):
    lane = Lane([1])
    feed(lane.peers[1].incoming, data, step)
    return lane


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (pack(frames.EAGER, size=frames.EAGER_LIMIT + 1), "without being asked for"),
        (pack(frames.DATA, id=1, size=1), "not asked for"),
        (pack(frames.DATA, id=1, size=frames.CHUNK + 1), "a part of"),
        (pack(frames.CLEAR, id=1), "not announced"),
        (pack(frames.DONE, id=1), "not announced"),
        (pack(frames.CREDIT, size=1), "more than were sent"),
        (pack(0), "kind 0"),
        (pack(9), "kind 9"),
    ],
)
def test_frames_that_cannot_be(frame, said):
    with pytest.raises(ProtocolError, match=said):
        fed(frame)


@given(data=st.binary(max_size=300), step=st.integers(1, 64))
def test_random_bytes(data, step):
    """They are an error, or messages that are not asked for; never another exception, never much memory."""
    try:
        lane = fed(data, step)
    except ProtocolError:
        return
    assert lane.take_finished() == []


def test_cuts_at_every_byte():
    net = Network(2)
    for number, size in enumerate((0, 5, 4090)):
        net.send(0, 1, payload(size, number))
    wire = b"".join(bytes(view) for view in net.lanes[0].peers[1].outgoing.views())
    for cut in range(len(wire) + 1):
        if 200 < cut < len(wire) - 200:
            continue
        lane = Lane([1])
        incoming = lane.peers[1].incoming
        feed(incoming, wire[:cut])
        feed(incoming, wire[cut:])
        for number, size in enumerate((0, 5, 4090)):
            got = lane.receive(1, 0, 0, memoryview(bytearray(size)))
            assert got.done, cut
            assert bytes(got.view) == payload(size, number)


@pytest.mark.parametrize("size", [4, frames.EAGER_LIMIT + 1])
def test_a_drain_is_over_when_receives_have_taken_all(size):
    net = Network(3)
    for number in range(3):
        net.send(0, 1, payload(size, number))
    drains = [net.lanes[0].drain(peer) for peer in (1, 2)]
    net.settle()
    assert [each.done for each in drains] == [False, True]
    for left in (2, 1, 0):
        net.receive(1, 0, size)
        net.settle()
        assert drains[0].done is (left == 0)
    again = net.lanes[0].drain(1)
    assert again.done


def test_a_drain_waits_for_what_is_taken_back():
    net = Network(2)
    net.send(0, 1, payload(4, 1))
    got = net.receive(1, 0, 4)
    net.settle()
    net.lanes[1].take_back(got)
    net.send(0, 1, payload(4, 2))
    drain = net.lanes[0].drain(1)
    net.settle()
    assert not drain.done
    for _ in range(2):
        net.receive(1, 0, 4)
    net.settle()
    assert drain.done


@pytest.mark.parametrize("ends", ["lost", "fail"])
def test_a_drain_ends_with_the_connection_or_the_lane(ends):
    net = Network(2)
    net.send(0, 1, payload(4, 1))
    drain = net.lanes[0].drain(1)
    net.settle()
    if ends == "lost":
        net.lanes[0].lost(1)
    else:
        net.lanes[0].fail(OSError("over"))
    assert drain.done
    assert (drain.error is None) is (ends == "lost")


def test_a_flush_is_over_once_the_control_frames_are_written():
    lane = Lane([1])
    outgoing = lane.peers[1].outgoing
    assert lane.flush(1) is None  # there are none
    outgoing.tell(pack(frames.CREDIT, size=1))
    flush = lane.flush(1)
    assert lane.flush(1) is None  # one is enough
    size = sum(map(len, outgoing.views()))
    outgoing.wrote(size - 1)
    assert not flush.done
    outgoing.wrote(1)
    assert flush.done
    assert not outgoing.pending
    lane.send(1, 0, 0, memoryview(b"1234"))
    outgoing.tell(pack(frames.CREDIT, size=1))
    assert lane.flush(1) is None  # who waits for the send writes them
    assert len(outgoing.views()) == 3
    assert lane.flush(1) is None


def test_any_source_takes_next_the_one_that_was_served_longest_ago():
    """Also where the messages of one that was served had all been taken, and others of it came first."""
    net = Network(3)
    waited = net.receive(0, None, 1)
    net.send(1, 0, b"a")
    net.settle()
    for sender in (1, 1, 2, 2):
        net.send(sender, 0, b"a")
        net.settle()
    senders = [waited.sender, *(net.receive(0, None, 1).sender for _ in range(4))]
    assert senders == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("forgets", ["drop", "many"])
def test_turns_are_not_kept_for_ever(forgets):
    net = Network(3)
    matching = net.lanes[0]._state.matching
    for tag in range(1 if forgets == "drop" else 2000):
        net.send(1, 0, b"a", tag=tag)
        net.settle()
        net.receive(0, None, 1, tag=tag)
    if forgets == "drop":
        assert matching._served
        net.lanes[0].drop(1)
        assert matching._served
        net.lanes[0].drop(0)
        assert not matching._served
    else:
        assert len(matching._served) == 1024
