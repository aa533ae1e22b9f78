"""Members that close ask others, over the watchdogs, to read what they sent."""

from __future__ import annotations

import pytest
from kits.peerkit import Net, rosters

from multiworld._core.liveness.actions import ReadUnread
from multiworld._core.liveness.wire import Parser, Unread, encode

W = "w/1"


def joined(*numbers):
    net = Net(*dict.fromkeys(numbers))
    net.join(rosters("w", numbers))
    return net


def ask(net, number, rank, ranks, key=W):
    net[number].peers.unread_messages.ask((key, rank), ranks)
    net[number].act()
    net.run()


def looks(net):
    return {number: node.looks for number, node in net.nodes.items() if node.looks}


def test_who_is_asked_looks_and_nobody_else():
    net = joined(1, 2, 3)
    net.join(rosters("other", (1, 2, 3)))
    ask(net, 1, 0, (2,))
    assert looks(net) == {3: [ReadUnread((W, 2), 0)]}
    ask(net, 3, 2, (0, 1))
    assert looks(net) == {1: [ReadUnread((W, 0), 2)], 2: [ReadUnread((W, 1), 2)], 3: [ReadUnread((W, 2), 0)]}
    ask(net, 2, 1, ())
    assert sum(map(len, looks(net).values())) == 3


def test_ranks_of_one_process_are_asked_without_a_frame_and_others_once():
    net = joined(1, 1, 2, 2)
    ask(net, 1, 0, (1, 2, 3))
    assert looks(net) == {1: [ReadUnread((W, 1), 0)], 2: [ReadUnread((W, 2), 0), ReadUnread((W, 3), 0)]}
    ask(net, 1, 0, (2,))
    assert len(net[1].looks) == 1


def test_a_world_that_is_over_is_neither_asked_about_nor_looked_at():
    net = joined(1, 2)
    net.join(rosters("other", (1, 2)))  # which keeps the connection
    net[2].remove((W, 1))
    ask(net, 1, 0, (1,))
    net[1].remove((W, 0))
    ask(net, 1, 0, (1,))
    assert looks(net) == {}


def test_a_member_whose_connection_is_lost_is_not_asked():
    net = joined(1, 2)
    net.crash(2)
    net.run()
    ask(net, 1, 0, (1,))
    assert looks(net) == {}


@pytest.mark.parametrize(("key", "rank"), [("other/1", 2), (W, 1), (W, 7), ("w/2", 2)])
def test_who_is_no_such_member_is_not_heard(key, rank):
    net = joined(1, 2, 3)
    net.join(rosters("other", (1, 2)))
    channel = net[1].peers._trusted[f"{3:032x}"].channel
    net[1].peers.received(channel, [Unread(key, rank)], net.now)
    net[1].settle()
    net.run()
    assert looks(net) == {}
    assert not net[1].broken  # it may have been one until a moment ago


def test_a_stranger_is_not_heard():
    net = joined(1, 2)
    net[1].peers.accepted(99, net.now)
    net[1].peers.received(99, [Unread(W, 1)], net.now)
    net[1].settle()
    assert looks(net) == {}


def test_the_frame_has_a_key_and_a_rank_and_nothing_more():
    data = encode(Unread(W, 3))
    assert Parser().feed(data) == [Unread(W, 3)]
    parser = Parser()
    assert parser.feed(data[:4] + (len(data) - 5).to_bytes(2, "big") + data[6:] + b"x") == []
    assert "type 11" in parser.error
