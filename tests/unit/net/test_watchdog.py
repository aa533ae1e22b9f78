"""The watchdog's thread and its face, with several watchdogs in one process."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from asyncio import CancelledError
from dataclasses import replace
from pathlib import Path

import pytest

from multiworld import watchdog
from multiworld._core.liveness import detector
from multiworld._core.liveness.wire import Attach, Beat, Hello, encode
from multiworld._core.membership.roster import Endpoint, Member, Roster
from multiworld._net.liveness import sockets
from multiworld._net.liveness.sockets import Sockets
from multiworld.errors import (
    InvalidJoinError,
    JoinAbandonedError,
    JoinTimeoutError,
    MultiworldError,
    StaleGenerationError,
)
from multiworld.events import Cause
from multiworld.watchdog import Snapshot, Watchdog

ROOT = Path(__file__).parents[3]
PATIENCE = 30.0  # seconds; nothing here takes that long when all is well, on a machine that runs
NOTHING = Snapshot(thread=False, worlds=(), listeners=0, connections=0)


class Group:
    """Watchdogs, each with an endpoint on loopback."""

    def __init__(self, count=2):
        self.dogs = [Watchdog() for _ in range(count)]
        self.endpoints = [dog.endpoint("127.0.0.1") for dog in self.dogs]
        self.verdicts: dict[tuple[str, int], list] = {}

    def rosters(self, name="w", dogs=None, *, generation=1, token=b"t" * 16, hang=PATIENCE):
        which = list(range(len(self.dogs))) if dogs is None else dogs
        members = tuple(
            Member(rank, self.dogs[each].process, self.endpoints[each], os.getpid(), "here")
            for rank, each in enumerate(which)
        )
        return [Roster(name, generation, rank, members, token, hang) for rank in range(len(members))]

    def attach(self, dog, roster, *, timeout=PATIENCE, on_verdict=None, cancelled=None, **more):
        heard = self.verdicts.setdefault((roster.key, roster.rank), [])
        return self.dogs[dog].attach(
            roster,
            on_verdict or heard.append,
            deadline=time.monotonic() + timeout,
            cancelled=cancelled,
            **more,
        )

    def join(self, name="w", dogs=None, **more):
        which = list(range(len(self.dogs))) if dogs is None else dogs
        group = self.rosters(name, dogs, **more)
        found: list = [None] * len(group)

        def one(rank):
            found[rank] = self.attach(which[rank], group[rank])

        run([lambda rank=rank: one(rank) for rank in range(len(group))])
        return found

    def verdict(self, key="w/1", rank=0):
        until(lambda: self.verdicts[key, rank])
        [breakage] = self.verdicts[key, rank]
        return breakage


@pytest.fixture
def group(monkeypatch):
    # Leaving is given up after a second, and then is not over yet when the test looks.
    monkeypatch.setattr(watchdog, "_LEAVE", PATIENCE)
    made = []

    def make(count=2):
        made.append(Group(count))
        return made[-1]

    yield make
    for each in made:
        for dog in each.dogs:
            assert dog.stop(time.monotonic() + PATIENCE)
            assert dog.snapshot() == NOTHING
    assert [each.name for each in threading.enumerate() if each.name == "m8d-watchdog"] == []


def run(jobs, timeout=2 * PATIENCE):
    errors: list = []

    def guarded(job):
        try:
            job()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
        assert not thread.is_alive(), "a deadlock"
    if errors:
        raise errors[0]


def until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.002)


def test_attach_leave_and_nothing_is_left(group):
    pack = group(3)
    attachments = pack.join()
    # A member that waited for the others for long knocked at their doors: that connection closes.
    until(lambda: [dog.snapshot() for dog in pack.dogs] == [Snapshot(True, ("w/1",), 1, 2)] * 3)
    attachments[0].leave()
    for rank in (1, 2):
        breakage = pack.verdict(rank=rank)
        assert (breakage.cause, breakage.ranks) == (Cause.LEFT, (0,))
        assert attachments[rank].breakage == breakage
    assert pack.verdicts["w/1", 0] == []
    for dog, endpoint in zip(pack.dogs, pack.endpoints, strict=True):
        dog.release_endpoint(endpoint)
        dog.release_endpoint(endpoint)
    for attachment in attachments:
        attachment.leave()
        attachment.detach()
    assert [dog.snapshot() for dog in pack.dogs] == [NOTHING] * 3


def test_an_attached_world_holds_its_endpoint(group):
    pack = group()
    attachments = pack.join()
    for dog, endpoint in zip(pack.dogs, pack.endpoints, strict=True):
        dog.release_endpoint(endpoint)
        assert dog.snapshot().listeners == 1
    attachments[0].leave()
    attachments[1].leave()
    assert [dog.snapshot() for dog in pack.dogs] == [NOTHING] * 2


def test_a_watchdog_can_be_used_again_after_its_last_world(group):
    pack = group()
    for name in ("a", "b"):
        for dog, endpoint in zip(pack.dogs, pack.endpoints, strict=True):
            dog.release_endpoint(endpoint)
        pack.endpoints = [dog.endpoint("127.0.0.1") for dog in pack.dogs]
        for attachment in pack.join(name):
            attachment.leave()


@contextlib.contextmanager
def stopped(dog, monkeypatch):
    """A watchdog whose thread stands still: the others' connections to it stay closing meanwhile."""
    monkeypatch.setattr(sockets, "_LINGER", 4 * PATIENCE)
    gate = threading.Event()
    assert dog._post(lambda _: gate.wait(4 * PATIENCE))
    try:
        yield
    finally:
        gate.set()


