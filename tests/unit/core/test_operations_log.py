"""The log of a member's operations, and its report as JSON."""

from __future__ import annotations

import json
import weakref
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld._core.operations.log import ENDED, LENGTH, OperationLog
from multiworld._core.operations.report import (
    MAX_REPORT,
    MAX_STACK,
    MemberReport,
    Operation,
    from_json,
    to_json,
)


class Work:
    def __init__(self):
        self.done = self.has_caller = False


def message(log, kind="send", peer=1, began=1.0, ended=None, tag=0):
    entry = [log.world, kind, None, 8, peer, tag, began, ended]
    log.append(entry)
    return entry


def collective(log, group=None, began=1.0, ended=None):
    group = log.world if group is None else group
    entry = [group, "all_reduce", group.following(), 8, None, None, began, ended]
    log.append(entry)
    return entry


def test_an_operation_is_pending_until_its_end_is_there():
    log = OperationLog(0, 2)
    entry = message(log)
    assert log.waiting(1.0) == [entry]
    assert log.waiting(0.9) == [], "it began later"
    entry[ENDED] = 3.5
    assert log.waiting(9.0) == []
    (told,) = log.report(4.0).operations
    assert (told.began, told.ended, told.pending) == (3.0, 0.5, False)


def test_what_was_posted_is_pending_as_long_as_it_is_there_and_not_done():
    log = OperationLog(0, 2)
    works = [Work(), Work(), Work()]
    entries = [message(log, ended=weakref.ref(work)) for work in works]
    works[1].done = True
    del works[2]
    assert log.waiting(1.0) == entries[:1]
    assert [each.pending for each in log.report(2.0).operations] == [True, False, False]
    assert [each.ended for each in log.report(2.0).operations] == [None, None, None], "it was not seen"


def test_collectives_are_counted_in_each_group():
    log = OperationLog(2, 4)
    part = log.group(77, (1, 2))
    assert log.group(77, (1, 2)) is part
    assert log.known(77) is part
    assert log.known(78) is log.world
    for _ in range(3):
        collective(log)
    collective(log, part)
    report = log.report(2.0)
    assert report.rank == 2
    assert report.begun == {0: 3, 77: 1}
    assert [(each.group, each.ranks, each.number) for each in report.operations] == [
        *((0, (0, 1, 2, 3), number) for number in (1, 2, 3)),
        (77, (1, 2), 1),
    ]
    assert log.group(0, (9,)) is log.world


def test_the_last_ones_are_kept():
    log = OperationLog(0, 2)
    for _ in range(LENGTH + 5):
        collective(log, ended=2.0)
    report = log.report(3.0)
    assert [each.number for each in report.operations] == list(range(6, LENGTH + 6))
    assert report.begun == {0: LENGTH + 5}


def test_a_clock_that_was_read_before_makes_no_negative_age():
    log = OperationLog(0, 2)
    collective(log, began=5.0, ended=6.0)
    (each,) = log.report(4.0).operations
    assert (each.began, each.ended) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("kind", "number", "peer", "tag", "name"),
    [
        ("all_reduce", 7, None, None, "all_reduce #7"),
        ("send", None, 3, 0, "send to 3"),
        ("recv", None, 3, 5, "recv from 3 (tag 5)"),
        ("recv", None, None, 0, "recv from any rank"),
    ],
)
def test_names(kind, number, peer, tag, name):
    assert Operation(0, (0, 1), kind, number, 4, peer, tag, 1.0).name == name


ages = st.integers(0, 10**8).map(lambda each: each / 10**4)
numbers = st.integers(0, 1 << 56)
operations = st.builds(
    lambda group, kind, number, size, peer, tag, began, ended, pending: Operation(
        group, (group % 7, 8), kind, number, size, peer, tag, began, ended, pending
    ),
    numbers, st.text(max_size=12), st.none() | numbers, numbers, st.none() | st.integers(0, 99),
    st.none() | numbers, ages, st.none() | ages, st.booleans(),
)  # fmt: skip
reports = st.builds(
    MemberReport,
    st.integers(0, 999),
    st.dictionaries(numbers, numbers, max_size=5),
    st.lists(operations, max_size=20).map(tuple),
    st.text(max_size=50),
)


@given(reports)
def test_a_report_is_the_same_after_its_way_as_json(report):
    assert from_json(to_json(report)) == report


