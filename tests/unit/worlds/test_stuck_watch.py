"""The watch over operations that wait for long: what it has told, and that it goes on."""

from __future__ import annotations

import queue
import threading
import time
from types import SimpleNamespace

import pytest

from multiworld._c10d.waiter_pool import LIMIT, ending, pool
from multiworld._core.operations.log import BEGAN, ENDED, OperationLog
from multiworld._core.operations.report import MemberReport
from multiworld._core.operations.waiting import pending_operations
from multiworld._generation.stuck import StuckWatch
from multiworld.events import WorldStuck, bus

AFTER = 0.05
PATIENCE = 120.0


class Generation:
    """One whose other member has nothing to do."""

    def __init__(self):
        self.world, self.number, self.rank = "w", 1, 0
        self.log = OperationLog(0, 2)
        self.operations = SimpleNamespace(
            log=self.log, reports=self.reports, pending_among=pending_operations
        )

    def reports(self, timeout, *, deep):
        return {0: self.log.report(time.monotonic()), 1: MemberReport(1)}

    def calls(self, kind, peer=None, tag=None):
        number = self.log.world.following() if tag is None else None
        entry = [self.log.world, kind, number, 4, peer, tag, time.monotonic(), None]
        self.log.append(entry)
        return entry

    def waiting(self):
        return self.log.waiting(time.monotonic())


@pytest.fixture
def watch(monkeypatch):
    monkeypatch.setenv("M8D_STUCK_AFTER", str(AFTER))
    return StuckWatch()


@pytest.fixture
def heard():
    found = queue.Queue()
    forget = bus.subscribe(lambda event: found.put(event) if isinstance(event, WorldStuck) else None)
    yield found
    forget()


def holds(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_was_told_is_known_as_long_as_it_waits_and_an_idle_receive_is_not(watch, heard):
    gen = Generation()
    watch.add(gen)
    receive = gen.calls("recv", 1, 0)
    stuck = gen.calls("all_reduce")
    assert heard.get(timeout=PATIENCE).operation.kind == "all_reduce"
    assert receive in gen.waiting()
    assert watch.first_told(gen, gen.waiting()) is stuck
    stuck[ENDED] = time.monotonic()
    assert watch.first_told(gen, gen.waiting()) is None
    watch.remove(gen)
    assert watch.first_told(gen, [stuck]) is None
    holds(lambda: watch._thread is None)


def test_receives_that_take_all_threads_do_not_keep_it_from_telling(watch, heard):
    ends = threading.Event()
    try:
        while pool.threads < LIMIT:
            pool.run(lambda: ends.wait(PATIENCE) and None)
        gen = Generation()
        watch.add(gen)
        gen.calls("all_reduce")
        assert heard.get(timeout=PATIENCE).operation.kind == "all_reduce"
    finally:
        ends.set()
        watch.remove(gen)
        for each in (pool, ending):
            holds(lambda each=each: len(each._sleeping) == each.threads)
            each.dismiss()
        holds(lambda: not [each for each in threading.enumerate() if each.name.startswith("m8d-waiter-")])
    holds(lambda: watch._thread is None)


def test_a_member_that_does_not_answer_is_looked_at_once_for_all_operations(watch, heard):
    gen, looked = Generation(), []
    gen.reports = gen.operations.reports = lambda timeout, *, deep: {
        0: gen.log.report(time.monotonic()),
        1: None,
    }
    gen.operations.stack_from_outside = lambda rank: looked.append(rank) or "its stack"
    first, second = gen.calls("all_reduce"), gen.calls("broadcast")
    second[BEGAN] = first[BEGAN]  # both are late in the same look
    watch.add(gen)
    told = [heard.get(timeout=PATIENCE).operation for _ in range(2)]
    assert [each.kind for each in told] == ["all_reduce", "broadcast"]
    assert looked == [1]
    watch.remove(gen)
    holds(lambda: watch._thread is None)


class Racing(dict):
    """Places of which the last one is removed after the watch has seen that there are some."""

    def __init__(self):
        super().__init__()
        self.removed = threading.Event()

    def __bool__(self):
        found = len(self) > 0
        if found and threading.current_thread().name == "m8d-stuck" and not self.removed.is_set():
            self.clear()
            self.removed.set()
        return found


def test_a_world_that_goes_while_the_watch_begins_to_look_leaves_the_watch_working(watch, heard):
    watch._places = racing = Racing()
    watch.add(Generation())
    assert racing.removed.wait(PATIENCE)
    gen = Generation()
    gen.calls("all_reduce")
    watch.add(gen)
    assert heard.get(timeout=PATIENCE).operation.kind == "all_reduce"
    watch.remove(gen)
    holds(lambda: watch._thread is None)


def test_an_error_at_one_world_is_logged_and_the_others_are_looked_at(watch, heard, caplog):
    broken, gen = Generation(), Generation()
    broken.log.entries = None
    gen.calls("all_reduce")
    watch.add(broken)
    watch.add(gen)
    assert heard.get(timeout=PATIENCE).operation.kind == "all_reduce"
    assert "could not be looked for" in caplog.text
    for each in (broken, gen):
        watch.remove(each)
    holds(lambda: watch._thread is None)


def test_a_watch_whose_thread_is_dead_has_another_one_with_the_next_world(watch, heard):
    watch._thread = dead = threading.Thread(target=int)
    dead.start()
    dead.join()
    gen = Generation()
    gen.calls("all_reduce")
    watch.add(gen)
    assert heard.get(timeout=PATIENCE).operation.kind == "all_reduce"
    watch.remove(gen)
    holds(lambda: watch._thread is None)
