"""Members that get their lanes connected: real sockets, strangers, and members that are late, gone or stopped."""

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

import pytest
from kits.doorkit import (
    FORKING,
    HOST,
    MEMBER,
    HalfMember,
    address_of,
    all_closed,
    answer,
    call,
    doors,
    ends,
    everyone,
    exchanged,
    hang_up,
    join,
    join_all,
    met_all,
    nothing,
    roster_of,
    soon,
    started,
    tell,
)
from kits.meetkit import PATIENCE, until
from kits.memorykit import refusal

from multiworld._net.lane import dialing, meeting, memory
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


def after(calls, do):
    """A check that does something at that call, counted from 1."""
    counted = iter(range(1, 1 << 30))

    def check():
        if next(counted) == calls:
            do()

    return check


def stop():
    raise Signal


class TestAll:
    @pytest.mark.parametrize("size", [1, 2, 3, 8])
    @pytest.mark.parametrize("places", ["here", "there"])
    def test_threads(self, size, places):
        """Members of one process; with places that differ they take TCP."""
        told = [f"{rank:08x}" for rank in range(size)] if places == "there" else None
        with doors(size, places=told) as opened:
            mets = join_all(opened)
        families = {each.family for met in mets for each in met.connections.values()}
        assert families <= {socket.AF_UNIX if places == "here" else socket.AF_INET}
        assert all(each.gettimeout() == 0 for met in mets for each in met.connections.values())
        assert exchanged(mets) == everyone(size)
        if not refusal():
            assert [sorted(met.readers) for met in mets] == everyone(size)
        hang_up(*mets)

    @pytest.mark.parametrize("size", [2, 3, 8])
    def test_processes(self, size):
        with contextlib.ExitStack() as stack:
            processes = [stack.enter_context(started(MEMBER, rank)) for rank in range(size)]
            there = [address_of(each) for each in processes]
            for each in processes:
                tell(each, there)
            told = [json.loads(each.stdout.readline()) for each in processes]
        assert [ranks for ranks, _, _ in told] == everyone(size)
        assert all(set(readers) <= set(ranks) for ranks, readers, _ in told)

    def test_ipv6(self):
        try:
            opened = doors(3, "::1", ["", "", ""])
            with opened as three:
                mets = join_all(three, host="::1")
        except meeting.MultiworldError as error:
            pytest.skip(str(error))
        assert {each.family for met in mets for each in met.connections.values()} == {socket.AF_INET6}
        assert exchanged(mets) == everyone(3)
        hang_up(*mets)

    def test_members_without_a_known_place_take_tcp(self):
        with doors(2, places=["", ""]) as opened:
            mets = join_all(opened)
        assert [each.family for met in mets for each in met.connections.values()] == [socket.AF_INET] * 2
        hang_up(*mets)

    def test_worlds_share_the_readers(self):
        if reason := refusal():
            pytest.skip(reason)
        mets = []
        for _ in range(2):
            with doors(2) as opened:
                mets += join_all(opened)
        assert len({id(reader) for met in mets for reader in met.readers.values()}) == 1
        hang_up(*mets)

    def test_members_whose_memory_cannot_be_read(self, monkeypatch):
        monkeypatch.setattr(memory, "_readv", lambda *_: -1)
        with doors(3) as opened:
            mets = join_all(opened)
        assert [met.readers for met in mets] == [{}, {}, {}]
        assert exchanged(mets) == everyone(3)
        hang_up(*mets)

    def test_members_that_read_something_else(self, monkeypatch):
        """What lies there is not the secret: another process has that pid."""
        monkeypatch.setattr(memory.Proof, "accepts", lambda *_: False)
        with doors(2) as opened:
            mets = join_all(opened)
        assert [met.readers for met in mets] == [{}, {}]
        hang_up(*mets)

    def test_one_end_alone_may_read(self, monkeypatch):
        """As under Yama, where a parent may read its child and not the other way."""
        if reason := refusal():
            pytest.skip(reason)
        real = memory.Proof.answer
        refused = threading.local()

        def answer(proof, offer):
            return bytes(memory.ANSWER_SIZE) if getattr(refused, "mine", False) else real(proof, offer)

        monkeypatch.setattr(memory.Proof, "answer", answer)
        with doors(2) as opened, ThreadPoolExecutor(1) as pool:
            one = pool.submit(join, opened, 1)
            refused.mine = True
            mets = [join(opened, 0), one.result(PATIENCE)]
        assert [sorted(met.readers) for met in mets] == [[], [0]]
        hang_up(*mets)

    def test_members_without_lanes_are_refused(self):
        with doors(2) as opened:
            roster = roster_of([opened[0].address, None], 0)
            with pytest.raises(JoinTimeoutError):
                meeting.meet(opened[0], roster, deadline=time.monotonic(), check=nothing)
            for rank in range(2):
                with pytest.raises(ValueError, match=r"rank . of w/1 has no lane"):
                    meeting.meet(
                        opened[0], roster_of([None, None], rank), deadline=time.monotonic(), check=nothing
                    )


