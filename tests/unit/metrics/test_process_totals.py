"""Totals over the generations of a world, in one process."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections import Counter

from kits.meetkit import until

from multiworld._core.operations.totals import Sums, Totals
from multiworld._generation import process_totals
from multiworld._generation.process_totals import ProcessTotals


def begun(kept, world="w", sent=0):
    totals = Totals(2)
    kept.begin(world, totals)
    for _ in range(sent):
        totals.message("send", 1, 10)
    return totals


def sends(number):
    return Sums(Counter(send=number) if number else Counter(), 10 * number, 0, Counter())


@contextlib.contextmanager
def held_by_another_thread(lock):
    taken, over = threading.Event(), threading.Event()

    def hold():
        with lock:
            taken.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


def exit_code(pid):
    """Of a child, which is killed where it hangs."""
    ended = []
    try:
        until(lambda: ended.extend(each for each in [os.waitpid(pid, os.WNOHANG)] if each[0]) or ended)
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    return os.waitstatus_to_exitcode(ended[0][1])


def test_numbers_never_go_back_from_one_generation_to_the_next():
    kept = ProcessTotals()
    first = begun(kept, sent=2)
    assert kept.sums() == ({"w": sends(2)}, Sums())
    kept.end("w", first)
    kept.end("w", first)  # refused twice
    assert kept.sums() == ({"w": sends(2)}, Sums())
    first.message("send", 1, 10)  # late: not counted, and not twice
    second = begun(kept, sent=1)
    assert kept.sums() == ({"w": sends(3)}, Sums())
    prepared = begun(kept)  # beside the one that works
    second.message("send", 1, 10)
    assert kept.sums() == ({"w": sends(4)}, Sums())
    kept.end("w", second)
    prepared.message("send", 1, 10)
    assert kept.sums() == ({"w": sends(5)}, Sums())


def test_one_that_was_prepared_and_dropped_is_not_held():
    kept = ProcessTotals()
    first = begun(kept, sent=1)
    begun(kept)
    assert kept.sums() == ({"w": sends(1)}, Sums())
    kept.end("w", first)
    assert len(kept._worlds["w"].present) == 0


def test_a_generation_that_ends_leaves_its_numbers_behind(monkeypatch):
    """They do not depend on who still holds the generation."""
    from multiworld._core.membership.roster import Endpoint, Member, Roster
    from multiworld._generation import operations

    class Attachment:
        def describe_with(self, describe):
            pass

    kept = ProcessTotals()
    monkeypatch.setattr(operations, "process_totals", kept)
    member = Member(0, "0" * 32, Endpoint("127.0.0.1", 1), 1, "host")
    made = operations.GenerationOperations(
        Roster("w", 1, 0, (member,), b"t" * 16, 5.0), Attachment(), None, {}, bytes
    )
    made.totals.message("send", 0, 10)
    assert kept.sums()[0] == {"w": sends(1)}
    made.freeze()
    made = None
    gc.collect()
    assert kept.sums()[0] == {"w": sends(1)}


def test_the_end_of_one_that_was_never_begun_is_nothing():
    kept = ProcessTotals()
    kept.end("w", Totals(2))
    assert kept.sums() == ({}, Sums())


def test_worlds_that_ended_long_ago_are_forgotten_and_stay_in_the_sum(monkeypatch):
    monkeypatch.setattr(process_totals, "KEPT", 2)
    kept = ProcessTotals()
    living = begun(kept, "living", sent=7)
    ended = {name: begun(kept, name, sent=1) for name in ("a", "b", "c")}
    again = begun(kept, "a", sent=1)
    for name, each in ended.items():
        kept.end(name, each)
    kept.end("a", again)
    # "a" ended last: "b" is the oldest.
    assert kept.sums() == ({"living": sends(7), "c": sends(1), "a": sends(2)}, sends(1))
    assert list(kept.sums()[0]) == ["living", "c", "a"]
    kept.end("living", living)
    assert kept.sums() == ({"a": sends(2), "living": sends(7)}, sends(2))
    anew = begun(kept, "b", sent=1)
    assert (kept.sums()[0]["b"], anew.sent[1]) == (sends(1), 1)


def test_a_forked_child_begins_at_nothing():
    totals = begun(process_totals.process_totals, "forked", sent=3)
    process_totals.process_totals.reported(written=True)
    assert process_totals.process_totals.sums()[0]["forked"] == sends(3)
    with held_by_another_thread(process_totals.process_totals._lock):
        pid = os.fork()
        if not pid:
            found = process_totals.process_totals.sums(), process_totals.process_totals.reports
            os._exit(found != (({}, Sums()), 0))
    assert exit_code(pid) == 0
    process_totals.process_totals.end("forked", totals)


def test_a_forked_child_ends_its_parents_worlds_before_anything_is_cleared(monkeypatch):
    monkeypatch.setattr(process_totals, "_know_forks", lambda: None)
    kept = ProcessTotals()
    totals = begun(kept, sent=3)
    with held_by_another_thread(kept._lock):
        pid = os.fork()
        if not pid:
            kept.end("w", totals)
            os._exit(0)
    assert exit_code(pid) == 0
    assert kept.sums() == ({"w": sends(3)}, Sums())


def test_reports():
    kept = ProcessTotals()
    kept.reported(written=True)
    kept.reported(written=True)
    kept.reported(written=False)
    assert (kept.reports, kept.reports_failed) == (2, 1)
