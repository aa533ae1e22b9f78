"""Names of hosts of stores, while the name server says nothing, or no thread can ask it."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import pytest
from kits.meetkit import until

from multiworld._net.stores import resolving
from multiworld._net.stores.address import StoreAddress
from multiworld._net.stores.resolving import resolved_targets
from multiworld.errors import StoreUnreachableError

POD = StoreAddress("tcp", "pod-0", 29500)
ANSWER = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 29500))]
TARGETS = [(socket.AF_INET, ("10.0.0.1", 29500))]


def asking():
    return [each for each in threading.enumerate() if each.name == "m8d-resolve"]


def resolved(address=POD, seconds=30.0):
    return resolved_targets(address, world="w", deadline=time.monotonic() + seconds)


@pytest.fixture
def server(monkeypatch):
    """A name server that answers once it is told to."""
    answers = threading.Event()

    def ask(*_, **__):
        assert answers.wait(60)
        return ANSWER

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    yield answers
    answers.set()
    for each in asking():
        each.join(60)


def test_a_name_is_asked_for_by_one_thread_at_a_time(server):
    other = StoreAddress("tcp", "pod-1", 29500)
    for address in (POD, other) * 5:
        with pytest.raises(StoreUnreachableError, match="the name server does not answer"):
            resolved(address, 0.0)
    assert len(asking()) == 2
    server.set()
    assert resolved() == TARGETS
    until(lambda: not resolving._under_way)


def test_what_is_under_way_is_answered_to_all_who_wait(server):
    found = []
    waiting = [threading.Thread(target=lambda: found.append(resolved())) for _ in range(3)]
    for each in waiting:
        each.start()
    until(asking)
    server.set()
    for each in waiting:
        each.join(60)
    assert found == [TARGETS] * 3


def test_a_forked_child_asks_for_itself(server):
    with pytest.raises(StoreUnreachableError):
        resolved(seconds=0.0)
    child = os.fork()
    if not child:
        signal.alarm(30)  # where it waits for its parent's thread
        socket.getaddrinfo = lambda *_, **__: ANSWER
        os._exit(0 if resolved(seconds=60.0) == TARGETS else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    "error", [RuntimeError("can't start new thread"), KeyboardInterrupt("Ctrl-C")], ids=repr
)
def test_a_name_that_no_thread_could_ask_for_is_asked_for_again(server, monkeypatch, error):
    server.set()

    def start(_):
        raise error

    with monkeypatch.context() as no_thread:
        no_thread.setattr(threading.Thread, "start", start)
        with pytest.raises((StoreUnreachableError, KeyboardInterrupt), match=str(error)):
            resolved()
    assert resolved() == TARGETS