class TestLate:
    @pytest.mark.parametrize("places", [None, ["", ""]])
    def test_a_member_that_listens_late(self, threads, places):
        """Its dials are repeated, and not without a pause."""
        with doors(2, places=places) as opened:
            ready = threading.Event()
            early = threads.submit(join, opened, 1, check=after(5, ready.set))
            assert ready.wait(PATIENCE)
            mets = [join(opened, 0), early.result(PATIENCE)]
        assert exchanged(mets) == everyone(2)
        hang_up(*mets)

    def test_pauses_grow(self):
        with doors(2) as opened:
            dial = dialing.dials(roster_of([each.address for each in opened], 1), 0.0)[0]
            pauses = []
            for _ in range(8):
                now = time.monotonic()
                dial.again("refused")
                pauses.append(dial.due - now)
        for pause, wanted in zip(pauses, [0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5], strict=True):
            assert wanted / 1000 <= pause < wanted / 1000 + 0.005

    def test_pauses_below_a_millisecond_are_not_rounded_up(self, monkeypatch):
        """A poll takes whole milliseconds. One of many shows it, on a busy machine too."""
        dialed, real = [], dialing.Dial.start
        monkeypatch.setattr(
            dialing.Dial, "start", lambda dial, now: dialed.append(time.monotonic()) or real(dial, now)
        )
        pauses = []
        for _ in range(20):
            with doors(2) as opened, pytest.raises(JoinTimeoutError):
                join(opened, 1, deadline=time.monotonic() + 0.003)
            pauses += [b - a for a, b in itertools.pairwise(dialed[:2])]
            dialed.clear()
        assert 0.0002 <= min(pauses) < 0.0009

    def test_a_member_that_is_dialed_late(self, threads):
        with doors(2) as opened:
            ready = threading.Event()
            early = threads.submit(join, opened, 0, check=after(5, ready.set))
            assert ready.wait(PATIENCE)
            mets = [early.result(PATIENCE) if rank == 0 else join(opened, 1) for rank in (1, 0)]
        hang_up(*mets)

    def test_a_connection_that_is_being_made_is_not_made_again(self, threads):
        with doors(2) as opened:
            checked = threading.Event()
            waits = threads.submit(join, opened, 1, check=after(10, checked.set))
            with contextlib.closing(answer(opened[0])):
                assert checked.wait(PATIENCE)
                for each in opened[0].sockets:
                    with pytest.raises(BlockingIOError):
                        each.accept()
            mets = [join(opened, 0), waits.result(PATIENCE)]
        hang_up(*mets)

    def test_a_connection_that_takes_long_to_be_made(self, threads, monkeypatch):
        """Over TCP to a member whose queue is full: it is written to when it is there."""
        monkeypatch.setattr(meeting, "_IDLE", 1000.0)
        with doors(2, places=["", ""]) as opened:
            opened[0].sockets[-1].listen(0)
            fillers = [call(opened[0].address, 0)]
            checked = threading.Event()
            waits = threads.submit(join, opened, 1, check=after(2, checked.set))
            assert checked.wait(PATIENCE)
            for each in fillers:
                each.close()
            mets = [join(opened, 0), waits.result(PATIENCE)]
        assert exchanged(mets) == everyone(2)
        hang_up(*mets)

    def test_another_host_that_calls_itself_the_same(self, threads, monkeypatch):
        """Copies of one virtual machine: the Unix socket is not there, TCP leads to the member."""
        monkeypatch.setattr(dialing, "_UNIX_ALONE", 0.05)
        with doors(2) as opened:
            opened[0].sockets[0].close()
            opened[0].sockets = opened[0].sockets[1:]
            mets = join_all(opened)
        assert mets[1].connections[0].family == socket.AF_INET
        assert exchanged(mets) == everyone(2)
        hang_up(*mets)

    def test_the_unix_socket_is_awaited_before(self):
        with doors(2) as opened:
            opened[0].sockets[1].listen()
            with pytest.raises(JoinTimeoutError, match="Connection refused"):
                join(opened, 1, deadline=time.monotonic() + 0.2)


