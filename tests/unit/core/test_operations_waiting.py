"""Who waits for whom: from the reports of all members to one sentence for each operation."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld._core.operations.report import MemberReport, Operation
from multiworld._core.operations.waiting import pending_operations

FOUR = (0, 1, 2, 3)


def call(kind="all_reduce", number=7, began=3.0, *, size=4, peer=None, ranks=FOUR, group=0, ended=None):
    return Operation(group, ranks, kind, number, size, peer, None, began, ended, ended is None)


def message(kind, peer, began=3.0, tag=0, *, ended=None, ranks=FOUR, group=0):
    return Operation(group, ranks, kind, None, 4, peer, tag, began, ended, ended is None)


def report(rank, *operations, begun=None):
    numbers = [each.number for each in operations if each.number is not None]
    return MemberReport(rank, {0: max(numbers, default=0)} if begun is None else begun, operations)


def said(*reports, **silent):
    found = pending_operations({each.rank: each for each in reports}, **silent)
    return [str(each) for each in found]


def test_nothing_waits():
    assert said(report(0), report(1, call(ended=1.0)), report(2), report(3)) == []


def test_the_member_that_has_not_come_is_named_with_what_it_does():
    assert said(
        report(0, call()), report(1, call(began=3.2)), report(3, call(began=2.0)),
        report(2, call(number=6, ended=3.1), message("send", 3, 3.1)),
    ) == [
        "all_reduce #7: ranks 0, 1 and 3 wait since 3.2 s; rank 2 is at #6, in send to 3 since 3.1 s",
        "send to 3: rank 2 waits since 3.1 s; rank 3 is in all_reduce #7 since 2.0 s",
    ]  # fmt: skip


def test_a_member_in_no_operation_is_named_with_its_last():
    assert said(
        report(0, call(ranks=(0, 1, 2))),
        report(1, call(number=6, ended=2.5)),
        report(2),
    ) == [
        (
            "all_reduce #7: rank 0 waits since 3.0 s; "
            "rank 1 is at #6, in no operation of this world (its last: all_reduce #6, over since 2.5 s); "
            "rank 2 is at #0, in no operation of this world, and has called none"
        )
    ]


@pytest.mark.parametrize(
    ("other", "was"),
    [
        (call("broadcast", ended=1.0, peer=1), "was in broadcast #7, another call"),
        (call("reduce", ended=1.0, peer=1), "was in reduce #7, another call: its root is 1, and not 0"),
        (call("reduce", ended=1.0, peer=0, size=9), ""),  # a root of some has more than the others
    ],
)
def test_a_member_whose_other_call_ended_with_what_was_not_for_it_is_named(other, was):
    """Two calls in another order: the broadcast took the bytes of a reduce."""
    first = call("reduce", peer=0)
    found, *_ = said(report(0, first), report(1, first), report(2, first), report(3, other, begun={0: 8}))
    told = f"rank 3 {was}" if was else "all that take part are in it"
    assert found == f"reduce #7: ranks 0, 1 and 2 wait since 3.0 s; {told}"


def test_an_end_that_was_not_seen_has_no_age():
    last = Operation(0, (0, 1), "recv", None, 4, 0, 0, 5.0, None, False)
    assert said(report(0, message("recv", 1)), report(1, last)) == [
        (
            "recv from 1: rank 0 waits since 3.0 s; "
            "rank 1 is in no operation of this world (its last: recv from 0)"
        )
    ]


def test_at_most_three_operations_are_named():
    many = [message("recv", 0, began, tag) for tag, began in enumerate((4.0, 3.0, 2.0, 1.0))]
    (first, *_) = said(report(0, call(began=9.0, ranks=(0, 1))), report(1, *many))
    assert first.endswith(
        "rank 1 is at #0, in recv from 0 (tag 1) since 3.0 s and recv from 0 (tag 2) since 2.0 s "
        "and recv from 0 (tag 3) since 1.0 s"
    )


def test_a_member_that_does_not_answer():
    reports = {0: report(0, call(ranks=(0, 1)), message("send", 1)), 1: None}
    assert [str(each) for each in pending_operations(reports)] == [
        "all_reduce #7: rank 0 waits since 3.0 s; rank 1 does not answer",
        "send to 1: rank 0 waits since 3.0 s; rank 1 does not answer",
    ]
    assert [str(each) for each in pending_operations(reports, {1: "is stopped"})] == [
        "all_reduce #7: rank 0 waits since 3.0 s; rank 1 is stopped",
        "send to 1: rank 0 waits since 3.0 s; rank 1 is stopped",
    ]


def test_members_that_are_done_are_not_missing():
    (broadcast,) = pending_operations(
        {
            0: report(0, call("broadcast", peer=0, ended=2.0, ranks=(0, 1))),
            1: report(1, call("broadcast", peer=0, ranks=(0, 1))),
        }
    )
    assert not broadcast.missing
    assert not broadcast.idle
    assert str(broadcast) == "broadcast #7: rank 1 waits since 3.0 s; all that take part are in it"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (call("barrier", began=2.0, size=0), "is in barrier #7 since 2.0 s, another call"),
        (call("broadcast", began=2.0, peer=2), "is in broadcast #7 since 2.0 s, another call: its root is 2, and not 0"),
        (call("broadcast", began=2.0, peer=0, size=9), "is in broadcast #7 since 2.0 s, another call: it gave 9 bytes, and not 4"),
    ],
)  # fmt: skip
def test_another_call_at_the_same_place(other, why):
    first = call("broadcast", peer=0)
    (found,) = pending_operations({0: report(0, first), 1: report(1, first), 2: report(2, other)})
    assert (found.kind, found.size, found.peer) == ("broadcast", 4, 0), (
        "that of the member which waits longest"
    )
    assert found.waiting == {0: 3.0, 1: 3.0}
    assert found.missing[2] == why
    assert found.missing[3] == "does not answer"


def test_groups_are_told_apart():
    part = call(number=1, group=77, ranks=(1, 2))
    found = pending_operations(
        {
            0: report(0),
            1: report(1, part, begun={77: 1}),
            2: report(2, call(number=4, began=1.0, ranks=(0, 1, 2)), begun={0: 4}),
        }
    )
    assert [(each.number, each.ranks, sorted(each.missing)) for each in found] == [
        (1, (1, 2), [2]),
        (4, (0, 1, 2), [0, 1]),
    ]
    assert found[0].missing[2] == "is at #0, in all_reduce #4 since 1.0 s"


# -- messages ------------------------------------------------------------------------------------------------


def test_both_ends_of_a_message_are_in_it():
    found = pending_operations({0: report(0, message("send", 1)), 1: report(1, message("recv", 0, 2.0))})
    assert [(str(each), each.ranks, each.idle) for each in found] == [
        ("send to 1: rank 0 waits since 3.0 s; both ends are in it", (0, 1), False),
        ("recv from 0: rank 1 waits since 2.0 s; both ends are in it", (0, 1), False),
    ]


@pytest.mark.parametrize(
    "theirs",
    [
        message("recv", 0, tag=5),
        message("recv", 2),
        message("send", 0),
        message("recv", 0, group=7, ranks=(0, 1)),
    ],
)
def test_an_end_that_does_not_fit(theirs):
    (found, *_) = pending_operations(
        {0: report(0, message("send", 1, 4.0)), 1: report(1, theirs), 2: report(2)}
    )
    assert found.missing == {1: f"is in {theirs.name} since 3.0 s"}


def test_a_receive_of_any_fits_a_send_to_it():
    found = pending_operations({0: report(0, message("send", 1)), 1: report(1, message("recv", None))})
    assert not any(each.missing for each in found)
    assert found[1].ranks == FOUR


def test_a_receive_of_any_waits_for_all():
    (found,) = pending_operations({0: report(0, message("recv", None)), **{n: report(n) for n in (1, 2, 3)}})
    assert sorted(found.missing) == [1, 2, 3]
    assert str(found).startswith("recv from any rank: rank 0 waits since 3.0 s; rank 1 is in no operation")


# -- idle ----------------------------------------------------------------------------------------------------


def idle(*reports):
    return {
        min(each.waiting): each.idle for each in pending_operations({each.rank: each for each in reports})
    }


def test_a_receive_from_a_member_that_has_nothing_to_do_is_idle():
    assert idle(report(0), report(1, message("recv", 0))) == {1: True}
    assert idle(report(0, message("recv", 0, ended=1.0)), report(1, message("recv", 0))) == {1: True}


def test_so_is_a_row_of_them_behind_one():
    stages = [report(0), *(report(n, message("recv", n - 1)) for n in (1, 2, 3))]
    assert idle(*stages) == {1: True, 2: True, 3: True}


def test_a_circle_of_receives_is_not():
    assert idle(
        *(report(n, message("recv", (n + 1) % 3, ranks=(0, 1, 2))) for n in range(3))
    ) == dict.fromkeys(range(3), False)
    # Nor what waits for one of the circle.
    assert not idle(
        report(0, message("recv", 1)), report(1, message("recv", 0)), report(2, message("recv", 1))
    )[2]  # fmt: skip


def test_a_receive_from_a_member_in_another_operation_is_not():
    assert idle(report(0, message("send", 2)), report(1, message("recv", 0)), report(2))[1] is False
    assert idle(report(0, call(ranks=(0, 1))), report(1, message("recv", 0)))[1] is False
    reports = {0: None, 1: report(1, message("recv", 0))}
    assert [each.idle for each in pending_operations(reports)] == [False]


def test_a_member_whose_operation_has_just_begun_goes_on():
    waits = report(1, message("recv", 0))
    assert idle(report(0, message("send", 2, 0.5)), waits, report(2))[1] is True
    assert idle(report(0, message("send", 2, 1.0)), waits, report(2))[1] is False


def test_a_receive_of_any_is_idle_as_long_as_one_could_send():
    waits = message("recv", None, ranks=(0, 1, 2))
    assert idle(report(0, waits), report(1, call(ranks=(1, 2))), report(2))[0] is True
    assert idle(report(0, waits), report(1, waits), report(2, waits)) == dict.fromkeys(range(3), False)


def test_a_send_is_never_idle():
    assert idle(report(0, message("send", 1)), report(1)) == {0: False}


@pytest.mark.parametrize("kind", ["broadcast", "scatter"])
def test_others_that_wait_for_the_root_are_idle(kind):
    waits = call(kind, peer=0, ranks=(0, 1, 2))
    assert idle(report(0), report(1, waits), report(2, waits)) == {1: True}
    behind = message("recv", 1)
    assert idle(report(0), report(1, waits), report(2, waits), report(3, behind))[3] is True
    # Not if another than the root is missing, or the root waits itself.
    assert idle(report(0), report(1, waits), report(2)) == {1: False}
    assert idle(report(0, message("recv", 1)), report(1, waits), report(2, waits)) == {0: False, 1: False}


def test_collectives_of_all_are_never_idle():
    assert idle(report(0), report(1, call(ranks=(0, 1)))) == {1: False}
    assert idle(report(0), report(1, call("reduce", peer=0, ranks=(0, 1)))) == {1: False}


MANY = range(64)


@pytest.mark.parametrize("first", [0, 1], ids=["circle", "one rests"])
def test_many_that_receive_from_any_are_looked_at_quickly(first):
    waits = message("recv", None, ranks=tuple(MANY))
    reports = {n: report(n, waits) if n >= first else report(n) for n in MANY}
    began = time.monotonic()
    found = pending_operations(reports)
    assert time.monotonic() - began < 5.0
    assert [each.idle for each in found] == [first == 1] * (64 - first)


@pytest.mark.parametrize("of_first", [(), (message("send", 70),)], ids=["one rests", "none rests"])
def test_many_that_receive_from_all_before_them_are_looked_at_quickly(of_first):
    reports = {n: report(n, *(message("recv", other, ranks=tuple(MANY)) for other in range(n))) for n in MANY}
    reports[0] = report(0, *of_first)
    began = time.monotonic()
    found = pending_operations(reports)
    assert time.monotonic() - began < 5.0
    assert {each.idle for each in found if each.kind == "recv"} == {not of_first}


def test_a_row_longer_than_any_stack():
    row = range(3000)
    reports = {n: report(n, message("recv", n - 1, ranks=(n - 1, n))) for n in row[1:]}
    assert {each.idle for each in pending_operations({0: report(0), **reports})} == {True}


@st.composite
def worlds(draw):
    ranks = tuple(range(draw(st.integers(1, 5))))
    peers, ages = st.sampled_from(ranks), st.sampled_from([0.5, 1.0, 3.0, 12.0])
    sends = st.builds(message, st.just("send"), peers, ages, ranks=st.just(ranks))
    receives = st.builds(message, st.just("recv"), st.none() | peers, ages, ranks=st.just(ranks))
    calls = st.builds(
        call,
        st.sampled_from(["broadcast", "scatter", "all_reduce"]),
        st.integers(1, 2),
        ages,
        peer=peers,
        ranks=st.just(ranks),
    )
    operations = st.lists(receives | receives | sends | calls, max_size=3)
    return {rank: draw(st.none() | st.builds(report, st.just(rank))) for rank in ranks} | {
        rank: report(rank, *draw(operations)) for rank in ranks if draw(st.booleans())
    }


def source_rests(rank, each, reports, seen):
    if each.peer is not None:
        return rests(each.peer, reports, seen)
    return any(rests(other, reports, seen) for other in each.ranks if other != rank)


def rests(rank, reports, seen):
    """Every way is gone, as long as it meets no member twice: what is meant, in factorial time."""
    found = reports.get(rank)
    if found is None or rank in seen:
        return False
    return all(
        (each.kind == "recv" or (each.kind in {"broadcast", "scatter"} and each.peer != rank))
        and source_rests(rank, each, reports, {*seen, rank})
        for each in found.pending
        if each.began >= 1.0
    )


@given(worlds())
def test_idle_is_what_going_every_way_finds(reports):
    for each in pending_operations(reports):
        (rank, *_), everyone = each.waiting, set(each.waiting)
        if each.kind == "recv":
            one = message("recv", each.peer, ranks=tuple(reports))
            expected = source_rests(rank, one, reports, everyone)
        else:
            gives = each.kind in {"broadcast", "scatter"} and list(each.missing) == [each.peer]
            expected = gives and rests(each.peer, reports, everyone)
        if expected and each.missing:
            assert each.idle
        # One that has begun within the last second does not make its circle count for itself yet.
        if each.idle and min(each.waiting.values()) >= 1.0:
            assert expected


def test_the_longest_comes_first():
    found = pending_operations(
        {0: report(0, call(began=1.0), message("recv", 1, 5.0)), 1: report(1), 2: None, 3: None}
    )
    assert [each.seconds for each in found] == [5.0, 1.0]