def test_who_leaves_does_not_wait_for_a_thread_that_is_needed_again(group, monkeypatch):
    pack = group()
    dog, waits = pack.dogs[0], threading.Event()
    [attachment, _] = pack.join()
    dog.release_endpoint(pack.endpoints[0])
    join = dog._thread.join

    def joined(timeout):
        waits.set()
        join(timeout)

    monkeypatch.setattr(dog._thread, "join", joined)
    with stopped(pack.dogs[1], monkeypatch):
        leaving = threading.Thread(target=attachment.leave, daemon=True)
        leaving.start()
        assert waits.wait(PATIENCE)
        dog.endpoint("127.0.0.1")
        leaving.join(PATIENCE / 2)
        assert not leaving.is_alive()


def test_a_thread_that_is_kept_outlives_its_last_world(group, monkeypatch):
    pack = group()
    monkeypatch.setattr(watchdog, "_LONGEST_WAIT", 4 * PATIENCE)
    monkeypatch.setattr(watchdog, "_HELPER_AFTER", 4 * PATIENCE)  # else its start wakes the thread
    dog, thread = pack.dogs[0], pack.dogs[0]._thread
    [attachment, _] = pack.join()
    until(lambda: dog.snapshot().connections == 1)  # a slow join makes a second one for a moment
    dog.release_endpoint(pack.endpoints[0])
    one, other = dog.keep(), dog.keep()
    with stopped(pack.dogs[1], monkeypatch):
        run([attachment.leave], timeout=PATIENCE / 2)  # it does not wait for the member that is stopped
        one()
        one()
    assert dog.snapshot() == Snapshot(True, (), 0, 1)
    thread.join(0.1)  # a shorter wait tests less, and fails nothing
    assert thread.is_alive()
    other()
    assert dog.snapshot() == NOTHING


@pytest.mark.parametrize("busy", ["0", "60"])
def test_the_thread_sleeps_where_nothing_is_due(group, monkeypatch, busy):
    """Without a helper, whose start was due for good, it took a whole core in each process."""
    monkeypatch.setenv("M8D_BUSY_TIMEOUT", busy)
    monkeypatch.setattr(watchdog, "_HELPER_AFTER", 0.0)
    wait, waited = Sockets.wait, []

    def waits(sockets, seconds):
        waited.append(seconds)
        return wait(sockets, seconds)

    monkeypatch.setattr(Sockets, "wait", waits)
    pack = group()
    pack.join()
    waited.clear()
    until(lambda: sum(each > 0.1 for each in waited) >= 4)