def test_a_long_report_is_cut_to_what_is_pending():
    ranks = tuple(range(5000))
    rows = [Operation(n, ranks, "all_reduce", n, 4, None, None, 1.0, None, n % 2 == 1) for n in range(12)]
    data = to_json(MemberReport(1, {}, tuple(rows), "x" * 10 * MAX_STACK))
    assert len(data) <= MAX_REPORT
    report = from_json(data)
    assert report is not None
    assert [each.number for each in report.operations] == [11]
    assert report.pending == report.operations
    assert report.stack == "x" * (MAX_STACK // 4)


def test_a_stack_keeps_its_end():
    report = from_json(to_json(MemberReport(1, {}, (), "outer" + "x" * MAX_STACK + "inner")))
    assert report is not None
    assert len(report.stack) == MAX_STACK
    assert report.stack.endswith("xinner")


def changed(**fields):
    whole = {"rank": 1, "begun": [[0, 3]], "groups": [[0, [0, 1]]], "operations": [], "stack": ""}
    return json.dumps(whole | fields).encode()


ROW = [0, "send", None, 4, 1, 0, 1.0, None, 1]


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xff", b"[]", b"3", b"[" * 5000, changed(rank=None), changed(begun=[[0]]), changed(begun=7),
        changed(groups=[[1, [0]]], operations=[ROW]), changed(operations=[ROW[:-1]]),
        changed(operations=[[0, "send", None, float("inf"), *ROW[4:]]]), changed(operations=["123456789"]),
        b'{"rank": ' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_other_bytes_are_no_report(data):
    assert from_json(data) is None


def test_those_bytes_are_none_only_by_what_was_changed():
    report = from_json(changed(operations=[ROW]))
    assert report is not None
    assert report.operations[0].name == "send to 1"


def test_an_operation_that_another_thread_appends_meanwhile_is_no_error():
    log = OperationLog(0, 2)
    message(log)

    class Once:
        """Entries that change under the first that iterates over them."""

        tried = 0

        def __iter__(self):
            self.tried += 1
            if self.tried == 1:
                raise RuntimeError("deque mutated during iteration")
            return iter(kept)

    kept, log.entries = log.entries, Once()
    assert len(log.report(1.0).operations) == 1
    assert log.entries.tried == 2


def test_a_log_that_is_frozen_goes_on_to_tell_of_that_moment():
    log = OperationLog(0, 2)
    works = [Work(), Work()]
    blocking, over = message(log, began=1.0), message(log, began=2.0, ended=3.0)
    posted, done = (message(log, began=3.0, ended=weakref.ref(work)) for work in works)
    works[1].done = True
    log.freeze(4.0)
    blocking[ENDED] = 4.5
    works[0].done = True
    message(log, began=5.0)
    log.freeze(6.0)
    assert [(each.began, each.ended, each.pending) for each in log.report(9.0).operations] == [
        (3.0, None, True),
        (2.0, 1.0, False),
        (1.0, None, True),
        (1.0, None, False),
    ]
    assert len(log.entries) == 5
    assert over[ENDED] == 3.0
    assert posted[ENDED]() is works[0]
    assert done[ENDED]() is works[1]


def test_a_collective_that_came_to_nothing_gives_its_number_back():
    group = OperationLog(0, 2).world
    assert [group.following() for _ in range(3)] == [1, 2, 3]
    group.take_back(2)  # another thread has begun one since
    assert (group.begun, group.following()) == (3, 4)
    group.take_back(4)
    assert (group.begun, group.following()) == (3, 4)


def test_a_group_that_was_destroyed_is_forgotten():
    log = OperationLog(0, 2)
    group = log.group(7, (0, 1))
    group.following()
    assert log.report(1.0).begun == {7: 1}
    log.drop(7)
    log.drop(8)
    assert log.report(1.0).begun == {}
    assert log.known(7) is log.world


class Whole:
    """A number as numpy has them."""

    def __init__(self, value):
        self.value = value

    def __int__(self):
        return self.value


def test_ranks_and_tags_of_other_kinds_are_ints_in_the_report():
    log = OperationLog(0, 2)
    message(log, peer=Whole(1), tag=Whole(5))
    (told,) = from_json(to_json(log.report(2.0))).operations
    assert told.name == "send to 1 (tag 5)"


def test_calls_that_were_blocked_at_the_end():
    log = OperationLog(0, 2)
    collective(log, began=1.0, ended=2.0)
    assert (log.blocked, log.unblocked()) == (0, None)
    for _ in range(2):
        collective(log, began=3.0)
    first, second = list(log.entries)[1:]
    log.freeze(5.0)
    assert (log.blocked, log.unblocked()) == (2, None)
    second[ENDED] = 5.25
    assert log.unblocked() is None
    first[ENDED] = 5.125
    assert log.unblocked() == 5.25
    log.freeze(9.0)
    collective(log, began=9.0)
    assert (log.blocked, log.unblocked()) == (2, 5.25)


@pytest.mark.parametrize(("awaited", "blocked"), [(True, 2), (False, 1)])
def test_an_operation_that_was_posted_blocks_who_waits_for_it(awaited, blocked):
    """A collective of the lane, and one that torch carries, are posted first and then waited for."""
    log = OperationLog(0, 2)
    collective(log, began=1.0)
    collective(log, began=2.0)
    inside, posted = log.entries
    operation = SimpleNamespace(done=False, has_caller=awaited)
    posted[ENDED] = lambda: operation
    log.freeze(3.0)
    assert (log.blocked, log.unblocked()) == (blocked, None)
    inside[ENDED] = 3.25
    assert log.unblocked() == (None if awaited else 3.25)
    posted[ENDED] = 3.5
    assert log.unblocked() == (3.5 if awaited else 3.25)


def test_a_call_that_came_back_with_a_work_that_no_thread_waits_for_is_over():
    log = OperationLog(0, 2)
    collective(log, began=1.0)
    collective(log, began=2.0)
    first, second = log.entries
    log.freeze(3.0)
    second[ENDED] = lambda: SimpleNamespace(done=True, has_caller=False)
    assert log.unblocked() is None
    first[ENDED] = 3.25
    assert log.unblocked() == 3.25


def test_a_log_without_blocked_calls_was_never_unblocked():
    log = OperationLog(0, 2)
    collective(log, began=1.0, ended=2.0)
    log.freeze(3.0)
    assert (log.blocked, log.unblocked()) == (0, None)
