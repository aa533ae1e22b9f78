"""Meetings to which others come than the members, and members that stop in the middle."""

from __future__ import annotations

import contextlib
import os
import select
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from kits.doorkit import (
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
    nothing,
    roster_of,
    soon,
    started,
    tell,
)
from kits.meetkit import PATIENCE

from multiworld._core.lane.greeting import GreetingError
from multiworld._net.lane import meeting
from multiworld.errors import JoinTimeoutError


@pytest.fixture(autouse=True)
def nothing_stays_open():
    with all_closed():
        yield


@pytest.fixture
def threads():
    with ThreadPoolExecutor(8) as pool:
        yield pool


class TestStrangers:
    @pytest.fixture(params=["tcp", "unix"])
    def stranger(self, request):
        """Connects anyone to a door."""
        with contextlib.ExitStack() as stack:
            yield lambda opened: stack.enter_context(
                contextlib.closing(call(opened[0].address, 0, unix=request.param == "unix"))
            )

    @pytest.fixture
    def waiting(self, threads):
        """A meeting of two, in which rank 1 is missing."""
        with doors(2) as opened:
            yield opened, threads.submit(join, opened, 0)

    def met(self, opened, waits):
        mets = [join(opened, 1), waits.result(PATIENCE)]
        mets.reverse()
        assert exchanged(mets) == everyone(2)
        hang_up(*mets)

    @pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(36), os.urandom(5000)])
    def test_bytes_of_anyone(self, stranger, waiting, said):
        for _ in range(3):
            caller = stranger(waiting[0])
            with contextlib.suppress(ConnectionError):  # it does not listen to the end
                caller.sendall(said)
            if len(said) > 30:
                assert ends(caller)
        self.met(*waiting)

    def test_connections_that_are_closed_at_once(self, stranger, waiting):
        for _ in range(50):
            stranger(waiting[0]).close()
        self.met(*waiting)

    @pytest.mark.parametrize("messages", [1, 2])
    def test_one_that_does_not_hold_the_token(self, stranger, waiting, messages):
        opened, _ = waiting
        caller = stranger(opened)
        half = HalfMember(caller, roster_of([each.address for each in opened], 1, token=bytes(16)), 0)
        with pytest.raises(GreetingError):
            half.go_on(1)
        if messages == 2:
            caller.sendall(bytes(48))
            assert ends(caller)
        self.met(*waiting)

    def test_a_member_of_another_generation(self, stranger, waiting):
        opened, _ = waiting
        roster = roster_of([each.address for each in opened], 1, generation=2)
        with pytest.raises(ConnectionError):
            HalfMember(stranger(opened), roster, 0).go_on(1)
        self.met(*waiting)

    def test_200_that_say_nothing(self, stranger, waiting, monkeypatch):
        """The oldest are dropped; size + 16 are kept."""
        monkeypatch.setattr(meeting, "_IDLE", 1000.0)
        callers = [stranger(waiting[0]) for _ in range(200)]
        assert all(ends(each) for each in callers[:182])
        for each in callers[182:]:
            each.setblocking(False)
            with pytest.raises(BlockingIOError):
                each.recv(1)
        self.met(*waiting)

    def test_silence_is_dropped(self, stranger, waiting, monkeypatch):
        monkeypatch.setattr(meeting, "_IDLE", 0.1)
        caller = stranger(waiting[0])
        began = time.monotonic()
        assert ends(caller)
        assert time.monotonic() - began < PATIENCE / 2
        self.met(*waiting)

    def test_whoever_says_something_is_not_silent(self, stranger, waiting, monkeypatch):
        """A member on a busy machine, byte by byte."""
        monkeypatch.setattr(meeting, "_IDLE", 5.0)
        opened, waits = waiting
        caller = stranger(opened)
        half = HalfMember(caller, roster_of([each.address for each in opened], 1), 0)
        for _ in range(30):  # 6 s in all
            assert not select.select([caller], [], [], 0.2)[0]
            caller.sendall(half.greeting.unsent[:1])
            half.greeting.wrote(1)
        half.go_on(3)
        assert half.greeting.over
        hang_up(waits.result(PATIENCE))

    def test_silence_is_borne_for_2_seconds(self, stranger, waiting, monkeypatch):
        assert meeting._IDLE == 2.0
        monkeypatch.setattr(meeting, "_IDLE", 6.0)  # the caller may be held up, too
        caller = stranger(waiting[0])
        caller.settimeout(1.5)
        with pytest.raises(TimeoutError):
            caller.recv(1)
        caller.settimeout(PATIENCE)
        assert ends(caller)
        self.met(*waiting)

    def test_a_rank_that_is_connected_already(self, stranger, threads):
        with doors(3) as opened:
            waits = [threads.submit(join, opened, rank) for rank in (0, 1)]
            roster = roster_of([each.address for each in opened], 1)
            # Rank 1 is connected with rank 0 as soon as another one is refused that says it were rank 1.
            deadline = soon()
            refused = False
            while not refused:
                assert time.monotonic() < deadline
                again = HalfMember(stranger(opened), roster, 0)
                refused = self.refuses(again)
            mets = [*(each.result(PATIENCE) for each in reversed([threads.submit(join, opened, 2), *waits]))]
        mets.sort(key=lambda met: [rank in met.connections for rank in range(3)])
        assert exchanged(mets) == everyone(3)
        hang_up(*mets)

    def refuses(self, half):
        """Whether a door refuses one that says its rank and holds the token; else this one goes away."""
        try:
            half.go_on(2)
        except ConnectionError:
            return True
        half.connection.close()
        return False

    def test_strangers_at_the_door_of_a_member_that_dials(self, threads):
        with doors(2) as opened:
            waits = threads.submit(join, opened, 1)
            with contextlib.closing(call(opened[1].address, 1)) as caller:
                caller.sendall(bytes(100))
                assert ends(caller)
            mets = [join(opened, 0), waits.result(PATIENCE)]
        assert exchanged(mets) == everyone(2)
        hang_up(*mets)

    def test_a_stranger_where_a_member_should_be(self, threads):
        """What listens at the address of rank 0 is none: it is dialed again until it is."""
        with doors(2, places=["", ""]) as opened:
            waits = threads.submit(join, opened, 1)
            for _ in range(5):
                with contextlib.closing(answer(opened[0])) as impostor:
                    impostor.sendall(os.urandom(48))
                    assert ends(impostor)
            mets = [join(opened, 0), waits.result(PATIENCE)]
        assert exchanged(mets) == everyone(2)
        hang_up(*mets)


