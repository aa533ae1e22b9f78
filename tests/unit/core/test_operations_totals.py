"""What a member has done since its generation began, as numbers that only rise."""

from __future__ import annotations

import sys
import threading
from collections import Counter

import pytest

from multiworld._core.lane.operations import Receive, Send
from multiworld._core.operations.log import KIND, PEER, SIZE, TAG, OperationLog, went_well
from multiworld._core.operations.totals import Sums, Totals


def send(peer=1, size=4, *, done=True, error=None):
    made = Send(peer, 0, 0, memoryview(bytes(size)))
    made.done, made.error = done, error
    return made


def receive(sender=1, size=4, *, done=True, error=None):
    made = Receive(None, 0, 0, memoryview(bytearray(size)), 1)
    made.sender, made.done, made.error = sender, done, error
    return made


def by_peer(totals):
    return totals.sent, totals.sent_bytes, totals.received, totals.received_bytes


def test_messages_count_by_peer_and_those_of_nobody_known_in_the_last_place():
    totals = Totals(3)
    totals.message("send", 2, 10)
    totals.message("send", 2, 5)
    totals.message("recv", 0, 7)
    totals.message("recv", None, 1)
    assert by_peer(totals) == ([0, 0, 2, 0], [0, 0, 15, 0], [1, 0, 0, 1], [7, 0, 0, 1])
    assert totals.sums() == Sums(Counter(send=2, recv=2), 15, 8, Counter())


def test_collectives_count_by_kind():
    totals = Totals(2)
    totals.collective("all_reduce", 8)
    totals.collective("all_reduce", 16)
    totals.collective("barrier", 0)
    found = totals.sums()
    assert found == Sums(Counter(all_reduce=2, barrier=1), 0, 0, Counter(all_reduce=24))
    totals.collective("all_reduce", 8)
    assert found.operations["all_reduce"] == 2, "what was told stays as it was"


def test_sums_are_added():
    one = Sums(Counter(send=1), 4, 1, Counter(all_reduce=8, gather=1))
    two = Sums(Counter(send=2, recv=1), 6, 3, Counter(gather=1))
    assert one + two == Sums(Counter(send=3, recv=1), 10, 4, Counter(all_reduce=8, gather=2))
    assert sum([one, two], Sums()) == one + two


def test_what_was_posted_counts_once_when_it_is_over():
    totals = Totals(2)
    waiting = send(size=3, done=False), receive(size=6, done=False)
    for each in (send(size=2), receive(size=5), *waiting):
        totals.posted(each)
    assert totals.sums() == Sums(Counter(send=1, recv=1), 2, 5, Counter())
    assert totals.sums() == Sums(Counter(send=1, recv=1), 2, 5, Counter())
    for each in waiting:
        each.done = True
    for _ in range(2):
        assert totals.sums() == Sums(Counter(send=2, recv=2), 5, 11, Counter())


@pytest.mark.parametrize("operation", [send(error=OSError()), receive(error=OSError()), receive(None)])
def test_what_failed_or_was_taken_back_does_not_count(operation):
    totals = Totals(2)
    totals.posted(operation)
    operation.done = False
    totals.posted(operation)
    operation.done = True
    assert totals.sums() == Sums()


def test_posted_messages_are_let_go_from_time_to_time():
    totals = Totals(2)
    for _ in range(63):
        operation = send(done=False)
        totals.posted(operation)
        operation.done = True
    assert totals.sent[1] == 0
    last = send(done=False)
    totals.posted(last)
    assert totals.sent[1] == 63, "the 64th has them looked at"
    for _ in range(62):
        totals.posted(send(done=False))
    last.done = True
    assert totals.sent[1] == 63
    totals.posted(send(done=False))
    assert totals.sent[1] == 64
    # 63 are under way: it would cost too much to look at them with each one that comes.
    for number in range(63):
        assert totals.sent[1] == 64, number
        operation = send(done=False)
        totals.posted(operation)
        operation.done = True
    assert totals.sent[1] == 64 + 62


def test_a_generation_that_is_over_holds_no_message():
    totals = Totals(2)
    over, failing, late = (send(done=False) for _ in range(3))
    totals.posted(over)
    totals.posted(failing)
    over.done = True
    totals.close()
    totals.posted(late)
    failing.done = late.done = True
    assert totals.sums() == Sums(Counter(send=1), 4, 0, Counter())


def test_an_operation_of_the_log_counts_as_what_it_is():
    log = OperationLog(0, 3)
    part = log.group(7, (0, 2))
    for kind, peer, size, tag in (
        ("send", 2, 8, 0), ("recv", None, 4, 9), ("broadcast", 1, 16, None), ("barrier", None, 0, None),
    ):  # fmt: skip
        entry = [part, kind, None, size, peer, tag, 1.0, 2.0]
        assert (entry[KIND], entry[PEER], entry[SIZE], entry[TAG]) == (kind, peer, size, tag)
        went_well(entry)
    assert by_peer(log.totals) == ([0, 0, 1, 0], [0, 0, 8, 0], [0, 0, 0, 1], [0, 0, 0, 4])
    assert log.totals.sums().operations == Counter(send=1, recv=1, broadcast=1, barrier=1)
    assert log.world.totals is part.totals is log.totals


def test_the_log_closes_its_totals_with_itself():
    log = OperationLog(0, 2)
    operation = send(done=False)
    log.totals.posted(operation)
    log.freeze(1.0)
    operation.done = True
    assert log.totals.sums() == Sums()


def test_threads_lose_nothing():
    """As `Messages.send` adds; that a list and an int need no lock is CPython's, and may end."""
    totals, rounds, threads = Totals(2), 20_000, 4
    sent, sizes, begin = totals.sent, totals.sent_bytes, threading.Barrier(threads)

    def work(number):
        begin.wait()
        for _ in range(rounds):
            sent[1] += 1
            sizes[1] += 3
            totals.collective("all_reduce", 1)
            totals.message("recv", 1, 2)
            operation = send(peer=0, done=False)
            totals.posted(operation)
            operation.done = True

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        running = [threading.Thread(target=work, args=(each,)) for each in range(threads)]
        for each in running:
            each.start()
        for each in running:
            each.join()
    finally:
        sys.setswitchinterval(interval)
    count = threads * rounds
    expected = Counter(send=2 * count, recv=count, all_reduce=count)
    assert totals.sums() == Sums(expected, 7 * count, 2 * count, Counter(all_reduce=count))
