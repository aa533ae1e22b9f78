"""What the launcher does where its host has no thread, no descriptor and no disk left."""

from __future__ import annotations

import errno
import os
import sys
import threading
from types import SimpleNamespace

import pytest

from multiworld.cli.console import complain
from multiworld.run import launcher
from multiworld.run.descriptors import check_limit, of_workers
from multiworld.run.ends import End
from multiworld.run.errors import RunError, starting_workers, used_up
from multiworld.run.events import EventBus
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


OPTIONS = {"redirects": "0", "tee": "0", "local_ranks_filter": ""}


@pytest.mark.parametrize(
    ("options", "functions", "each"),
    [
        ({}, False, 2),
        ({"redirects": "3"}, False, 4),
        ({"redirects": "3", "tee": "1"}, False, 5),
        ({"tee": "3"}, False, 6),
        ({"tee": "3", "duplicate_stdout_filters": ["a"], "duplicate_stderr_filters": ["a"]}, False, 8),
        ({}, True, 6),
        ({"tee": "3"}, True, 8),
    ],
)
def test_a_launcher_needs_descriptors_for_each_worker_and_its_output(options, functions, each):
    args = SimpleNamespace(**OPTIONS | options)
    assert of_workers(4, args, functions=functions) == 4 * each


def test_a_launcher_needs_as_many_as_its_options_say_of_each_worker():
    args = SimpleNamespace(redirects="0:1", tee="1:3", local_ranks_filter="")
    assert of_workers(4, args, functions=False) == 2 * 4 + 1 + 4
    args = SimpleNamespace(redirects="0", tee="3", local_ranks_filter="0,2")
    assert of_workers(4, args, functions=False) == 2 * 4 + 2 * 4 + 2 * 2


def test_a_launcher_needs_some_descriptors_and_those_of_its_workers():
    check_limit(10 + 56 + 8, 10, 4, 8)
    check_limit(None, 10, 4, 8)
    with pytest.raises(RunError, match=r"may have 73 .*needs 74 for 4 workers.*ulimit -n 74"):
        check_limit(73, 10, 4, 8)


@pytest.mark.parametrize(
    ("nodes", "range_of", "enough_for", "ends", "notes"),
    [(1, None, 2, 0, 0), (1, 9, 9, 0, 0), (1, 9, 8, 0, 1), (2, 9, 8, 0, 0), (1, 9, 1, 1, 0)],
)
def test_a_launcher_has_to_have_enough_for_a_start_and_says_what_a_range_needs(
    monkeypatch, nodes, range_of, enough_for, ends, notes
):
    def check(workers, *_, **__):
        if workers > enough_for:
            raise RunError("too few", rule="It needs more", next_step="Raise the limit")

    monkeypatch.setattr(launcher, "check_descriptors", check)
    monkeypatch.setattr(launcher, "_run_agent", lambda *_: End(0, "done"))
    plan = None if range_of is None else SimpleNamespace(world_size=range_of)
    config = SimpleNamespace(nproc_per_node=2, max_nodes=nodes)
    bus, said = EventBus(), []
    bus.subscribe(said.append)
    run = launcher._Run(SimpleNamespace(torch=SimpleNamespace()), config, "program", [], plan, bus, 1.0)
    assert launcher._run_to_end(run, SimpleNamespace()).code == ends
    assert ["largest size: too few" in each.text for each in said] == [True] * notes
