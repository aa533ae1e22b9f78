"""Members ask each other, over the watchdogs, what they are doing."""

from __future__ import annotations

import pytest
from kits.peerkit import Net, rosters

from multiworld._core.liveness.actions import Hear
from multiworld._core.liveness.questions import PIECE, pieces
from multiworld._core.liveness.wire import MAX_KEY, Asked, Parser, Told, encode
from multiworld.events import Cause

W = "w/1"


def joined(*numbers):
    net = Net(*dict.fromkeys(numbers))
    net.join(rosters("w", numbers))
    for number, node in net.nodes.items():
        node.doing = f"node {number}".encode()
    return net


def ask(net, number, rank, *, question=7, deep=False):
    net[number].peers.questions.ask((W, rank), question, deep=deep)
    net[number].act()
    net.run()


def heard(net):
    return {number: node.heard for number, node in net.nodes.items() if node.heard}


def test_all_others_are_asked_and_only_the_one_that_asks_hears():
    net = joined(1, 2, 3)
    net.join(rosters("other", (1, 2, 3)))
    ask(net, 1, 0)
    assert heard(net) == {
        1: [Hear((W, 0), 1, 7, b"node 2", True), Hear((W, 0), 2, 7, b"node 3", True)]
    }  # fmt: skip
    net[1].heard.clear()
    ask(net, 3, 2, question=8, deep=True)
    assert heard(net) == {
        3: [Hear((W, 2), 0, 8, b"deep node 1", True), Hear((W, 2), 1, 8, b"deep node 2", True)]
    }  # fmt: skip


def test_two_ranks_of_one_process_answer_each():
    net = joined(1, 2, 2)
    ask(net, 1, 0)
    assert [each.rank for each in net[1].heard] == [1, 2]
    net[1].heard.clear()
    ask(net, 2, 1)  # what this process's own members do it need not ask for
    assert [(each.world, each.rank) for each in net[2].heard] == [((W, 1), 0), ((W, 2), 0)]


def test_a_long_answer_comes_in_pieces():
    net = joined(1, 2)
    net[2].doing = bytes(range(256)) * 40
    ask(net, 1, 0)
    assert [len(each.piece) for each in net[1].heard] == [PIECE, PIECE, PIECE, 256 * 40 - 3 * PIECE]
    assert b"".join(each.piece for each in net[1].heard) == net[2].doing
    assert [each.last for each in net[1].heard] == [False, False, False, True]


@pytest.mark.parametrize(("size", "count"), [(0, 1), (1, 1), (PIECE, 1), (PIECE + 1, 2), (2 * PIECE, 2)])
def test_every_piece_fits_and_the_last_one_says_so(size, count):
    found = list(pieces(("k" * MAX_KEY, 3), 9, b"x" * size))
    assert [each.last for each in found] == [False] * (count - 1) + [True]
    assert Parser().feed(b"".join(map(encode, found))) == found


def test_a_world_that_is_over_is_neither_asked_about_nor_answered_for():
    net = joined(1, 2)
    net.join(rosters("other", (1, 2)))  # which keeps the connection
    net[2].remove((W, 1))
    ask(net, 1, 0)
    net[1].remove((W, 0))
    ask(net, 1, 0)
    assert heard(net) == {}


def test_a_member_whose_connection_is_lost_is_not_asked():
    net = joined(1, 2)
    net.crash(2)
    net.run()
    ask(net, 1, 0)
    assert heard(net) == {}


def test_members_of_a_broken_world_answer_until_it_is_released():
    net = joined(1, 2, 3)
    net.crash(3)
    net.run()
    assert {number: net[number].broken[W, number - 1].cause for number in (1, 2)} == {
        1: Cause.CRASHED,
        2: Cause.CRASHED,
    }
    ask(net, 1, 0)
    ask(net, 2, 1)
    assert {number: [each.rank for each in found] for number, found in heard(net).items()} == {1: [1], 2: [0]}
    net[1].remove((W, 0))
    ask(net, 2, 1)
    assert len(net[2].heard) == 1


@pytest.mark.parametrize(("key", "rank"), [("other/1", 2), (W, 1), (W, 7), ("w/2", 2)])
def test_one_that_is_no_such_member_is_not_heard(key, rank):
    net = joined(1, 2, 3)
    net.join(rosters("other", (1, 2)))
    channel = net[1].peers._trusted[f"{3:032x}"].channel
    net[1].peers.received(channel, [Asked(key, rank, 1, True), Told(key, rank, 1, b"x", True)], net.now)
    net[1].settle()
    net.run()
    assert heard(net) == {}
    assert not net[1].broken


def test_a_stranger_is_not_heard():
    net = joined(1, 2)
    net[1].peers.accepted(99, net.now)
    net[1].peers.received(99, [Asked(W, 1, 1, False), Told(W, 1, 1, b"x", True)], net.now)
    net[1].settle()
    net.run()
    assert heard(net) == {}


@pytest.mark.parametrize(
    ("frame", "code"), [(Asked(W, 3, 5, True), 12), (Told(W, 3, 5, b"", True), 13)]
)  # fmt: skip
def test_the_frames_are_not_shorter(frame, code):
    data = encode(frame)
    assert Parser().feed(data) == [frame]
    parser = Parser()
    assert parser.feed(data[:4] + (len(data) - 7).to_bytes(2, "big") + data[6:-1]) == []
    assert f"type {code}" in parser.error