def test_a_helper_that_died_is_started_again(group, monkeypatch):
    monkeypatch.setattr(watchdog, "_HELPER_AFTER", 0.0)
    monkeypatch.setattr(watchdog, "_LONGEST_WAIT", 0.05)
    pack = group()
    pack.join()
    helper = pack.dogs[0]._helper
    until(lambda: helper.pid)
    died = helper.pid
    os.kill(died, signal.SIGKILL)
    until(lambda: helper.pid not in {0, died})


def broken(pack, attachments):
    """Break the world for all of these members, of which none is lost."""
    attachments[0].report("failed", (), deadline=time.monotonic() + PATIENCE)
    until(lambda: all(each.breakage is not None for each in attachments))


def test_connections_stay_for_the_next_generation_and_no_longer_than_its_join(group):
    pack = group(3)
    first = pack.join()
    broken(pack, first)
    before = [dict(dog._peers._trusted) for dog in pack.dogs]
    releases = [each.linger() for each in first]
    run([each.detach for each in first])
    until(lambda: [dog.snapshot().connections for dog in pack.dogs] == [2, 2, 2])
    assert [dog.snapshot().worlds for dog in pack.dogs] == [()] * 3
    pack.join(dogs=[0, 1], generation=2)
    for one, other in ((0, 1), (1, 0)):
        process = pack.dogs[other].process
        assert pack.dogs[one]._peers._trusted[process] is before[one][process]
    for release in releases:
        release()
        release()
    until(lambda: [dog.snapshot().connections for dog in pack.dogs] == [1, 1, 0])
    assert pack.verdicts["w/2", 0] == pack.verdicts["w/2", 1] == []


def test_a_member_that_keeps_its_connections_hears_of_one_that_does_not(group):
    pack = group()
    first = pack.join()
    broken(pack, first)
    release = first[0].linger()
    run([each.detach for each in first])
    until(lambda: [dog.snapshot().connections for dog in pack.dogs] == [0, 0])
    pack.join(generation=2)
    until(lambda: [dog.snapshot().connections for dog in pack.dogs] == [1, 1])
    release()


def test_a_world_that_lingers_is_left_all_the_same_where_it_is_not_broken(group):
    pack = group()
    first = pack.join()
    release = first[0].linger()
    first[0].leave()
    until(lambda: pack.verdicts["w/1", 1])
    assert pack.verdicts["w/1", 1][0].cause is Cause.LEFT
    release()
    first[1].detach()
    until(lambda: [dog.snapshot().connections for dog in pack.dogs] == [0, 0])


def test_who_is_lost_later_is_known_until_the_lingering_ends(group, monkeypatch):
    pack = group(4)
    first = pack.join(hang=2.0)
    broken(pack, first)
    releases = [each.linger() for each in first]
    with stopped(pack.dogs[2], monkeypatch):
        first[0].detach()  # before it is known, and after
        until(lambda: [first[rank].lost for rank in (0, 1)] == [{2}, {2}])
        first[1].detach()
        for each in (0, 1):
            releases[each]()
        until(lambda: [pack.dogs[rank].snapshot().worlds for rank in (0, 1)] == [(), ()])
    for release in releases:
        release()


def test_stop_ends_what_lingers_and_the_watchdog_can_be_used_again(group):
    pack = group()
    first = pack.join()
    broken(pack, first)
    releases = [each.linger() for each in first]
    run([each.detach for each in first])
    assert pack.dogs[0].stop(time.monotonic() + PATIENCE)
    assert pack.dogs[0]._peers.connections == 0
    until(lambda: pack.dogs[1].snapshot().connections == 0)
    pack.endpoints[0] = pack.dogs[0].endpoint("127.0.0.1")
    again = pack.join(generation=2)
    until(lambda: [dog.snapshot().connections for dog in pack.dogs] == [1, 1])
    for release in releases:
        release()
    run([each.leave for each in again])


