"""Meetings that end without all members, lack descriptors, or are forked: what is said, and what is closed."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
from kits.doorkit import (
    FORKING,
    HOST,
    HalfMember,
    address_of,
    after,
    all_closed,
    answer,
    call,
    doors,
    ends,
    everyone,
    exchanged,
    hang_up,
    join,
    met_all,
    nothing,
    roster_of,
    soon,
    started,
    tell,
)
from kits.meetkit import PATIENCE, until

from multiworld._net.lane import dialing, meeting
from multiworld._net.lane.door import unix_name
from multiworld.errors import JoinTimeoutError


@pytest.fixture(autouse=True)
def nothing_stays_open():
    with all_closed():
        yield


@pytest.fixture
def threads():
    with ThreadPoolExecutor(8) as pool:
        yield pool


class Signal(Exception):
    """Ends a meeting."""


def stop():
    raise Signal


def stop_when(ready):
    return lambda: ready.is_set() and stop()


class TestEnds:
    @pytest.mark.parametrize("rank", [0, 1, 2])
    def test_the_deadline_names_who_is_missing(self, rank):
        with doors(3) as opened, pytest.raises(JoinTimeoutError) as caught:
            join(opened, rank, deadline=time.monotonic() + 1.0)
        why = [": Connection refused" if each < rank else "" for each in range(3)]
        told = ", ".join(
            f"{each} (pid {100 + each} on host{each}, {HOST}{why[each]})" for each in range(3) if each != rank
        )
        assert str(caught.value) == (
            f"ranks {told} of w/1 did not connect the lane in time. Every member connects to every other one "
            "before the timeout. See that no firewall stands between the members, and set M8D_HOST or "
            "M8D_IFNAME where an address is not the one that the others reach."
        )
        assert caught.value.world == "w"

    def test_the_deadline_does_not_name_who_is_there(self, threads):
        with doors(3) as opened:
            one, other = (
                threads.submit(join, opened, rank, deadline=time.monotonic() + 4.0) for rank in (0, 1)
            )
            for each in (one, other):
                with pytest.raises(JoinTimeoutError, match=r"^rank 2 \(pid 102 on host2, 127.0.0.1"):
                    each.result(PATIENCE)

    def test_the_deadline_is_kept(self):
        began = time.monotonic()
        with doors(2) as opened, pytest.raises(JoinTimeoutError):
            join(opened, 0, deadline=began + 0.1)
        assert 0.1 <= time.monotonic() - began < 5

    @pytest.mark.parametrize("rank", [0, 1])
    def test_check_ends_it(self, rank):
        with doors(2) as opened, pytest.raises(Signal):
            join(opened, rank, check=stop)

    @pytest.mark.parametrize("rank", [0, 1])
    def test_check_is_called_every_10_to_20_ms(self, rank, monkeypatch):
        """Twenty times as slowly here: a busy machine wakes a thread some milliseconds late."""
        assert meeting._CHECK_EVERY == 0.01
        monkeypatch.setattr(meeting, "_CHECK_EVERY", 0.2)
        calls = []
        with doors(2) as opened, pytest.raises(JoinTimeoutError):
            join(opened, rank, deadline=time.monotonic() + 4.0, check=lambda: calls.append(time.monotonic()))
        assert 5 <= len(calls) <= 20  # fewer where others keep the processors busy
        pauses = sorted(b - a for a, b in itertools.pairwise(calls))
        assert pauses[0] >= 0.2
        assert pauses[len(pauses) // 2] < 0.4

    def test_waiting_takes_no_processor(self):
        before = time.thread_time()
        with doors(2) as opened, pytest.raises(JoinTimeoutError):
            join(opened, 0, deadline=time.monotonic() + 0.5)
        assert time.thread_time() - before < 0.1

    def test_what_was_connected_is_closed(self, threads):
        """And its other end hears of it."""
        with doors(3) as opened:
            ready = threading.Event()
            first = threads.submit(join, opened, 0, check=stop_when(ready))
            with contextlib.closing(call(opened[0].address, 0)) as caller:
                half = HalfMember(caller, roster_of([each.address for each in opened], 2), 0)
                half.go_on(3)
                assert half.greeting.over
                ready.set()
                with pytest.raises(Signal):
                    first.result(PATIENCE)
                assert ends(caller)

    def test_what_was_begun_is_closed(self, threads):
        with doors(2) as opened:
            ready = threading.Event()
            first = threads.submit(join, opened, 0, check=stop_when(ready))
            with contextlib.closing(call(opened[0].address, 0)) as caller:
                HalfMember(caller, roster_of([each.address for each in opened], 1), 0).go_on(1)
                ready.set()
                with pytest.raises(Signal):
                    first.result(PATIENCE)
                assert ends(caller)

    def test_what_a_handler_raises_in_a_handshake_ends_it(self, monkeypatch):
        """A TimeoutError of the program's own is no fault of the connection, which would be made anew."""

        raised = TimeoutError("the program's")

        def alarmed(*_):
            raise raised

        monkeypatch.setattr(meeting.Greeter, "go_on", alarmed)
        with doors(2) as opened:
            opened[0].listen(1)
            with pytest.raises(TimeoutError) as seen:
                join(opened, 1, deadline=time.monotonic() + PATIENCE)
        assert seen.value is raised

    @pytest.mark.parametrize("kind", [TimeoutError, BlockingIOError, ConnectionAbortedError])
    @pytest.mark.parametrize("rank", [0, 1], ids=["accepts", "dials"])
    def test_what_a_handler_raises_while_it_connects_ends_it(self, monkeypatch, rank, kind):
        """It would be taken for the network's, and the member would go on as if no alarm had come."""

        def alarmed(*_):
            raise kind("the program's")

        monkeypatch.setattr(dialing.Dial, "start", alarmed)
        with doors(2) as opened:
            opened[0].sockets = tuple(Listener(each, lambda _: alarmed) for each in opened[0].sockets)
            opened[0].listen(1)
            with (
                contextlib.closing(call(opened[0].address, 0)),
                pytest.raises(kind, match=r"^the program's$"),
            ):
                join(opened, rank, deadline=time.monotonic() + PATIENCE)

    def test_what_is_being_made_is_closed(self, threads):
        with doors(2) as opened:
            ready = threading.Event()
            first = threads.submit(join, opened, 1, check=stop_when(ready))
            with contextlib.closing(answer(opened[0])) as other:
                ready.set()
                with pytest.raises(Signal):
                    first.result(PATIENCE)
                assert ends(other)

    def test_a_closed_door(self):
        with doors(2) as opened:
            opened[0].close()
            with pytest.raises(OSError, match="Bad file descriptor"):
                join(opened, 0)

    def test_a_door_that_is_closed_meanwhile(self, threads):
        with doors(2) as opened:
            waits = threads.submit(join, opened, 0, check=after(5, opened[0].close))
            with pytest.raises(OSError, match="The door was closed while"):
                waits.result(PATIENCE / 2)


