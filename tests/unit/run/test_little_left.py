"""What the launcher does where its host has no thread, no descriptor and no disk left."""

from __future__ import annotations

import errno
import os
import sys
import threading
from types import SimpleNamespace

import pytest

from multiworld.cli.console import complain
from multiworld.run.descriptors import check_limit
from multiworld.run.errors import RunError, starting_workers, used_up
from multiworld.run.nodes.asking import Asking
from multiworld.run.nodes.beginnings import Beginnings
from multiworld.run.nodes.rendezvous import shut_down
from multiworld.run.nodes.slots import Membership, Node
from multiworld.run.signals import Wake
from multiworld.run.workers import process
from multiworld.run.workers.process import WorkerProcess


class NoThread:
    def __init__(self, **_):
        pass

    def start(self):
        raise RuntimeError("can't start new thread")

    def is_alive(self):
        return False


def test_a_worker_is_retired_without_a_thread(monkeypatch):
    closed = []
    context = SimpleNamespace(pids=lambda: {0: os.getpid()}, close=lambda: closed.append(True))
    worker = WorkerProcess(context, 0, 0, 0)
    monkeypatch.setattr(process.threading, "Thread", NoThread)
    assert not worker.close().is_alive()
    assert closed == [True]
    assert worker.descriptor is None


def test_a_rendezvous_is_left_without_a_thread(monkeypatch):
    monkeypatch.setattr("multiworld._net.blocking.threading.Thread", NoThread.__new__)
    assert not shut_down(SimpleNamespace(shutdown=lambda: True))


def test_a_store_for_worlds_and_a_question_wait_for_a_thread(monkeypatch):
    node = Node("a", "host", "127.0.0.1", 1, 1, 1, "", "tcp://a:1")
    membership = Membership(2, "00", "a", (), (node,))
    held = SimpleNamespace(address="tcp://a:1", hold=lambda *_: None, release=lambda _: None)
    looked, asked = threading.Event(), threading.Event()
    later = Beginnings(("w",), dict, lambda _: looked.set() or [])
    asking = Asking(lambda _: asked.set() or [])
    later.hold(held)
    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", NoThread.start)
        later.follow(membership, "a")
        assert asking.agreed(membership, "a", {"b"}, 0.0) == set()
    later.begin()
    assert looked.wait(60)
    later.close()
    asking.agreed(membership, "a", {"b"}, 0.0)
    assert asked.wait(60)


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ENOSPC])
def test_a_descriptor_that_the_kernel_has_no_room_for_is_looked_at_in_its_time(number, monkeypatch):
    """Else a worker that runs counts as one that could not be started, and is started twice."""
    read, write = os.pipe()
    wake = Wake()

    def full(*_):
        raise OSError(number, os.strerror(number))

    try:
        with monkeypatch.context() as patched:
            patched.setattr(wake._selector, "_selector", SimpleNamespace(register=full))
            wake.add(read)
        wake.remove(read)
        os.write(write, b".")
        wake.add(read)
        assert wake.wait(60.0) == {read}
        wake.remove(read)
        os.close(read)
        with pytest.raises(OSError, match="Bad file descriptor"):
            wake.add(read)
    finally:
        wake.close()
        os.close(write)


class Full:
    def write(self, _text):
        raise OSError(errno.ENOSPC, "No space left on device")


class Closed:
    def write(self, _text):
        raise ValueError("I/O operation on closed file")


@pytest.mark.parametrize("stream", [None, Full(), Closed()])
def test_what_cannot_be_said_changes_no_exit_code(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    complain("m8d-run: it failed")


@pytest.mark.parametrize(
    ("error", "used"),
    [
        (OSError(errno.EMFILE, "Too many open files"), True),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), True),
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("Failed to create a socket"), True),
        (RuntimeError("Failed to init uv loop"), True),
        (RuntimeError("another"), False),
        (FileNotFoundError(errno.ENOENT, "No such file"), False),
    ],
)
def test_which_errors_say_that_the_host_has_too_little_left(error, used):
    assert used_up(error) is used


def test_a_worker_that_cannot_be_started_is_an_error_of_the_run():
    with (
        pytest.raises(RunError, match=r"a worker could not be started: .*No such file") as raised,
        starting_workers(),
    ):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "/x")
    assert "Correct the path" in str(raised.value)


def test_a_launcher_needs_some_descriptors_and_two_more_for_each_worker():
    check_limit(10 + 56 + 2 * 4, 10, 4)
    check_limit(None, 10, 4)
    with pytest.raises(RunError, match=r"may have 73 .*needs 74 for 4 workers.*ulimit -n 74"):
        check_limit(73, 10, 4)
