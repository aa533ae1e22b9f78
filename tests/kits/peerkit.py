"""Whole groups of processes without a process: several `Peers`, a network and a clock, all in the test's hand."""

from __future__ import annotations

import itertools
from collections import deque

from multiworld._core.liveness.actions import (
    Answer,
    Break,
    Dial,
    Drop,
    Hear,
    Keep,
    Lost,
    ReadUnread,
    Ready,
    Refusal,
    Release,
    Send,
)
from multiworld._core.liveness.detector import ConnectionEnd, Probe
from multiworld._core.liveness.peers import Peers
from multiworld._core.liveness.questions import pieces
from multiworld._core.liveness.wire import Close, Parser, encode
from multiworld._core.membership.roster import Endpoint, Member, Roster

TOKEN = b"0123456789abcdef"


def process(number: int) -> str:
    return f"{number:032x}"


def rosters(name="w", processes=(1, 2), *, generation=1, token=TOKEN, hang=5.0, hangs=None) -> list[Roster]:
    members = tuple(
        Member(rank, process(number), Endpoint("127.0.0.1", number), 1000 + number, f"host{number}")
        for rank, number in enumerate(processes)
    )
    return [
        Roster(name, generation, rank, members, token, hangs[rank] if hangs else hang)
        for rank in range(len(members))
    ]


class Node:
    """One process: its decisions, and what came of them."""

    def __init__(self, net: Net, number: int, *, early_close: bool = False) -> None:
        self.net = net
        self.number = number
        counter = itertools.count()

        def nonce() -> bytes:
            return f"{number:08d}{next(counter):08d}".encode()

        self.peers = Peers(process(number), nonce=nonce, channel=net.channel, early_close=early_close)
        self.host = ""  # as a certificate names it
        self.kept: set[int] = set()
        self.listening = True
        self.alive = True
        self.stopped = False
        self.ready: list[tuple[str, int]] = []
        self.broken: dict[tuple[str, int], object] = {}
        self.lost: list[Lost] = []
        self.refused: list[Refusal] = []
        self.looks: list[ReadUnread] = []
        self.doing = b""
        self.heard: list[Hear] = []

    def add(self, roster: Roster) -> None:
        self.peers.add(roster, self.net.now)
        self.act()

    def remove(self, world, *, goodbye=True) -> None:
        self.peers.remove(world, goodbye=goodbye, now=self.net.now)
        self.act()

    def settle(self, probes=None) -> None:
        self.peers.settle(self.net.now, probes or {})
        self.act()
        self.misses_nothing()

    def misses_nothing(self) -> None:
        """Nothing is due before the time at which it is looked at."""
        for table in (
            self.peers._detector.silence_due,
            self.peers._connections.beats_due,
            self.peers.early_close.due,
        ):
            assert table._time is None or table._time <= table._exactly()

    def act(self) -> None:
        for action in self.peers.take():
            if isinstance(action, Send):
                self.net.send(self, action)
            elif isinstance(action, Dial):
                self.net.dial(self, action)
            elif isinstance(action, Drop):
                self.net.drop(self, action)
            elif isinstance(action, Keep):
                self.kept.add(action.channel)
            elif isinstance(action, Release):
                self.kept.remove(action.channel)
                self.net.send(self, Send(action.channel, Close()))
                self.net.drop(self, Drop(action.channel, orderly=True))
            elif isinstance(action, Ready):
                self.ready.append(action.world)
            elif isinstance(action, Break):
                assert action.world not in self.broken, "a second verdict"
                self.broken[action.world] = action.breakage
            elif isinstance(action, Lost):
                self.lost.append(action)
            elif isinstance(action, ReadUnread):
                self.looks.append(action)
            elif isinstance(action, Answer):
                for frame in pieces(action.world, action.number, b"deep " * action.deep + self.doing):
                    self.net.send(self, Send(action.channel, frame))
            elif isinstance(action, Hear):
                self.heard.append(action)
            else:
                self.refused.append(action)