class TestDescriptors:
    def test_none_is_free_for_a_while(self, threads):
        """Accepting pauses then: both listeners stay readable, and are not asked again and again."""
        with doors(2) as opened:
            full, asked = threading.Event(), []
            full.set()

            def chosen(accept):
                if not full.is_set():
                    return accept
                asked.append(time.monotonic())
                return refuse

            opened[0].sockets = tuple(Listener(each, chosen) for each in opened[0].sockets)
            waits = [threads.submit(join, opened, rank) for rank in (0, 1)]
            with contextlib.closing(call(opened[0].address, 0)):  # rank 1 is at the other one
                until(lambda: len(asked) > 5)
                full.clear()
                mets = [each.result(PATIENCE) for each in waits]
        assert min(b - a for a, b in itertools.pairwise(asked)) > 0.019
        assert exchanged(mets) == everyone(2)
        hang_up(*mets)

    def test_none_is_free_until_the_deadline(self):
        """It is said, and waiting takes no processor."""
        with doors(2) as opened:
            opened[0].sockets = tuple(Listener(each, lambda _: refuse) for each in opened[0].sockets)
            opened[0].listen(1)
            with contextlib.closing(call(opened[0].address, 0)):
                before = time.thread_time()
                with pytest.raises(JoinTimeoutError, match=r"127.0.0.1: Too many open files\)"):
                    join(opened, 0, deadline=time.monotonic() + 0.5)
                assert time.thread_time() - before < 0.1

    def test_none_is_free_to_dial(self, threads, monkeypatch):
        with doors(2) as opened:
            monkeypatch.setattr(dialing.socket, "socket", refuse)
            with pytest.raises(JoinTimeoutError, match=r"127.0.0.1: Too many open files\)"):
                join(opened, 1, deadline=time.monotonic() + 1.0)


class NoDescriptor(OSError):
    def __init__(self):
        super().__init__(errno.EMFILE, os.strerror(errno.EMFILE))


# As the kernel does: without a frame of this file, which would count as one of the program's.
refuse = mock.Mock(side_effect=NoDescriptor)


class Listener:
    """A listener whose `accept` is chosen at each call."""

    def __init__(self, listener, chosen):
        self._listener = listener
        self._chosen = chosen

    @property
    def accept(self):
        return self._chosen(self._listener.accept)

    def __getattr__(self, name):
        return getattr(self._listener, name)


class TestForks:
    """Rank 0 forks while it waits for rank 1; the child has copies of all sockets."""

    @contextlib.contextmanager
    def forked(self, what):
        """Start rank 0; yields its process, the doors and the roster of rank 1, once it has forked."""
        with started(FORKING, 0, what) as process, doors(2) as opened:
            there = address_of(process)
            roster = roster_of([there, opened[1].address], 1)
            tell(process, [there, opened[1].address])
            yield process, opened[1], roster

    def test_a_child_keeps_nothing_open(self):
        with self.forked("waits") as (process, door, roster):
            assert process.stdout.readline() == "forked\n"
            met = meeting.meet(door, roster, deadline=soon(), check=nothing)
            assert met_all(met, 1) == [0]
            ranks, _, _ = json.loads(process.stdout.readline())  # its door is closed now
            assert ranks == [1]
            port = roster.members[0].lane.port
            for family, where in (
                (socket.AF_UNIX, unix_name(f"{0:032x}", port)),
                (socket.AF_INET, (HOST, port)),
            ):
                with contextlib.closing(socket.socket(family)) as late:
                    assert late.connect_ex(where) == errno.ECONNREFUSED
            hang_up(met)

    def test_a_child_does_not_go_on(self):
        """Only the parent does, whose sockets the child leaves as they are."""
        with self.forked("goes on") as (process, door, roster):
            told = process.stdout.readline()
            assert told.startswith("MultiworldError: process ")
            assert "was forked while w/1 was joined" in told
            met = meeting.meet(door, roster, deadline=soon(), check=nothing)
            assert met_all(met, 1) == [0]
            assert json.loads(process.stdout.readline())[0] == [1]
            hang_up(met)
