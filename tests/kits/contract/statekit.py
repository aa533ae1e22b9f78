"""Two ends of a lane over a socket, in threads of this process, that give each other a state."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from kits.contract.tensorkit import value
from kits.meetkit import PATIENCE
from multiworld._c10d.lane.messages import Messages
from multiworld._c10d.lane.state_transfer import receive_state, send_state
from multiworld._core.operations.log import OperationLog
from multiworld._net.lane.endpoint import Endpoint

SMALL = 4096  # bytes of a part, where a test wants many


def soon(seconds=PATIENCE):
    return time.monotonic() + seconds


def unchanged(number, tensor):
    return tensor


class Sender(Messages):
    """Counts the bytes of a state's tensors, and sends what `before` makes of each."""

    def __init__(self, endpoint):
        super().__init__(endpoint, "w", PATIENCE, lambda error: error, OperationLog(0, 2))
        self.sent = 0
        self.before = unchanged
        self._pieces = itertools.count()

    def begin_send(self, tensor, dst, tag=0, channel=0):
        if tag % 2 and tensor.dtype is not torch.uint8:  # no note, and no text
            tensor = self.before(next(self._pieces), tensor)
            self.sent += tensor.nbytes
        return super().begin_send(tensor, dst, tag, channel)


class Lanes:
    """Members' ends, connected. That one has ended is told to the others, as a world's watchdog does."""

    def __init__(self):
        self.pool = ThreadPoolExecutor(4)
        self._ends = []

    def connect(self, size, kind=Sender):
        """Connect so many members."""
        connections = [{} for _ in range(size)]
        for a, b in itertools.combinations(range(size), 2):
            connections[a][b], connections[b][a] = socket.socketpair()
        made = []
        for own, each in enumerate(connections):
            made.append(Endpoint(each, lost=lambda rank, error, own=own: end(made[own])))
        self._ends += made
        return [kind(each) for each in made]

    def give(self, messages, state, receiver=1, within=PATIENCE, **options):
        """Send a state in a thread; returns a future."""
        return self.pool.submit(send_state, messages, receiver, state, deadline=soon(within), **options)

    def carried(self, pair, state, into=None, *, in_place=False):
        """Return what the second of a pair receives from the first."""
        sent = self.give(pair[0], state)
        got = receive_state(pair[1], 0, into=into, in_place=in_place, deadline=soon())
        sent.result(PATIENCE)
        return got

    def close(self):
        for each in self._ends:
            each.fail(ConnectionError("the test is over"))
        self.pool.shutdown()


def end(endpoint):
    """End a lane from a callback, whose caller holds its lock."""
    error = ConnectionResetError("a member is lost")
    threading.Thread(target=endpoint.fail, args=(error,), daemon=True).start()


def nothing_posted(messages):
    """Whether no receive waits at an end; what has come without a receive does not count."""
    state = messages.endpoint._core._state
    return not state.matching._receives and not state.matched


def same(one, other):
    if isinstance(one, torch.Tensor):
        forms = one.dtype is other.dtype and one.shape == other.shape
        return forms and torch.equal(_bytes(one), _bytes(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def _bytes(tensor):
    return value(tensor).reshape(-1).view(torch.uint8)


def trained():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(8, 40)).sum().backward()
    optimizer.step()
    return model, optimizer
