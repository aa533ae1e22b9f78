from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld._core.state_machine import (
    LATE,
    STATES,
    TABLE,
    Action,
    Announced,
    Broke,
    CloseAsked,
    Forked,
    IllegalStepError,
    Joined,
    JoinFailed,
    Replaced,
    RetireAsked,
    Stage,
    step,
    why,
)
from multiworld.events import Breakage, Cause, State

BREAKAGE = Breakage(Cause.CRASHED, (1,), "rank 1 crashed", 1.0)
JOINED, FAILED, ANNOUNCED = Joined(), JoinFailed(RuntimeError("no"), 3.0), Announced()
BROKE, RETIRE, CLOSE, FORKED = Broke(BREAKAGE), RetireAsked(3.0), CloseAsked(3.0), Forked()
REPLACED = Replaced(2)
EVENTS = (JOINED, FAILED, ANNOUNCED, BROKE, REPLACED, RETIRE, CLOSE, FORKED)

LEAVE = (
    Action.REFUSE_OPERATIONS,
    Action.SAY_GOODBYE,
    Action.RELEASE,
    Action.RELEASE_STORE,
    Action.FAIL_AWAITED,
)
CLOSED = (Action.REFUSE_OPERATIONS, Action.DRAIN, *LEAVE[1:], Action.TELL_CLOSED)
TELL = (Action.TELL_BROKEN, Action.TELL_CLOSED)
BREAK = (Action.REFUSE_OPERATIONS, Action.ABORT_GROUP, Action.FAIL_AWAITED_LATER, Action.TELL_BROKEN, Action.RELEASE_LATER)  # fmt: skip


@pytest.mark.parametrize(
    ("before", "event", "after", "actions"),
    [
        (Stage.CONNECTING, JOINED, Stage.OPENING, ()),
        (Stage.CONNECTING, FAILED, Stage.ABANDONED, ()),
        (Stage.CONNECTING, CLOSE, Stage.ABANDONED, ()),
        (Stage.CONNECTING, BROKE, Stage.LOST, ()),
        (Stage.LOST, FAILED, Stage.ABANDONED, ()),
        (Stage.LOST, CLOSE, Stage.ABANDONED, ()),
        (Stage.LOST, JOINED, Stage.DOOMED, ()),
        (Stage.OPENING, ANNOUNCED, Stage.ACTIVE, ()),
        (Stage.OPENING, BROKE, Stage.DOOMED, ()),
        (Stage.OPENING, FAILED, Stage.CLOSED, LEAVE),
        (Stage.OPENING, CLOSE, Stage.CLOSED, CLOSED),
        (Stage.OPENING, REPLACED, Stage.REPLACED, (Action.REFUSE_OPERATIONS,)),
        (Stage.DOOMED, REPLACED, Stage.REPLACED, (Action.REFUSE_OPERATIONS,)),
        (Stage.DOOMED, ANNOUNCED, Stage.BROKEN, BREAK),
        (Stage.DOOMED, FAILED, Stage.CLOSED, LEAVE),
        (Stage.DOOMED, CLOSE, Stage.CLOSED, (*LEAVE, Action.TELL_CLOSED)),
        (Stage.ACTIVE, BROKE, Stage.BROKEN, BREAK),
        (Stage.ACTIVE, CLOSE, Stage.CLOSED, CLOSED),
        (Stage.ACTIVE, REPLACED, Stage.REPLACED, (Action.REFUSE_OPERATIONS,)),
        (Stage.REPLACED, RETIRE, Stage.CLOSED, (Action.DRAIN, *LEAVE[1:])),
        (Stage.REPLACED, CLOSE, Stage.CLOSED, (Action.DRAIN, *LEAVE[1:])),
        (Stage.BROKEN, RETIRE, Stage.RETIRED, (Action.DETACH, Action.RELEASE, Action.FAIL_AWAITED, Action.TELL_BROKEN)),
        (Stage.BROKEN, CLOSE, Stage.CLOSED, (Action.DETACH, Action.RELEASE, Action.RELEASE_STORE, Action.FAIL_AWAITED, *TELL)),
        (Stage.RETIRED, RETIRE, Stage.RETIRED, (Action.AWAIT_RELEASE,)),
        (Stage.RETIRED, CLOSE, Stage.CLOSED, (Action.AWAIT_RELEASE, Action.RELEASE_STORE, *TELL)),
        (Stage.CLOSED, FAILED, Stage.CLOSED, (Action.AWAIT_RELEASE,)),
        (Stage.CLOSED, RETIRE, Stage.CLOSED, (Action.AWAIT_RELEASE,)),
        (Stage.CLOSED, CLOSE, Stage.CLOSED, (Action.AWAIT_RELEASE, Action.RELEASE_STORE)),
    ],
)  # fmt: skip
def test_the_table(before, event, after, actions):
    assert step(before, event) == (after, actions)


