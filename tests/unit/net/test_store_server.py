"""The thread of a store's server that looks after its connections, and the one that gives it its turns."""

from __future__ import annotations

import errno
import gc
import logging
import os
import socket
import threading
import time

import pytest

pytest.importorskip("torch")

from multiworld._net.stores import server
from multiworld._net.stores.tcp_client import TcpClient

SOON = 30.0


@pytest.fixture
def serving(monkeypatch):
    """A function that starts a server, with a look each 10 ms; returns it with a client of it."""
    monkeypatch.setattr(server, "_LOOK", 0.01)
    made = []

    def start():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            target = probe.getsockname()
        made.append(server.StoreServer(socket.AF_INET, target))
        made.append(TcpClient.connect(socket.AF_INET, target, deadline=time.monotonic() + SOON))
        return made[-2:]

    yield start
    for each in reversed(made):
        each.close()


def failing(monkeypatch, code):
    """Have every listing of descriptors fail; returns an event that is set when some have."""
    often, seen = threading.Event(), []

    def names(folder):
        seen.append(folder)
        if len(seen) > 3:
            often.set()
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(server.procfs, "names", names)
    return often


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_a_server_outlives_looks_that_fail(serving, monkeypatch, code):
    standing, client = serving()
    client.set("a", b"1", deadline=time.monotonic() + SOON)
    assert failing(monkeypatch, code).wait(SOON)
    assert client.get("a", deadline=time.monotonic() + SOON) == b"1"
    standing.close()
    assert gc.isenabled()


def test_strangers_are_found_where_no_descriptor_is_left_for_a_listing(serving, monkeypatch):
    monkeypatch.setattr(server, "PATIENCE", 0.0)
    standing, client = serving()
    failing(monkeypatch, errno.EMFILE)
    with socket.create_connection(("127.0.0.1", standing.port), timeout=SOON) as stranger:
        stranger.send(b"\0")
        assert stranger.recv(1) == b"", "closed by the server"
    assert client.get("a", deadline=time.monotonic() + SOON) is None, "which is there still"


class Told(logging.Handler):
    """Sets an event when an error is logged."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.event = threading.Event()

    def emit(self, record):
        self.event.set()


def test_a_server_that_ends_is_reported_and_the_collector_goes_on(serving, monkeypatch):
    def overdue(*_):
        raise RuntimeError("a defect")

    told = Told()
    logging.getLogger("multiworld").addHandler(told)
    try:
        standing, _ = serving()
        monkeypatch.setattr(server.ClientCheck, "overdue", overdue)
        assert told.event.wait(SOON)
    finally:
        logging.getLogger("multiworld").removeHandler(told)
    assert gc.isenabled()
    began = time.monotonic()
    standing.close()
    assert time.monotonic() - began < server._ENDING / 2
