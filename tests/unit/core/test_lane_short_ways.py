"""The short ways of small messages, which write and read one frame at once; and what the lane tells of itself."""

from __future__ import annotations

import pytest
from kits.lanekit import Network, payload

from multiworld._core.lane import frames
from multiworld._core.lane.lane import Lane
from multiworld._core.lane.matching import Matching
from multiworld._core.lane.operations import Receive, Send, SizesDifferError

HEAD = frames.HEADER.size


def outgoing(net):
    return net.lanes[0].peers[1].outgoing


def arrived(net, data):
    """Put bytes where rank 1 reads next, as one read of its connection."""
    peer = net.lanes[1].peers[0]
    peer.incoming.want()[: len(data)] = data
    return peer


def test_a_message_is_written_and_taken_at_once():
    net = Network(2)
    data = outgoing(net).at_once(3, 7, 4) + b"abcd"
    assert not outgoing(net).pending
    peer = arrived(net, data)
    assert net.lanes[1].quiet(peer)
    assert bytes(peer.incoming.whole(len(data), 3, 7, 4)) == b"abcd"
    assert net.lanes[1].quiet(peer)


def test_what_is_taken_at_once_is_credited():
    net = Network(2)
    peer, sent = net.lanes[1].peers[0], 0
    while not peer.outgoing.pending:
        assert outgoing(net).at_once(0, 0, 4000) is not None
        peer.taken(4000)
        sent += 1
    assert sent * frames.cost(4000) >= frames.BUDGET // 4
    net.settle()
    drain = net.lanes[0].drain(1)
    assert drain.done  # all that was sent is credited


@pytest.mark.parametrize(
    ("channel", "tag", "size", "more"), [(2, 1, 4, 0), (1, 2, 4, 0), (1, 1, 5, 0), (1, 1, 4, 1)]
)
def test_another_message_than_the_one_that_is_waited_for_is_read_the_long_way(channel, tag, size, more):
    net = Network(2)
    data = outgoing(net).at_once(1, 1, 4) + b"abcd"
    peer = arrived(net, data + bytes(more))
    assert peer.incoming.whole(len(data) + more, channel, tag, size) is None
    peer.incoming.got(len(data))
    got = net.receive(1, 0, 4, 1, 1)
    assert got.done
    assert bytes(got.view) == b"abcd"


def test_a_control_frame_is_no_message():
    net = Network(2)
    peer = arrived(net, frames.pack(frames.CREDIT))
    assert peer.incoming.whole(HEAD, 0, 0, 0) is None


def test_nothing_is_written_past_what_waits_to_be_written():
    net = Network(2)
    net.send(0, 1, payload(4, 1))
    assert outgoing(net).at_once(0, 0, 4) is None
    net.settle()
    assert outgoing(net).at_once(0, 0, 4) is not None


def test_large_messages_and_those_without_credit_are_posted():
    net = Network(2)
    assert outgoing(net).at_once(0, 0, frames.EAGER_LIMIT + 1) is None
    count = 0
    while outgoing(net).at_once(0, 0, frames.EAGER_LIMIT) is not None:
        count += 1
        assert outgoing(net).low is (count * frames.cost(frames.EAGER_LIMIT) > frames.BUDGET // 2)
    assert count == frames.BUDGET // frames.cost(frames.EAGER_LIMIT)


@pytest.mark.parametrize("count", [0, 1, HEAD, HEAD + 3])
def test_a_message_that_is_half_written_goes_on(count):
    net = Network(2)
    send = Send(1, 0, 0, memoryview(bytearray(b"abcdefgh")))
    head = outgoing(net).at_once(0, 0, 8)
    outgoing(net).half_written(head, send, count)
    assert not send.done
    wire = bytes(head) + b"abcdefgh"
    assert b"".join(bytes(view) for view in outgoing(net).views()) == wire[count:]
    outgoing(net).wrote(len(wire) - count)
    assert send.done


def test_a_lane_is_quiet_only_while_nothing_waits():
    net = Network(2)
    lane, peer = net.lanes[1], net.lanes[1].peers[0]
    assert lane.quiet(peer)
    got = net.receive(1, 0, 4)
    assert not lane.quiet(peer)
    assert lane.cancel(got)
    assert lane.quiet(peer)
    net.send(0, 1, payload(4, 1))
    net.settle()
    assert not lane.quiet(peer)
    net.receive(1, 0, 4)
    assert lane.quiet(peer)
    peer.incoming.want()[:1] = b"\1"
    peer.incoming.got(1)
    assert not lane.quiet(peer)


def test_a_lane_that_ended_is_not_quiet_and_drains_nothing():
    lane = Lane([1])
    lane.fail(OSError("over"))
    assert not lane.quiet(lane.peers[1])
    drain = lane.drain(1)
    assert drain.done
    assert isinstance(drain.error, OSError)


def test_each_want_is_for_one_message():
    net = Network(2)
    out = outgoing(net)
    while out.at_once(0, 0, frames.EAGER_LIMIT) is not None:
        pass
    held = net.send(0, 1, payload(frames.EAGER_LIMIT, 1))
    out.wanted(5, 5)
    out.wanted(5, 5)
    sends = [net.send(0, 1, payload(4, number), 5, 5) for number in range(3)]
    assert [each.id != 0 for each in sends] == [True, True, False]  # announced, though there is no credit
    assert held.id == 0


def test_what_does_not_wait_cannot_be_cancelled():
    assert not Matching().cancel(Receive(0, 0, 0, memoryview(bytearray(4)), 1))


def test_sizes_that_differ_are_told():
    told = str(SizesDifferError(4, 5, 2))
    assert told == "a message of 4 bytes was sent by rank 2, and 5 are expected"