def test_every_row_is_tested_above():
    (mark,) = test_the_table.pytestmark
    assert {(before, type(event)) for before, event, *_ in mark.args[1]} == set(TABLE)


def test_what_comes_late_changes_nothing_and_nothing_stands_twice():
    for stage, kinds in LATE.items():
        for event in (each for each in EVENTS if type(each) in kinds):
            assert (stage, type(event)) not in TABLE
            assert step(stage, event) == (stage, ())


@pytest.mark.parametrize("stage", Stage)
def test_a_verdict_and_a_close_may_come_at_any_time(stage):
    step(stage, BROKE)
    step(stage, CLOSE)
    assert step(stage, FORKED) == (Stage.INHERITED, ())


@pytest.mark.parametrize(
    ("stage", "event"),
    [(Stage.ACTIVE, JOINED), (Stage.ACTIVE, FAILED), (Stage.BROKEN, JOINED), (Stage.CONNECTING, RETIRE)],
)
def test_what_cannot_happen_raises(stage, event):
    with pytest.raises(IllegalStepError) as caught:
        step(stage, event)
    assert (caught.value.stage, caught.value.event) == (stage, event)
    assert stage.value in str(caught.value)


def walk(events):
    """Go through `events`, leaving out those that cannot happen; return the stages, and the actions of each step."""
    stages, done = [Stage.CONNECTING], []
    for event in events:
        try:
            stage, actions = step(stages[-1], event)
        except IllegalStepError:
            continue
        stages.append(stage)
        done.append(actions)
    return stages, done


@given(st.lists(st.sampled_from(EVENTS), max_size=30))
def test_no_order_of_events_leads_out_of_the_table_or_back(events):
    stages, steps = walk(events)
    done = list(itertools.chain(*steps))
    order = [State.JOINING, State.ACTIVE, State.BROKEN, State.CLOSED]
    seen = [order.index(STATES[stage]) for stage in stages]
    assert seen == sorted(seen)
    for once in set(Action) - {Action.AWAIT_RELEASE, Action.RELEASE_STORE, Action.TELL_BROKEN}:
        assert done.count(once) <= 1, once
    for after in steps[stages.index(Stage.BROKEN) :] if Stage.BROKEN in stages else ():
        if Action.TELL_CLOSED in after:
            assert after[-2:] == TELL
    if Action.AWAIT_RELEASE in done:
        assert Action.RELEASE in done[: done.index(Action.AWAIT_RELEASE)]
    if stages[-1] in {Stage.RETIRED, Stage.CLOSED}:
        assert Action.RELEASE in done
    if stages[-1] in {
        Stage.CONNECTING,
        Stage.LOST,
        Stage.ABANDONED,
        Stage.OPENING,
        Stage.DOOMED,
        Stage.ACTIVE,
    }:
        assert done == []


def test_every_stage_can_be_reached_and_every_action_is_some_events():
    reached, new = {Stage.CONNECTING}, {Stage.CONNECTING}
    while new:
        new = {TABLE[stage, kind].to for stage, kind in TABLE if stage in new} - reached
        reached |= new
    assert reached == set(Stage) - {Stage.INHERITED}
    assert {action for row in TABLE.values() for action in row.actions} == set(Action)
    assert set(STATES) == set(Stage)


def test_the_log_says_why():
    assert why(BROKE) == "crashed: rank 1 crashed"
    assert why(FAILED) == "RuntimeError: no"
    assert why(CLOSE) == "closed by this process"
    assert why(CloseAsked(1.0, "an exception")) == "closed by this process, which ends: an exception"
    assert all(why(event) for event in EVENTS)
