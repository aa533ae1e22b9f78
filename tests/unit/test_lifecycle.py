from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld._core.lifecycle import Action, Broke, CloseAsked, IllegalStepError, Joined, JoinFailed, step
from multiworld.events import Breakage, Cause, State

BREAKAGE = Breakage(Cause.CRASHED, (1,), "rank 1 crashed", 1.0)
HAPPENINGS = (Joined(), JoinFailed(RuntimeError("no")), Broke(BREAKAGE), CloseAsked())


@pytest.mark.parametrize(
    ("before", "event", "after", "actions"),
    [
        (State.JOINING, HAPPENINGS[0], State.ACTIVE, (Action.TELL_ACTIVE,)),
        (State.JOINING, HAPPENINGS[1], State.CLOSED, (Action.ABORT_GROUP, Action.RELEASE, Action.TELL_JOIN_FAILED)),
        (State.JOINING, HAPPENINGS[2], State.CLOSED, (Action.ABORT_GROUP, Action.RELEASE, Action.TELL_JOIN_FAILED)),
        (State.ACTIVE, HAPPENINGS[2], State.BROKEN, (Action.ABORT_GROUP, Action.TELL_BROKEN)),
        (State.ACTIVE, HAPPENINGS[3], State.CLOSED, (Action.SAY_GOODBYE, Action.ABORT_GROUP, Action.RELEASE, Action.TELL_CLOSED)),
        (State.BROKEN, HAPPENINGS[3], State.CLOSED, (Action.RELEASE, Action.TELL_CLOSED)),
    ],
)  # fmt: skip
def test_the_table(before, event, after, actions):
    assert step(before, event) == (after, actions)


@pytest.mark.parametrize("state", [State.BROKEN, State.CLOSED])
def test_a_late_verdict_changes_nothing(state):
    assert step(state, Broke(BREAKAGE)) == (state, ())


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (State.ACTIVE, Joined()),
        (State.ACTIVE, JoinFailed(RuntimeError("no"))),
        (State.BROKEN, Joined()),
        (State.BROKEN, JoinFailed(RuntimeError("no"))),
    ],
)
def test_what_cannot_happen_raises(state, event):
    with pytest.raises(IllegalStepError) as caught:
        step(state, event)
    assert (caught.value.state, caught.value.event) == (state, event)
    assert str(state) in str(caught.value)


@given(st.lists(st.sampled_from(HAPPENINGS), max_size=30))
def test_no_order_of_events_leads_out_of_the_table_or_back(events):
    state, seen, done = State.JOINING, [State.JOINING], []
    for event in events:
        try:
            state, actions = step(state, event)
        except IllegalStepError:
            continue
        assert isinstance(state, State)
        seen.append(state)
        done += actions
    order = [State.JOINING, State.ACTIVE, State.BROKEN, State.CLOSED]
    assert [order.index(each) for each in seen] == sorted(order.index(each) for each in seen)
    for once in (
        Action.RELEASE,
        Action.TELL_ACTIVE,
        Action.TELL_BROKEN,
        Action.ABORT_GROUP,
        Action.SAY_GOODBYE,
    ):
        assert done.count(once) <= 1
    assert (Action.RELEASE in done) == (state is State.CLOSED)