def test_a_member_that_stops_on_a_kept_connection_is_named_as_lost(group, monkeypatch):
    pack = group(3)
    first = pack.join(hang=2.0)
    broken(pack, first)
    releases = [each.linger() for each in first]
    run([each.detach for each in first])
    with stopped(pack.dogs[2], monkeypatch):
        rosters, errors = pack.rosters(generation=2, hang=2.0), []

        def attach(rank):
            with pytest.raises(JoinAbandonedError, match="broke while it was joined") as raised:
                pack.attach(rank, rosters[rank])
            errors.append(raised.value)

        run([lambda rank=rank: attach(rank) for rank in (0, 1)])
        assert [each.lost for each in errors] == [(2,), (2,)]
    for release in releases:
        release()


def test_stop_ends_a_thread_that_is_kept(group):
    pack = group(1)
    [dog] = pack.dogs
    release = dog.keep()
    assert dog.stop(time.monotonic() + PATIENCE)
    assert dog.snapshot() == NOTHING
    dog.release_endpoint(dog.endpoint("127.0.0.1"))
    assert dog.snapshot() == NOTHING, "kept no more"
    release()


def test_two_ranks_of_a_world_in_one_process(group):
    pack = group(2)
    attachments = pack.join(dogs=[0, 0, 1])
    attachments[0].leave()
    assert pack.verdict(rank=1).ranks == (0,)
    assert pack.verdict(rank=2).ranks == (0,)


def test_members_are_asked_to_read_what_was_sent(group):
    pack = group(2)
    attachments = pack.join(dogs=[0, 0, 1])
    heard = [queue.SimpleQueue() for _ in attachments]
    for attachment, of in zip(attachments, heard, strict=True):
        attachment.read_with(lambda rank, of=of: of.put((rank, threading.current_thread().name)))
    for own, other in itertools.permutations(range(3), 2):
        attachments[own].ask_to_read((other,))
        for rank in (0, 1) if own == 2 else (other,):  # a process is asked once, for all its ranks
            assert heard[rank].get(timeout=PATIENCE) == (own, "m8d-watchdog")
    attachments[2].leave()
    pack.verdict(rank=0)
    pack.verdict(rank=1)
    for attachment in attachments:  # a world that is over asks in vain, and is asked in vain
        attachment.ask_to_read((0, 1, 2))
    attachments[0].leave()
    assert all(of.empty() for of in heard)


def test_who_has_nothing_to_read_with_is_asked_in_vain(group):
    pack = group(2)
    attachments = pack.join()
    attachments[0].ask_to_read((1,))
    attachments[1].report("it failed", deadline=time.monotonic() + PATIENCE)
    assert pack.verdict().cause is Cause.FAILED


def test_a_world_of_one(group):
    pack = group(1)
    [attachment] = pack.join()
    assert attachment.report("it failed", deadline=time.monotonic() + PATIENCE).cause is Cause.FAILED


def test_worlds_attached_from_many_threads_in_different_orders(group):
    pack = group(3)
    names = [f"w{number}" for number in range(12)]
    groups = {name: pack.rosters(name) for name in names}
    held: list = []
    orders = {0: names, 1: names[::-1], 2: names[6:] + names[:6]}
    jobs = [
        lambda rank=rank, name=name: held.append(pack.attach(rank, groups[name][rank]))
        for place in range(len(names))
        for rank in range(3)
        for name in [orders[rank][place]]
    ]
    run(jobs)
    assert len(held) == 36
    until(lambda: [dog.snapshot().connections for dog in pack.dogs] == [2, 2, 2])
    for attachment in held:
        attachment.leave()


def test_who_is_missing_at_the_deadline_is_named(group):
    pack = group(3)
    first = pack.rosters()
    errors: list = []

    def one(rank):
        with pytest.raises((JoinTimeoutError, JoinAbandonedError)) as caught:
            pack.attach(rank, first[rank], timeout=0.5)
        errors.append(caught.value)

    run([lambda: one(0), lambda: one(1)])
    # The deadlines are apart by how the threads started: whoever comes first names the missing and leaves, and the
    # other may hear of that before its own deadline.
    told = [str(error) for error in errors if isinstance(error, JoinTimeoutError)]
    assert told
    for text in told:
        assert "rank 2 (pid" in text or "ranks" in text
        assert f"127.0.0.1:{pack.endpoints[2].port}" in text
    assert [dog.snapshot().worlds for dog in pack.dogs] == [(), (), ()]