class TestBrokenInTheMiddle:
    @pytest.mark.parametrize("messages", [0, 1, 2, 3])
    def test_who_dials(self, threads, messages):
        """It comes again. With its last message it is connected, and its end is seen."""
        with doors(3) as opened:
            waits = [threads.submit(join, opened, 0)]
            half = HalfMember(call(opened[0].address, 0), roster_of([each.address for each in opened], 1), 0)
            half.go_on(messages)
            assert half.greeting.over == (messages == 3)
            half.connection.close()
            waits += [threads.submit(join, opened, rank) for rank in (1, 2)]
            mets = [each.result(PATIENCE) for each in waits]
        assert exchanged(mets) == everyone(3)
        hang_up(*mets)

    @pytest.mark.parametrize("messages", [0, 1, 2, 3])
    def test_who_accepts(self, threads, messages):
        with doors(3, places=["", "", ""]) as opened:
            waits = [threads.submit(join, opened, 1)]
            half = HalfMember(answer(opened[0]), roster_of([each.address for each in opened], 0))
            half.go_on(messages)
            assert half.greeting.over == (messages == 3)
            half.connection.close()
            waits = [threads.submit(join, opened, 0), *waits, threads.submit(join, opened, 2)]
            mets = [each.result(PATIENCE) for each in waits]
        assert exchanged(mets) == everyone(3)
        hang_up(*mets)

    def test_a_member_that_is_killed(self):
        """The others miss it until their deadline, and say so."""
        with doors(3) as opened, started(MEMBER, 2) as victim:
            there = [*(each.address for each in opened[:2]), address_of(victim)]
            rosters = [roster_of(there, rank) for rank in (0, 1)]
            tell(victim, there)
            # It is connected with rank 0 alone, and so goes on.
            half = HalfMember(answer(opened[0]), rosters[0])
            half.go_on(3)
            assert half.greeting.over
            half.connection.close()
            victim.kill()
            victim.wait(PATIENCE)
            deadline = time.monotonic() + 3.0  # the others meet within it, on a busy machine
            with ThreadPoolExecutor(2) as pool:
                waits = [
                    pool.submit(meeting.meet, opened[rank], rosters[rank], deadline=deadline, check=nothing)
                    for rank in (0, 1)
                ]
                for each in waits:
                    with pytest.raises(JoinTimeoutError, match=r"^rank 2 "):
                        each.result(PATIENCE)
