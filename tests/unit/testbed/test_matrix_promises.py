"""What a patched build promises, asked of runs made up."""

from __future__ import annotations

import pytest
from kits.matrixkit import PATCHED, row, seen, step
from matrix.catalogue import by_id
from matrix.outcome import BLOCKED
from matrix.promises import broken

KEPT = (
    step("caller", ms=0),
    step("read", ms=300, result="stale"),
    step("exception", result="DistBackendError"),
    step("again", "DistBackendError", remote=True),
    step("again synchronize", "DistBackendError", remote=True),
    step("later", "DistBackendError", remote=True),
)


def asked(scenario: str, *observers, mode: str = "aeh2", slack_ms: int = 0) -> list[str]:
    return broken(
        row(*observers, target=PATCHED, scenario=scenario, mode=mode), by_id(scenario), slack_ms=slack_ms
    )


def but(*changed):
    names = {each.name: each for each in changed}
    return seen(*(names.pop(each.name, each) for each in KEPT), *names.values())


def test_a_run_that_keeps_them_all() -> None:
    assert asked("lost.all_reduce.wait", but()) == []
    assert asked("lost.three", but(), but()) == []


@pytest.mark.parametrize(
    ("observed", "said"),
    [
        (seen(end="SIGABRT"), "the process ended: SIGABRT"),
        (but(step("caller", BLOCKED)), "the caller is blocked"),
        (but(step("read", ms=2500, result="stale")), "only after 2500 ms"),
        (but(step("again")), "'again' returns"),
        (but(step("again synchronize")), "'again synchronize' returns"),
        (but(step("later")), "'later' returns"),
        (but(step("later", BLOCKED)), "'later' is blocked"),
        (
            but(step("again", "RuntimeError", text="NCCL communicator was aborted")),
            "does not name ncclRemoteError",
        ),
        (but(step("exception", result="NoneType")), "exception() is None"),
        (but(step("destroy", BLOCKED)), "destroying the group: blocked"),
        (but(step("destroy", ms=11000)), "destroying the group"),
        (but(step("rebuilt", result="wrong: 1")), "the new group: wrong: 1"),
        (but(step("healthy", result="wrong: 1")), "healthy: wrong: 1"),
        (but(step("healthy", ms=7000, result="right")), "held up 7000 ms"),
        (but(step("other thread", BLOCKED)), "other thread: blocked"),
        (
            but(step("other thread", result="right"), step("other thread's worst", result=6000)),
            "held up 6000 ms",
        ),
    ],
)
def test_each_promise_can_be_broken(observed, said) -> None:
    (found,) = asked("again.rebuilt", observed)
    assert said in found
    assert found.startswith("rank 0: ")


def test_a_call_that_fails_raises_and_leaves_no_group_open() -> None:
    fine = (step("caller", "RuntimeError"), step("depth", result=0), step("healthy", result="right"))
    assert asked("enqueue.send", seen(*fine)) == []
    assert asked("enqueue.send", seen(step("caller"), *fine[1:])) == ["rank 0: the failing call returned"]
    assert asked("enqueue.send", seen(fine[0], step("depth", result=1))) == [
        "rank 0: the thread's NCCL group is open"
    ]


def test_an_error_that_nccl_does_not_report_is_known_at_the_operations_timeout() -> None:
    late = but(step("read", ms=4900, result="stale"))
    assert asked("silent.killed", late) == []
    assert asked("silent.killed", but(step("read", ms=5100, result="stale")))
    assert asked("silent.ignored", late)


def test_nobody_can_let_go_of_a_stream_that_nccl_holds() -> None:
    held = but(step("read", BLOCKED))
    assert asked("abort.hangs-before", held) == []
    assert asked("abort.hangs-after", held) == ["rank 0: the caller is blocked"]


def test_with_blocking_wait_it_is_wait_that_raises() -> None:
    assert asked("lost.all_reduce.wait", but(), mode="aeh2-wait") == [
        "rank 0: wait() returned, with blocking wait on"
    ]
    raised = but(step("caller", "DistBackendError", remote=True))
    assert asked("lost.all_reduce.wait", raised, mode="aeh2-wait") == []


def test_a_busy_machine_is_given_time_and_a_run_that_failed_is_no_excuse() -> None:
    late = but(step("read", ms=2500, result="stale"))
    assert asked("lost.all_reduce.wait", late, slack_ms=1000) == []
    failed = row(but(), target=PATCHED, failure="the double does not know this")
    assert broken(failed, by_id("lost.all_reduce.wait")) == ["it did not run: the double does not know this"]