def test_what_is_done_meanwhile_ends_with_the_attachment(group):
    pack = group(2)
    roster, looks = pack.rosters()[0], []

    def meanwhile(attachment, check):
        assert attachment.roster is roster
        while len(looks) < 1000:
            looks.append(time.monotonic())
            check()
            time.sleep(0.01)

    began = time.monotonic()
    with pytest.raises(JoinTimeoutError, match="rank 1"):
        pack.attach(0, roster, timeout=0.3, meanwhile=meanwhile)
    assert time.monotonic() >= began + 0.3
    assert looks[-2] < looks[0] + 0.3, "the time begins before the first look"
    assert pack.dogs[0].snapshot().worlds == ()


def test_an_error_of_what_is_done_meanwhile_leaves_nothing_attached(group):
    pack = group(2)

    def meanwhile(*_):
        raise OSError("no lane")

    with pytest.raises(OSError, match="no lane"):
        pack.attach(0, pack.rosters()[0], meanwhile=meanwhile)
    assert pack.dogs[0].snapshot().worlds == ()


class InterruptedLock:
    """A lock; Ctrl-C comes as this thread lets go of it for the `number`-th time."""

    def __init__(self, lock, number):
        self._lock, self._left, self._here = lock, number, threading.current_thread()

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()
        if threading.current_thread() is self._here:
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt


@pytest.mark.parametrize(("call", "number"), [("endpoint", 1), ("attach", 1), ("attach", 2)])
def test_an_interrupt_leaves_no_listener_and_nothing_attached(group, monkeypatch, call, number):
    pack = group(2)
    dog, roster = pack.dogs[0], pack.rosters()[0]
    monkeypatch.setattr(dog, "_lock", InterruptedLock(dog._lock, number))
    with pytest.raises(KeyboardInterrupt):
        dog.endpoint("127.0.0.2") if call == "endpoint" else pack.attach(0, roster)
    until(lambda: dog.snapshot() == Snapshot(thread=True, worlds=(), listeners=1, connections=0))
    dog.release_endpoint(pack.endpoints[0])
    assert dog.snapshot() == NOTHING


def test_a_wrong_token_is_not_let_in(group):
    pack = group()
    good, bad = pack.rosters(), pack.rosters(token=b"x" * 16)

    def one(rank, roster):
        with pytest.raises(JoinTimeoutError):
            pack.attach(rank, roster, timeout=0.8)

    run([lambda: one(0, good[0]), lambda: one(1, bad[1])])


def test_a_member_that_gives_up_ends_the_join_of_the_others(group):
    pack = group(3)
    first = pack.rosters()
    gave_up = threading.Event()

    def patient():
        with pytest.raises(JoinAbandonedError, match="rank 1"):
            pack.attach(0, first[0])

    def impatient():
        with pytest.raises(JoinAbandonedError, match="cancelled"):
            pack.attach(1, first[1], cancelled=gave_up.is_set)

    threading.Timer(0.3, gave_up.set).start()
    run([patient, impatient])
    assert pack.verdicts["w/1", 0] == pack.verdicts["w/1", 1] == []


def test_a_stale_generation_is_refused(group):
    pack = group()
    keep = pack.join("keep")
    for attachment in pack.join():
        attachment.leave()
    new = pack.rosters(dogs=[0, 0], generation=2)
    run([lambda: pack.attach(0, new[0]), lambda: pack.attach(0, new[1])])
    old = pack.rosters()
    with pytest.raises(StaleGenerationError, match="generation 2"):
        pack.attach(1, old[1])
    assert keep[0].breakage is None


def test_a_process_that_is_gone_ends_the_join_early(group):
    pack = group()
    pack.dogs[1].release_endpoint(pack.endpoints[1])
    with pytest.raises(JoinAbandonedError, match="rank 1 is gone"):
        pack.attach(0, pack.rosters()[0])


