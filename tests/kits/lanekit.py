"""Lanes of several members in one process, and connections between them that deliver what a test says.

A connection delivers any number of bytes at a time, in order, as TCP does; a `Network` draws whose turn it is.
"""

from __future__ import annotations

import random
from collections import deque

from multiworld._core.lane.lane import Lane
from multiworld._core.lane.operations import PayloadSource, Receive, Send

__all__ = ["InHandler", "Network", "payload"]


def payload(size: int, seed: int) -> bytes:
    """Return bytes that tell messages apart."""
    return (seed.to_bytes(8, "little") * (size // 8 + 1))[:size]


class Network:
    """`size` members' lanes, connected; memory can be read where `readable` says so."""

    def __init__(self, size: int, *, seed: int = 0, readable: bool = False, most: int = 1 << 20) -> None:
        ranks = range(size)
        self.lanes = [
            Lane((peer for peer in ranks if peer != rank), readable=ranks if readable else ())
            for rank in ranks
        ]
        self._readable = readable
        self.memory: dict[int, memoryview] = {}
        self._pipes: dict[tuple[int, int], deque[bytes]] = {
            (a, b): deque() for a in ranks for b in ranks if a != b
        }
        self._ready: list[tuple[int, int]] = []
        self._reads = [None] * size  # what each is told to read, and has not
        self._random = random.Random(seed)  # noqa: S311  (not a secret)
        self._most = most

    def send(self, src: int, dst: int, data: bytes, channel: int = 0, tag: int = 0) -> Send:
        """Send, from memory that the others can read if they may."""
        view = memoryview(bytearray(data))
        address = (len(self.memory) + 1) << 32
        self.memory[address] = view
        return self.lanes[src].send(dst, channel, tag, view, address if self._readable else 0)

    def receive(self, dst: int, src: int | None, size: int, channel: int = 0, tag: int = 0) -> Receive:
        """Receive into a new buffer."""
        return self.lanes[dst].receive(src, channel, tag, memoryview(bytearray(size)))

    def step(self) -> bool:
        """Write, deliver or read something somewhere; False if there is nothing left to do."""
        for rank, lane in enumerate(self.lanes):
            self._reads[rank] = self._reads[rank] or lane.next_read()
        choices = self._choices()
        reads = [rank for rank, read in enumerate(self._reads) if read]
        if reads and (not choices or self._random.random() < 0.3):
            self._read(self._random.choice(reads))
            return True
        if not choices:
            return False
        src, dst = self._random.choice(choices)
        peer = self.lanes[src].peers[dst]
        if peer.outgoing.pending and (not self._pipes[src, dst] or self._random.random() < 0.5):
            wire = b"".join(bytes(view) for view in peer.outgoing.views())
            count = self._random.randint(1, min(len(wire), self._most))
            self._pipes[src, dst].append(wire[:count])
            peer.outgoing.wrote(count)
        else:
            self._deliver(src, dst)
        return True

    def settle(self) -> None:
        """Go on until nothing is left to do."""
        while self.step():
            pass

    def _choices(self) -> list[tuple[int, int]]:
        """Return pairs whose turn it may be: those of the last step, and now and then all.

        Going through all pairs of forty members in each step takes most of a test's time. Any order stays possible.
        """
        self._ready = [pair for pair in self._ready if self._can(*pair)]
        if not self._ready or self._random.random() < 0.1:
            self._ready = [pair for pair in self._pipes if self._can(*pair)]
        return self._ready

    def _can(self, src: int, dst: int) -> bool:
        return bool(self._pipes[src, dst]) or self.lanes[src].peers[dst].outgoing.pending

    def _deliver(self, src: int, dst: int) -> None:
        data = self._pipes[src, dst].popleft()
        incoming = self.lanes[dst].peers[src].incoming
        want = incoming.want()
        count = min(len(want), len(data), self._random.randint(1, self._most))
        want[:count] = data[:count]
        if data[count:]:
            self._pipes[src, dst].appendleft(data[count:])
        incoming.got(count)

    def _read(self, rank: int) -> None:
        read, self._reads[rank] = self._reads[rank], None
        succeeded = self._random.random() < 0.8
        if read.arrival.source is PayloadSource.VOID:
            pass  # the buffer is another's by now
        elif succeeded:
            at = read.arrival.received
            assert read.address - at in self.memory
            read.view[:] = self.memory[read.address - at][at : at + len(read.view)]
        else:
            read.view[: len(read.view) // 2] = bytes(len(read.view) // 2)  # it may have begun
        self.lanes[rank].read(read, succeeded=succeeded)


class InHandler:
    """The poll of an endpoint's connections: a signal's handler runs in the thread that sleeps, for the first time."""

    def __init__(self, end, call):
        self._poll, self._call, self._end = end._net.poll, call, end
        end._net.poll = self

    def poll(self, *args):
        if self._call is not None:
            self._end._net.poll, call, self._call = self._poll, self._call, None
            call()
        return self._poll.poll(*args)

    def __getattr__(self, name):
        return getattr(self._poll, name)
