"""From events and exits to what was seen."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.matrixkit import Event, Exit, row, seen, step
from matrix.outcome import ALIVE, BLOCKED, CUT, RETURNED, Row, Seen, Step, observe


def told(name: str, begun: float, ended: float | None = None, **fields) -> list[Event]:
    found = [Event("begin", begun, {"step": name})]
    if ended is not None:
        found.append(Event("end", ended, {"step": name, "ok": True, **fields}))
    return found


def test_a_caller_that_was_let_go_and_a_process_that_lived() -> None:
    events = [
        *told("caller", 10.0, 10.75, ok=False, type="DistBackendError", text="NCCL error:\n ncclRemoteError"),
        *told("later", 10.8, 10.9, result=4),
        Event("done", 11.0),
    ]
    found = observe(0, events, Exit(0, None, 11.1), fault_at=10.25)
    assert found.end == ALIVE
    assert found.ended_ms is None
    assert found.unblocked_ms == 500
    caller = found.step("caller")
    assert caller == Step(
        "caller", "DistBackendError", 500, 750, None, "NCCL error: ncclRemoteError", remote=True
    )
    assert caller.raised
    later = found.step("later")
    assert (later.outcome, later.result, later.raised) == (RETURNED, 4, False)
    assert found.step("nothing") is None


def test_who_is_still_in_a_call_is_blocked_and_who_died_in_it_was_cut_short() -> None:
    events = [*told("wait", 1.0, 1.1), *told("caller", 1.2)]
    there = observe(3, events, None, fault_at=1.0)
    assert (there.rank, there.end, there.steps[-1].outcome, there.unblocked_ms) == (3, ALIVE, BLOCKED, None)
    died = observe(3, events, Exit(None, "SIGABRT", 2.5), fault_at=1.0)
    assert (died.end, died.ended_ms, died.steps[-1].outcome) == ("SIGABRT", 1500, CUT)
    assert not died.steps[-1].raised


@pytest.mark.parametrize(
    ("code", "done", "end"), [(0, False, "exit 0"), (1, True, "exit 1"), (3, False, "exit 3")]
)
def test_leaving_without_having_seen_everything_is_an_end(code, done, end) -> None:
    events = [*told("caller", 1.0, 1.1), *([Event("done", 1.2)] if done else [])]
    assert observe(0, events, Exit(code, None, 2.0), fault_at=1.0).end == end


def test_a_call_that_only_queues_is_over_when_the_read_is() -> None:
    assert seen(step("caller", ms=-3), step("read", ms=412)).unblocked_ms == 412
    assert seen(step("caller", ms=500), step("read", ms=412)).unblocked_ms == 500
    assert seen(step("caller", ms=-3), step("read", BLOCKED)).unblocked_ms is None
    assert seen(step("caller", "RuntimeError", ms=70), step("read", BLOCKED)).unblocked_ms == 70
    assert seen(step("caller", ms=70)).unblocked_ms == 70
    assert seen().unblocked_ms is None


def test_long_messages_are_cut_but_looked_through() -> None:
    text = "x" * 5000 + " ncclRemoteError"
    (found,) = observe(0, told("a", 0.0, 0.1, ok=False, type="E", text=text), None, fault_at=0.0).steps
    assert len(found.text) < 300
    assert found.remote


steps = st.builds(
    Step,
    st.sampled_from(["caller", "read", "later"]),
    st.sampled_from([RETURNED, BLOCKED, CUT, "RuntimeError"]),
    st.none() | st.integers(-50, 90000),
    st.none() | st.integers(0, 90000),
    st.none() | st.text(max_size=5) | st.integers(0, 3) | st.booleans(),
    st.text(max_size=9),
    st.booleans(),
)
observers = st.builds(
    Seen,
    st.integers(0, 3),
    st.sampled_from([ALIVE, "SIGABRT"]),
    st.none() | st.integers(0, 90000),
    st.lists(steps, max_size=3).map(tuple),
)


@given(st.lists(observers, max_size=2), st.text(max_size=5), st.integers(0, 2))
def test_a_row_is_the_same_after_json(found, failure, repeat) -> None:
    there = row(*found, failure=failure, repeat=repeat)
    again = Row.from_json(json.loads(json.dumps(there.as_json())))
    assert (again.key, again.failure, len(again.seen)) == (there.key, there.failure, len(there.seen))
    assert again.as_json() == there.as_json()
    for ours, theirs in zip(there.seen, again.seen, strict=True):
        assert (ours.rank, ours.end, ours.ended_ms) == (theirs.rank, theirs.end, theirs.ended_ms)
        assert [(s.name, s.outcome, s.ms, s.took_ms, s.remote) for s in ours.steps] == [
            (s.name, s.outcome, s.ms, s.took_ms, s.remote) for s in theirs.steps
        ]