def test_rosters_that_are_not_for_this_watchdog(group):
    pack = group()
    good = pack.rosters()
    with pytest.raises(InvalidJoinError, match="belongs to process"):
        pack.attach(1, good[0])
    mine = good[0]
    for odd in (
        replace(mine, generation=2**32),
        replace(mine, members=(mine.members[0], replace(mine.members[1], process="p1"))),
        replace(
            mine, members=(mine.members[0], replace(mine.members[1], endpoint=Endpoint("127.0.0.1", 2**16)))
        ),
    ):
        with pytest.raises(InvalidJoinError, match="cannot be"):
            pack.attach(0, odd)
    with pytest.raises(InvalidJoinError, match="at most 512"):
        pack.attach(0, pack.rosters("ä" * 300)[0])
    attachments = pack.join()
    with pytest.raises(InvalidJoinError, match="attached already"):
        pack.attach(0, good[0])
    assert attachments[0].breakage is None
    pack.dogs[0].release_endpoint(pack.endpoints[0])
    attachments[0].leave()
    until(lambda: pack.dogs[0].snapshot().listeners == 0)
    with pytest.raises(InvalidJoinError, match="does not listen"):
        pack.attach(0, pack.rosters("x")[0])
    with pytest.raises(MultiworldError, match="numeric"):
        pack.dogs[0].endpoint("localhost")


def test_reports_from_many_threads_get_one_verdict(group):
    pack = group(2)
    attachments = pack.join()
    found: list = []
    run(
        [
            lambda: found.append(attachments[0].report("cut", (1,), deadline=time.monotonic() + PATIENCE))
            for _ in range(8)
        ]
    )
    assert {(each.cause, each.ranks, each.detail) for each in found} == {
        (Cause.FAILED, (1,), "at rank 0: cut")
    }
    told = pack.verdict(rank=1)
    assert (told.cause, told.detail) == (Cause.FAILED, "at rank 0: cut")
    assert attachments[0].report("again", deadline=time.monotonic() + PATIENCE) == found[0]


def test_a_report_does_not_wait_beyond_its_deadline_or_the_world(group, monkeypatch):
    monkeypatch.setattr(detector, "GRACE", PATIENCE)
    pack = group()
    attachments = pack.join(hang=2 * PATIENCE)
    began = time.monotonic()
    assert attachments[0].report("cut", deadline=began + 0.05) is None
    assert time.monotonic() - began < PATIENCE - 1, "it waited for the verdict"
    monkeypatch.setattr("multiworld._net.liveness.attachment._REPORT_GRACE", 0.05)
    assert attachments[1].breakage_for("cut").detail == "at rank 1: cut"
    attachments[1].leave()
    assert attachments[1].report("late", deadline=time.monotonic() + PATIENCE) is None


def test_a_world_whose_members_answer_is_not_broken_by_what_may_be_anothers(group, monkeypatch):
    pack = group(3)
    attachments = pack.join()
    assert attachments[0].breakage_after_all() is None
    assert pack.verdicts["w/1", 0] == []
    # One that has met with the same, and knows more, says so a moment later.
    monkeypatch.setattr("multiworld._net.liveness.attachment._OTHERS_GRACE", PATIENCE)
    reporting = threading.Thread(
        target=attachments[1].report, args=("cut", (2,)), kwargs={"deadline": time.monotonic() + PATIENCE}
    )
    reporting.start()
    breakage = attachments[0].breakage_after_all()
    reporting.join(PATIENCE)
    assert (breakage.cause, breakage.ranks) == (Cause.FAILED, (2,))


def test_the_watchdogs_own_thread_asks_no_member(group):
    pack, seen = group(2), []
    [beside, _] = pack.join("beside")
    mine, others = pack.rosters()
    made = []
    run(
        [
            lambda: pack.attach(0, mine, on_verdict=lambda _: seen.append(beside.breakage_after_all())),
            lambda: made.append(pack.attach(1, others)),
        ]
    )
    made[0].leave()
    until(lambda: seen)
    assert seen == [None]


