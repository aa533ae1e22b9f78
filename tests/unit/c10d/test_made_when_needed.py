"""A group that is made when it is needed: once, in a thread of its own, and waited for by all that need it."""

from __future__ import annotations

import threading
import time

from multiworld._c10d.late_group import LateGroup

SOON = 10.0


class Exchange:
    """Counts what is said; the others' groups stand when `others` is set."""

    def __init__(self, asking: bool) -> None:
        self.asking = asking
        self.said: list[str] = []
        self.others = threading.Event()

    def say_built(self) -> None:
        self.said.append("built")

    def await_built(self, timeout: float) -> None:
        assert self.others.wait(timeout)
        self.said.append("all built")

    def close(self) -> None:
        self.said.append("closed")


class Group:
    """Made as told: `error` is raised, and `hold` waited for, in the middle."""

    def __init__(self, error: Exception | None = None) -> None:
        self.pg: object | None = None
        self.error = error
        self.hold = threading.Event()
        self.makers: list[threading.Thread] = []

    def make(self, exchange: object, agree: object) -> None:
        self.makers.append(threading.current_thread())
        assert self.hold.wait(SOON)
        if self.error is not None:
            raise self.error
        agree()  # type: ignore[operator]
        self.pg = self

    def joined(self) -> None:
        assert self.pg is None  # no operation may begin before


def late(group: Group, timeout: float = SOON) -> tuple[LateGroup, list[Exchange], list[BaseException]]:
    exchanges: list[Exchange] = []
    failures: list[BaseException] = []

    def exchange(asking: bool) -> Exchange:
        exchanges.append(Exchange(asking))
        exchanges[-1].others.set()
        return exchanges[-1]

    def failed(error: BaseException) -> None:
        failures.append(error)
        made.end()  # as the world does, in this thread or another one

    made = LateGroup(group, exchange, failed, timeout)  # type: ignore[arg-type]
    return made, exchanges, failures


def waiting(made: LateGroup, count: int) -> tuple[list[threading.Thread], list[object]]:
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(made.made()), daemon=True) for _ in range(count)]
    for each in threads:
        each.start()
    return threads, found


def test_it_is_made_once_for_all_that_need_it():
    group = Group()
    made, exchanges, failures = late(group)
    threads, found = waiting(made, 5)
    group.hold.set()
    for each in threads:
        each.join(SOON)
    assert found == [group] * 5
    assert (len(group.makers), failures) == (1, [])
    assert (exchanges[0].asking, exchanges[0].said) == (True, ["built", "all built", "closed"])
    made.begin(asking=False)
    made.rest()
    assert len(group.makers) == 1


def test_one_that_is_asked_does_not_ask():
    group = Group()
    made, exchanges, _ = late(group)
    group.hold.set()
    made.begin(asking=False)
    made.rest()
    assert (group.pg, exchanges[0].asking) == (group, False)


def test_only_its_own_thread_is_the_one_that_makes_it():
    group = Group()
    made, _, _ = late(group)
    here = []
    group.joined = lambda: here.append(made.makes_here())  # type: ignore[method-assign]
    group.hold.set()
    assert made.made() is group
    assert (here, made.makes_here()) == ([True], False)


def test_an_error_is_told_once_and_the_receives_are_taken_back():
    error = OSError("no device")
    group = Group(error)
    made, exchanges, failures = late(group)
    threads, found = waiting(made, 3)
    group.hold.set()
    for each in threads:
        each.join(SOON)
    assert (failures, found) == ([error], [None] * 3)
    assert exchanges[0].said == ["closed"]


def test_who_waits_for_one_that_cannot_be_made_goes_on_when_the_worlds_operations_raise():
    group = Group(OSError("no device"))
    made, exchanges, _ = late(group)
    ending = threading.Event()
    made._failed = lambda _: ending.set()  # another thread was first
    threads, found = waiting(made, 1)
    group.hold.set()
    assert ending.wait(SOON)
    made.rest()
    assert (found, threads[0].is_alive()) == ([], True)
    made.end()
    threads[0].join(SOON)
    assert (found, exchanges[0].said) == ([None], ["closed"])


def test_the_worlds_end_lets_all_go_that_wait():
    group = Group()
    made, _, _ = late(group)
    threads, found = waiting(made, 3)
    while len(group.makers) == 0:
        time.sleep(0.001)
    made.end()
    for each in threads:
        each.join(SOON)
    assert found == [None] * 3
    group.hold.set()
    made.rest()


def test_it_is_not_begun_after_the_end():
    group = Group()
    made, _, _ = late(group)
    made.end()
    assert made.made() is None
    made.begin(asking=False)
    assert group.makers == []


def test_the_world_hears_of_one_that_takes_too_long():
    group = Group()
    made, _, failures = late(group, timeout=-0.95)
    assert made.made() is None
    assert [str(each) for each in failures] == ["it was not made within -0.95 s"]
    group.hold.set()
    made.rest()


def test_without_a_thread_the_world_hears_of_it(monkeypatch):
    group = Group()
    made, _, failures = late(group)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert made.made() is None
    assert [str(each) for each in failures] == ["can't start new thread"]
    made.rest()
