"""The one setter of a generation's stage: what it logs, keeps and has carried out."""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path

import pytest

from multiworld._core.state_machine import (
    Action,
    Announced,
    Broke,
    CloseAsked,
    IllegalStepError,
    Joined,
    JoinFailed,
    Stage,
    step,
)
from multiworld._generation.stage import StateMachine
from multiworld.events import Breakage, Cause, State

BREAKAGE = Breakage(Cause.CRASHED, (1,), "rank 1 crashed", 1.0)
LATER = Breakage(Cause.HUNG, (2,), "rank 2 hangs", 2.0)
LIBRARY = Path(__file__).parents[3] / "multiworld"


class Recording(StateMachine):
    """With a place for what it has carried out."""

    done: list


@pytest.fixture
def machine():
    made = Recording("w", 3)
    made.done = []

    def carry_out(actions, event):
        made.done.append((tuple(actions), event))
        actions.clear()

    made.bind(carry_out)
    return made


def test_every_change_is_logged_with_its_reason(machine, caplog):
    caplog.set_level(logging.DEBUG, "multiworld.state")
    machine.generation = 7
    for event in (Joined(), Announced(), Broke(BREAKAGE), Broke(LATER), CloseAsked()):
        machine.apply(event)
    place = "world 'w', generation 7, rank 3: "
    assert [(each.levelname, each.getMessage().removeprefix(place)) for each in caplog.records] == [
        ("INFO", "connecting -> opening (every member has committed)"),
        ("DEBUG", "opening -> active (subscribers know)"),
        ("WARNING", "active -> broken (crashed: rank 1 crashed)"),
        ("INFO", "broken -> closed (closed by this process)"),
    ]


def test_a_breakage_before_subscribers_know_counts_when_they_do(machine, caplog):
    caplog.set_level(logging.INFO, "multiworld.state")
    machine.apply(Joined())
    machine.apply(Broke(BREAKAGE))
    machine.apply(Broke(LATER))
    assert (machine.state, machine.verdict, machine.breakage) == (State.ACTIVE, BREAKAGE, None)
    assert machine.done == []
    assert machine.apply(Announced()) is Stage.BROKEN
    assert (machine.state, machine.breakage) == (State.BROKEN, BREAKAGE)
    ((actions, event),) = machine.done
    assert Action.TELL_BROKEN in actions
    assert event == Announced()
    assert caplog.records[-1].getMessage().endswith("doomed -> broken (crashed: rank 1 crashed)")


def test_nothing_is_logged_where_no_one_asked(machine, caplog):
    caplog.set_level(logging.WARNING, "multiworld.state")
    machine.apply(JoinFailed(ValueError("x")))
    assert caplog.records == []
    assert machine.state is State.CLOSED


def test_an_illegal_event_changes_nothing(machine):
    machine.apply(Joined())
    with pytest.raises(IllegalStepError):
        machine.apply(Joined())
    assert machine.stage is Stage.OPENING


def test_a_handler_of_the_log_may_close_the_world(machine, caplog):
    class Closing(logging.Handler):
        def emit(self, record):
            if "-> opening" in record.getMessage():
                machine.apply(CloseAsked())

    log = logging.getLogger("multiworld.state")
    handler = Closing()
    log.addHandler(handler)
    caplog.set_level(logging.DEBUG, "multiworld.state")
    try:
        machine.apply(Joined())
    finally:
        log.removeHandler(handler)
    assert machine.stage is Stage.CLOSED


@pytest.mark.parametrize("raised", [OSError, KeyboardInterrupt])
def test_what_comes_out_of_a_handler_of_the_log_leaves_no_action_out(machine, caplog, raised, capsys):
    """A handler of the program's own raises, or Ctrl-C comes in one that waits."""

    class Raising(logging.Handler):
        def emit(self, record):
            raise raised("of the handler")

    machine.apply(Joined())
    log, handler = logging.getLogger("multiworld.state"), Raising()
    log.addHandler(handler)
    caplog.set_level(logging.DEBUG, "multiworld.state")
    try:
        with pytest.raises(KeyboardInterrupt) if raised is KeyboardInterrupt else contextlib.nullcontext():
            machine.apply(CloseAsked())
    finally:
        log.removeHandler(handler)
    assert machine.stage is Stage.CLOSED
    assert len(machine.done) == 1
    assert ("of the handler" in capsys.readouterr().err) is (raised is OSError)


def test_a_forked_child_has_only_its_parents(machine):
    machine.apply(Joined())
    machine.forked()
    assert (machine.stage, machine.state) == (Stage.INHERITED, State.CLOSED)
    assert machine.apply(Broke(BREAKAGE)) is Stage.INHERITED
    assert machine.done == []


def test_only_the_setter_changes_a_stage():
    found = [
        path.name
        for path in LIBRARY.rglob("*.py")
        if "machine.stage =" in path.read_text() or "machine.state =" in path.read_text()
    ]
    assert found == []
    assert (LIBRARY / "_generation" / "stage.py").read_text().count("self.state, self.stage =") == 1


@pytest.mark.parametrize("place", ["_change", "_log_change", "_carry_out", "the executor"])
def test_ctrl_c_leaves_no_event_half_done(machine, monkeypatch, place):
    machine.apply(Joined())
    machine.apply(Announced())
    machine.done.clear()
    carry_out, function, come = machine._executor, getattr(StateMachine, place, None), []

    def interrupted(*args):
        if not come:
            come.append(True)
            raise KeyboardInterrupt
        return (function or carry_out)(*args)

    if function is None:
        machine.bind(interrupted)
    else:
        monkeypatch.setattr(StateMachine, place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        machine.apply(CloseAsked())
    assert machine.stage is Stage.CLOSED
    assert [actions for actions, _ in machine.done] == [step(Stage.ACTIVE, CloseAsked()).actions]


def test_no_thread_sees_a_breakage_of_an_active_generation(machine):
    """A program that waits for `breakage` may reform at once."""
    machine.apply(Joined())
    machine.apply(Announced())
    seen, code = [], StateMachine._change.__code__

    def look(frame, event, _):
        if frame.f_code is code:
            seen.append((machine.breakage, machine.state))
            return look
        return None

    before = sys.gettrace()
    sys.settrace(look)
    try:
        machine.apply(Broke(BREAKAGE))
    finally:
        sys.settrace(before)
    assert seen[0] == (None, State.ACTIVE)
    assert all((breakage is not None) is (state is State.BROKEN) for breakage, state in seen), seen
    assert (machine.breakage, machine.state) == (BREAKAGE, State.BROKEN)
    machine.apply(CloseAsked())
    assert (machine.breakage, machine.state) == (BREAKAGE, State.CLOSED)