class Net:
    """Reliable, ordered connections; what is under way is delivered when the test says so."""

    def __init__(self, *numbers: int, early_close: bool = False) -> None:
        self.now = 100.0
        self.channel = itertools.count(1).__next__
        self.nodes = {number: Node(self, number, early_close=early_close) for number in numbers}
        self.other: dict[int, tuple[Node, int]] = {}  # channel -> the far end
        self.owner: dict[int, Node] = {}
        self.queues: dict[int, deque] = {}  # by the channel that receives
        self.together = lambda: False

    def __getitem__(self, number: int) -> Node:
        return self.nodes[number]

    def on_their_way(self, number: int) -> set[int]:
        """Return the processes that have yet to get something of this one."""
        node = self.nodes[number]
        ways = {to for to, (far, _) in self.other.items() if far is node}
        return {self.owner[to].number for to in ways if self.queues.get(to)}

    def dial(self, node: Node, action: Dial) -> None:
        target = self.nodes.get(action.endpoint.port)
        queue = self.queues[action.channel] = deque()
        self.owner[action.channel] = node
        if target is None or not target.listening or not target.alive:
            queue.append(("refused", None))
            return
        far = self.channel()
        self.other[action.channel], self.other[far] = (target, far), (node, action.channel)
        self.owner[far] = target
        self.queues[far] = deque([("accepted", None)])
        queue.append(("connected", None))

    def send(self, node: Node, action: Send) -> None:
        far = self.other.get(action.channel, (None, 0))[1]
        if far in self.queues and self.owner.get(action.channel) is node:
            self.queues[far].append(("bytes", encode(action.frame)))

    def drop(self, node: Node, action: Drop) -> None:
        if self.owner.get(action.channel) is not node:
            return
        self.queues.pop(action.channel, None)
        del self.owner[action.channel]
        if action.channel in self.other:
            far = self.other.pop(action.channel)[1]
            if far in self.queues:
                self.queues[far].append(("closed", ConnectionEnd.LOST))

    def die(self, number: int) -> None:
        """It was killed; what it keeps is closed, and the rest only when it is to `crash`."""
        node = self.nodes[number]
        node.alive = False
        for channel in node.kept:
            self.drop(node, Drop(channel, orderly=False))
        node.kept.clear()

    def crash(self, number: int) -> None:
        node = self.nodes[number]
        node.alive = False
        for channel in [each for each, owner in self.owner.items() if owner is node]:
            self.drop(node, Drop(channel, orderly=False))

    def busy(self) -> list[int]:
        return [
            channel
            for channel, queue in self.queues.items()
            if queue and self.owner[channel].alive and not self.owner[channel].stopped
        ]

    def deliver(self, channel: int) -> None:
        """Hand one thing to its receiver, or several, where they came `together`, and let the receiver judge."""
        node = self.owner[channel]
        self.hand(channel, node)
        while self.together() and self.queues.get(channel):
            self.hand(channel, node)
        node.settle()

    def hand(self, channel: int, node: Node) -> None:
        kind, value = self.queues[channel].popleft()
        if kind == "bytes":
            while self.queues[channel] and self.queues[channel][0][0] == "bytes" and self.together():
                value += self.queues[channel].popleft()[1]
            parser = Parser()
            frames = parser.feed(value)
            host = self.other[channel][0].host if channel in self.other else ""
            node.peers.received(channel, frames, self.now, error=parser.error, host=host)
        elif kind == "accepted":
            node.peers.accepted(channel, self.now)
        elif kind == "connected":
            node.peers.connected(channel, self.now)
        else:
            del self.queues[channel], self.owner[channel]
            self.other.pop(channel, None)
            ending = value if kind == "closed" else ConnectionEnd.DEAD
            node.peers.closed(
                channel, ending, self.now, refused=kind == "refused", plain=ending is ConnectionEnd.LOST
            )

    def run(self, pick=None) -> None:
        """Deliver everything that is under way, in any order that the connections allow."""
        while busy := self.busy():
            self.deliver(pick(busy) if pick else busy[0])

    def pass_time(self, seconds: float, *, step=0.1, probes=None, pick=None) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += step
            for node in self.nodes.values():
                if node.alive and not node.stopped:
                    node.settle((probes or {}).get(node.number))
            self.run(pick)

    def join(self, group, pick=None) -> None:
        """Attach a world everywhere and see that it worked."""
        for roster in group:
            self[int(roster.members[roster.rank].process, 16)].add(roster)
        self.settle_all()
        self.run(pick)
        for roster in group:
            node = self[int(roster.members[roster.rank].process, 16)]
            assert (roster.key, roster.rank) in node.ready

    def settle_all(self) -> None:
        for node in self.nodes.values():
            if node.alive and not node.stopped:
                node.settle()


ANSWERS = Probe(unacknowledged=False, last_ack=0.1)
SILENT_HOST = Probe(unacknowledged=True, last_ack=100.0)