@pytest.mark.parametrize("kind", [RuntimeError, CancelledError, KeyboardInterrupt])
def test_a_callback_that_raises_does_not_blind_the_others(group, caplog, kind):
    pack = group()
    pack.join("keep")

    def broken(breakage):
        raise kind("the callback")

    first = pack.rosters()
    held: list = []
    run([
        lambda: held.append(pack.attach(0, first[0], on_verdict=broken)),
        lambda: held.append(pack.attach(1, first[1])),
    ])  # fmt: skip
    held[1].report("cut", deadline=time.monotonic() + PATIENCE)
    until(lambda: "the callback" in caplog.text)
    assert pack.dogs[0].snapshot().thread
    assert pack.verdicts["keep/1", 0] == []


def test_a_callback_may_leave_and_report(group):
    pack = group()
    done = threading.Event()
    held: list = []

    def callback(breakage):
        assert held[0].report("me too", deadline=time.monotonic() + PATIENCE) == breakage
        held[0].leave()
        done.set()

    first = pack.rosters()
    run(
        [
            lambda: held.insert(0, pack.attach(0, first[0], on_verdict=callback)),
            lambda: held.append(pack.attach(1, first[1])),
        ]
    )
    held[1].leave()
    assert done.wait(PATIENCE)
    until(lambda: pack.dogs[0].snapshot().worlds == ())


@pytest.mark.parametrize("kind", [ZeroDivisionError, CancelledError])
def test_a_watchdog_that_fails_breaks_its_worlds_and_can_be_used_again(group, caplog, monkeypatch, kind):
    pack = group()
    attachments = pack.join()

    def fail(*_):
        raise kind

    monkeypatch.setattr(pack.dogs[0]._peers, "settle", fail)
    breakage = attachments[0].report("cut", deadline=time.monotonic() + PATIENCE)
    assert breakage is not None
    assert breakage.cause is Cause.FAILED
    assert kind.__name__ in breakage.detail
    assert pack.verdict() == breakage
    assert pack.verdict(rank=1).ranks == (0,)
    until(lambda: "worlds are broken" in caplog.text)  # another thread writes it
    attachments[0].leave()
    until(lambda: not pack.dogs[0].snapshot().thread)
    pack.endpoints[0] = pack.dogs[0].endpoint("127.0.0.1")
    pack.join("again")


