"""Members that get their lanes connected: real sockets, and members that are late."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from kits.doorkit import (
    MEMBER,
    address_of,
    after,
    all_closed,
    answer,
    call,
    doors,
    everyone,
    exchanged,
    hang_up,
    join,
    join_all,
    nothing,
    roster_of,
    started,
    tell,
)
from kits.meetkit import PATIENCE
from kits.memorykit import refusal

from multiworld._net.lane import dialing, meeting, memory
from multiworld.errors import JoinTimeoutError


@pytest.fixture(autouse=True)
def nothing_stays_open():
    with all_closed():
        yield


@pytest.fixture
def threads():
    with ThreadPoolExecutor(8) as pool:
        yield pool


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
            read = (
                everyone(size) if places == "here" else [[]] * size
            )  # the kernel names who is within the host
            assert [sorted(met.readers) for met in mets] == read
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
                before = time.monotonic()
                dial.again("refused")
                pauses.append((dial.due - before, dial.due - time.monotonic()))
        for (longest, shortest), wanted in zip(pauses, [0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5], strict=True):
            assert shortest - 1e-6 <= wanted / 1000 <= longest + 1e-6

    def test_pauses_below_a_millisecond_are_not_rounded_up(self, monkeypatch):
        """A poll takes whole milliseconds. One of many shows it, on a busy machine too."""
        dialed, real = [], dialing.Dial.again
        monkeypatch.setattr(
            dialing.Dial, "again", lambda dial, why: dialed.append(time.monotonic()) or real(dial, why)
        )
        pauses, end = [], time.monotonic() + PATIENCE
        while min(pauses, default=1.0) >= 0.0009 and time.monotonic() < end:
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