class TestEnds:
    @pytest.mark.parametrize("rank", [0, 1, 2])
    def test_the_deadline_names_who_is_missing(self, rank):
        with doors(3) as opened, pytest.raises(JoinTimeoutError) as caught:
            join(opened, rank, deadline=time.monotonic() + 0.05)
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
                threads.submit(join, opened, rank, deadline=time.monotonic() + 0.5) for rank in (0, 1)
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
    def test_check_is_called_every_10_to_20_ms(self, rank):
        calls = []
        with doors(2) as opened, pytest.raises(JoinTimeoutError):
            join(opened, rank, deadline=time.monotonic() + 0.5, check=lambda: calls.append(time.monotonic()))
        assert 5 <= len(calls) <= 50  # fewer where others keep the processors busy
        pauses = sorted(b - a for a, b in itertools.pairwise(calls))
        assert pauses[0] >= 0.01
        assert pauses[len(pauses) // 2] < 0.02

    def test_waiting_takes_no_processor(self):
        before = time.thread_time()
        with doors(2) as opened, pytest.raises(JoinTimeoutError):
            join(opened, 0, deadline=time.monotonic() + 0.5)
        assert time.thread_time() - before < 0.1

    def test_what_was_connected_is_closed(self, threads):
        """And its other end hears of it."""
        with doors(3) as opened:
            ready = threading.Event()
            first = threads.submit(join, opened, 0, check=after(3, stop))
            with contextlib.closing(call(opened[0].address, 0)) as caller:
                half = HalfMember(caller, roster_of([each.address for each in opened], 2), 0)
                half.go_on(3)
                assert half.greeting.over
                with pytest.raises(Signal):
                    first.result(PATIENCE)
                assert ends(caller)
            assert not ready.is_set()

    def test_what_was_begun_is_closed(self, threads):
        with doors(2) as opened:
            first = threads.submit(join, opened, 0, check=after(5, stop))
            with contextlib.closing(call(opened[0].address, 0)) as caller:
                HalfMember(caller, roster_of([each.address for each in opened], 1), 0).go_on(1)
                with pytest.raises(Signal):
                    first.result(PATIENCE)
                assert ends(caller)

    def test_what_is_being_made_is_closed(self, threads):
        with doors(2) as opened:
            first = threads.submit(join, opened, 1, check=after(5, stop))
            with contextlib.closing(answer(opened[0])) as other:
                with pytest.raises(Signal):
                    first.result(PATIENCE)
                assert ends(other)

    def test_a_closed_door(self):
        with doors(2) as opened:
            opened[0].close()
            with pytest.raises(OSError, match="Bad file descriptor"):
                join(opened, 0)


class TestDescriptors:
    def test_none_is_free_for_a_while(self, threads):
        """Accepting pauses then: both listeners stay readable, and are not asked again and again."""
        with doors(2) as opened:
            full, asked = threading.Event(), []
            full.set()
            opened[0].sockets = tuple(Full(each, full, asked) for each in opened[0].sockets)
            waits = [threads.submit(join, opened, rank) for rank in (0, 1)]
            with contextlib.closing(call(opened[0].address, 0)):  # rank 1 is at the other one
                until(lambda: len(asked) > 5)
                full.clear()
                mets = [each.result(PATIENCE) for each in waits]
        assert min(b - a for a, b in itertools.pairwise(asked)) > 0.019
        assert exchanged(mets) == everyone(2)
        hang_up(*mets)

    def test_none_is_free_until_the_deadline(self, threads):
        """It is said, and waiting takes no processor."""
        with doors(2) as opened:
            full = threading.Event()
            full.set()
            opened[0].sockets = tuple(Full(each, full, []) for each in opened[0].sockets)
            waits = threads.submit(call, opened[0].address, 0)
            before = time.thread_time()
            with pytest.raises(JoinTimeoutError, match=r"127.0.0.1: Too many open files\)"):
                join(opened, 0, deadline=time.monotonic() + 0.5)
            assert time.thread_time() - before < 0.1
            waits.result(PATIENCE).close()

    def test_none_is_free_to_dial(self, threads, monkeypatch):
        with doors(2) as opened:
            monkeypatch.setattr(dialing.socket, "socket", lambda *_: refuse())
            with pytest.raises(JoinTimeoutError, match=r"127.0.0.1: Too many open files\)"):
                join(opened, 1, deadline=time.monotonic() + 0.1)


def refuse():
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class Full:
    """A listener whose process has no descriptor left for a while."""

    def __init__(self, listener, full, asked):
        self._listener = listener
        self._full = full
        self._asked = asked

    def accept(self):
        if self._full.is_set():
            self._asked.append(time.monotonic())
            refuse()
        return self._listener.accept()

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