def test_a_thread_that_cannot_start_leaves_nothing(group, monkeypatch):
    dog = Watchdog()

    def refuse(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            dog.endpoint("127.0.0.1")
    assert dog.snapshot() == NOTHING


def test_stop_leaves_everything(group):
    pack = group(3)
    pack.join()
    assert pack.dogs[0].stop(time.monotonic() + PATIENCE)
    assert pack.dogs[0].stop(time.monotonic() + PATIENCE)
    assert pack.dogs[0].snapshot() == NOTHING
    for rank in (1, 2):
        assert pack.verdict(rank=rank).cause is Cause.LEFT
    assert pack.verdicts["w/1", 0] == []


def test_stop_says_whether_a_thread_that_ends_by_itself_has_ended(group, monkeypatch):
    pack = group(1)
    monkeypatch.setattr(watchdog, "_LEAVE", 0.05)
    gate, shut_down = threading.Event(), Sockets.shut_down

    def slowly(sockets):
        gate.wait(PATIENCE)
        shut_down(sockets)

    monkeypatch.setattr(Sockets, "shut_down", slowly)
    pack.dogs[0].release_endpoint(pack.endpoints[0])  # its last
    until(lambda: pack.dogs[0]._sockets is None)
    assert not pack.dogs[0].stop(time.monotonic() + 0.05)
    gate.set()
    assert pack.dogs[0].stop(time.monotonic() + PATIENCE)
    assert pack.dogs[0].snapshot() == NOTHING


def test_stop_in_the_watchdogs_own_thread_does_not_wait(group):
    pack = group()
    stopped: list = []
    first = pack.rosters()
    held: list = []
    run([
        lambda: pack.attach(0, first[0], on_verdict=lambda _: stopped.append(pack.dogs[0].stop(time.monotonic() + PATIENCE))),
        lambda: held.append(pack.attach(1, first[1])),
    ])  # fmt: skip
    held[0].leave()
    until(lambda: stopped == [False])
    until(lambda: pack.dogs[0].snapshot() == NOTHING)


# -- whatever else connects


def until_dropped(connection):
    """Wait until the other end hangs up."""
    connection.settimeout(PATIENCE)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            continue


def misbehaving(pack):
    dog = pack.dogs[0].process
    other = pack.dogs[1].process
    smaller = min(other, "0" * 31 + "1")
    hello = encode(Hello(smaller, dog, b"n" * 16))
    return {
        "silent": b"",
        "random": secrets.token_bytes(3000),
        "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "half a header": b"m8\x01",
        "half a frame": encode(Beat(1))[:8],
        "huge": b"m8\x01\x07\xff\xff",
        "no greeting": encode(Beat(1)),
        "greeting only": hello,
        "wrong proof": hello + encode(Attach("w/1", 1, b"p" * 32)),
        "unknown world": hello + encode(Attach("nope/1", 1, b"p" * 32)),
        "wrong target": encode(Hello(smaller, "f" * 32, b"n" * 16)),
    }


def test_whatever_else_connects_is_dropped_and_changes_nothing(group):
    """How soon (at once, or within a second) is the peers' decision: test_watchdog_peers."""
    pack = group()
    pack.join()
    address = (pack.endpoints[0].host, pack.endpoints[0].port)
    dropped = []

    def one(name, data):
        with socket.create_connection(address, timeout=PATIENCE) as connection:
            connection.sendall(data)
            until_dropped(connection)
        dropped.append(name)

    run([lambda item=item: one(*item) for item in misbehaving(pack).items()])
    assert len(dropped) == 11
    assert pack.verdicts == {("w/1", 0): [], ("w/1", 1): []}
    until(lambda: pack.dogs[0].snapshot().connections == 1)


def test_a_slow_client_is_dropped_before_it_has_greeted(group):
    pack = group()
    pack.join()
    data = encode(Hello("0" * 32, pack.dogs[0].process, b"n" * 16))
    address = (pack.endpoints[0].host, pack.endpoints[0].port)
    with (
        socket.create_connection(address, timeout=PATIENCE) as connection,
        pytest.raises((BrokenPipeError, ConnectionResetError)),
    ):
        for byte in data:
            connection.sendall(bytes([byte]))
            time.sleep(0.2)  # a byte at a time: what is tested
    assert pack.verdicts == {("w/1", 0): [], ("w/1", 1): []}


def test_a_flood_of_connections_does_not_keep_members_out(group):
    pack = group()
    address = (pack.endpoints[0].host, pack.endpoints[0].port)
    with contextlib.ExitStack() as held:
        for _ in range(400):
            held.enter_context(socket.create_connection(address, timeout=PATIENCE))
        pack.join()
        until(lambda: pack.dogs[0].snapshot().connections <= 257)


FORK = """
import os, sys, time
from multiworld._core.membership.roster import Endpoint, Member, Roster
from multiworld.watchdog import Watchdog

PATIENCE = 30.0
dog = Watchdog()
endpoint = dog.endpoint("127.0.0.1")
member = Member(0, dog.process, endpoint, os.getpid(), "here")
held = dog.attach(Roster("w", 1, 0, (member,), b"t" * 16, 5.0), print, deadline=time.monotonic() + PATIENCE)
before = set(os.listdir("/proc/self/fd"))
process = dog.process
pid = os.fork()
if pid == 0:
    sockets = [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}") and "socket" in os.readlink(f"/proc/self/fd/{fd}")]
    held.leave()
    fresh = dog.endpoint("127.0.0.1")
    good = not sockets and dog.process != process and held.report("x", deadline=0) is None and fresh.port
    os._exit(0 if good else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert dog.snapshot().thread and dog.process == process
assert held.report("cut", deadline=time.monotonic() + PATIENCE).detail == "at rank 0: cut"
assert dog.stop(time.monotonic() + PATIENCE)
print("good")
"""


def test_a_forked_child_touches_nothing_of_its_parent():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "good"


def test_a_program_that_just_ends_does():
    code = FORK.split("before =", maxsplit=1)[0] + "print('end')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
