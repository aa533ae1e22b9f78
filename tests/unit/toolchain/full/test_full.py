"""The full build's runner: steps, resuming, failing, stopping; with small scripts in place of the real programs."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from m8d_build.errors import (
    BuildBusy,
    CheckFailed,
    CommandFailed,
    DiskFull,
    Interrupted,
    OutputUnwritable,
)
from m8d_build.files.lock import hold
from m8d_build.full.build import run_full, unfinished
from m8d_build.full.finished import load_state
from m8d_build.full.steps import Act, Action, Command, FullPlan, Layout, Step
from m8d_build.progress import Silent


def program(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


class NoActions:
    """Actions that only count."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.seen: list[Act] = []
        self.error = error

    def perform(self, action, plan, log):
        self.seen.append(action.act)
        if self.error is not None:
            raise self.error


@pytest.fixture
def three(tmp_path):
    """A plan of three steps; each writes a line to ``calls`` and a file, and fails while ``fail-<id>`` is there."""

    def make(**changes) -> FullPlan:
        out = tmp_path / "out"
        layout = Layout.of("2.6.0", "cu124", "3.11", out)
        steps = []
        for name in ("one", "two", "three"):
            script = program(
                tmp_path / f"bin/{name}",
                f'echo {name} >> "{tmp_path}/calls"; echo "saying $1"\n'
                f'if [ -e "{tmp_path}/fail-{name}" ]; then echo "cannot do {name}" >&2; exit 7; fi\n'
                f'echo done > "{layout.work}/{name}.made"',
            )
            parts = (Command(f"do {name}", (script, "hello"), str(tmp_path), timeout=60),)
            made = (str(layout.work / f"{name}.made"),)
            step = Step(
                name,
                f"step {name}",
                parts,
                key=f"k-{name}",
                clears=made,
                makes=made,
                next_step=f"mend {name}",
            )
            steps.append(replace(step, **changes.get(name, {})))
        return FullPlan(
            "2.6.0", "2.6.0+cu124.m8d1", layout, tuple(steps), "cu124.m8d1", "cp311", (), cxx11_abi=False
        )

    return make


def calls(tmp_path):
    path = tmp_path / "calls"
    return path.read_text().split() if path.exists() else []


def test_all_steps_run_in_order_and_are_reported(three, tmp_path):
    reporter = Silent()
    result = run_full(three(), NoActions(), reporter)
    assert calls(tmp_path) == ["one", "two", "three"]
    assert reporter.steps == ["step one", "step two", "step three"]
    assert (result.ran, result.kept) == (("one", "two", "three"), ())


def test_a_second_run_does_nothing(three, tmp_path):
    run_full(three(), NoActions(), Silent())
    result = run_full(three(), NoActions(), Silent())
    assert calls(tmp_path) == ["one", "two", "three"]
    assert (result.ran, result.kept) == ((), ("one", "two", "three"))


def test_a_failed_step_names_log_last_lines_and_what_to_do(three, tmp_path):
    (tmp_path / "fail-two").touch()
    plan = three()
    with pytest.raises(CommandFailed) as caught:
        run_full(plan, NoActions(), Silent())
    assert "could not do two" in str(caught.value)
    assert "mend two" in caught.value.next_step
    assert "goes on with this step" in caught.value.next_step
    assert caught.value.log == plan.layout.logs / "two.log"
    assert "saying hello\ncannot do two" in caught.value.tail
    assert "cannot do two" in caught.value.log.read_text()
    assert calls(tmp_path) == ["one", "two"]


def test_a_failure_has_nothing_of_a_run_before(three, tmp_path):
    """Its log is the same file, and a disk may have been full then."""
    plan = three()
    plan.layout.logs.mkdir(parents=True)
    (plan.layout.logs / "two.log").write_text("No space left on device\n")
    missing = replace(plan.steps[1].parts[0], argv=(str(tmp_path / "no-such-program"),))
    for part in (missing, plan.steps[1].parts[0]):
        (tmp_path / "fail-two").touch()
        steps = (plan.steps[0], replace(plan.steps[1], parts=(part,)), plan.steps[2])
        with pytest.raises(CommandFailed) as caught:
            run_full(replace(plan, steps=steps), NoActions(), Silent())
        assert "No space" not in caught.value.tail


def test_the_next_run_goes_on_at_the_failed_step(three, tmp_path):
    (tmp_path / "fail-two").touch()
    with pytest.raises(CommandFailed):
        run_full(three(), NoActions(), Silent())
    (tmp_path / "fail-two").unlink()
    reporter = Silent()
    result = run_full(three(), NoActions(), reporter)
    assert calls(tmp_path) == ["one", "two", "two", "three"]
    assert result.kept == ("one",)
    assert "finished by an earlier run: one" in reporter.notes


def test_a_step_whose_key_changed_is_done_again_with_all_after_it(three, tmp_path):
    run_full(three(), NoActions(), Silent())
    run_full(three(two={"key": "other"}), NoActions(), Silent())
    assert calls(tmp_path) == ["one", "two", "three", "two", "three"]


def test_a_step_whose_result_is_gone_is_done_again_with_all_after_it(three, tmp_path):
    plan = three()
    run_full(plan, NoActions(), Silent())
    (plan.layout.work / "one.made").unlink()
    run_full(plan, NoActions(), Silent())
    assert calls(tmp_path) == ["one", "two", "three"] * 2


def test_a_step_done_in_every_run_is(three, tmp_path):
    plan = three(three={"always": True})
    run_full(plan, NoActions(), Silent())
    assert run_full(plan, NoActions(), Silent()).ran == ("three",)
    assert calls(tmp_path) == ["one", "two", "three", "three"]


def test_an_earlier_step_done_again_makes_a_later_failure_forget_the_later_ones(three, tmp_path):
    run_full(three(), NoActions(), Silent())
    (tmp_path / "fail-two").touch()
    with pytest.raises(CommandFailed):
        run_full(three(one={"key": "other"}), NoActions(), Silent())
    assert set(load_state(three().layout.state)) == {"one"}


def test_fresh_removes_what_was_there_and_begins_anew(three, tmp_path):
    plan = three()
    run_full(plan, NoActions(), Silent())
    (plan.layout.work / "rest").mkdir()
    run_full(plan, NoActions(), Silent(), fresh=True)
    assert calls(tmp_path) == ["one", "two", "three"] * 2
    assert not (plan.layout.work / "rest").exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema": 2, "steps": {}}', '{"schema": 1, "steps": {"one": 3}}']
)
def test_an_unreadable_state_means_nothing_is_finished(three, tmp_path, text):
    plan = three()
    run_full(plan, NoActions(), Silent())
    plan.layout.state.write_text(text)
    assert [step.id for step in unfinished(plan)] == ["one", "two", "three"]


def test_what_a_step_left_half_made_is_removed_first(three, tmp_path):
    plan = three()
    plan.layout.work.mkdir(parents=True)
    half = plan.layout.work / "two.made"
    half.mkdir()
    run_full(plan, NoActions(), Silent())
    assert half.read_text() == "done\n"


def test_ctrl_c_keeps_what_is_finished(three, tmp_path):
    stop = (Action(Act.INSPECT),)
    plan = three(two={"parts": stop})
    with pytest.raises(Interrupted) as caught:
        run_full(plan, NoActions(KeyboardInterrupt()), Silent())
    assert "step two" in str(caught.value)
    assert caught.value.exit_code == 130
    assert set(load_state(plan.layout.state)) == {"one"}
    run_full(three(), NoActions(), Silent())
    assert calls(tmp_path) == ["one", "two", "three"]


def test_a_full_disk_is_disk_full(three):
    plan = three(two={"parts": (Action(Act.INSPECT),)})
    with pytest.raises(DiskFull, match="no room left"):
        run_full(plan, NoActions(OSError(errno.ENOSPC, "No space left on device")), Silent())
    assert set(load_state(plan.layout.state)) == {"one"}


def test_a_program_that_met_a_full_disk_is_disk_full(three, tmp_path):
    script = program(
        tmp_path / "bin/full", "echo 'fatal error: error writing to /tmp/x: No space left on device'; exit 1"
    )
    plan = three(two={"parts": (Command("compile", (script,), str(tmp_path)),)})
    with pytest.raises(DiskFull):
        run_full(plan, NoActions(), Silent())


def test_a_program_past_its_time_is_ended_and_said_so(three, tmp_path):
    script = program(tmp_path / "bin/slow", "exec sleep 60")
    plan = three(two={"parts": (Command("wait", (script,), str(tmp_path), timeout=0.2),)})
    with pytest.raises(CommandFailed, match="could not wait within"):
        run_full(plan, NoActions(), Silent())


def test_a_missing_program_is_named(three, tmp_path):
    plan = three(two={"parts": (Command("run it", (str(tmp_path / "nowhere"),), str(tmp_path)),)})
    with pytest.raises(CommandFailed, match="nowhere"):
        run_full(plan, NoActions(), Silent())


def test_an_error_without_advice_gets_the_steps(three):
    plan = three(two={"parts": (Action(Act.INSPECT),)})
    with pytest.raises(CheckFailed) as caught:
        run_full(plan, NoActions(CheckFailed("it is wrong")), Silent())
    assert caught.value.next_step == "mend two"


def test_two_builds_in_one_folder_are_refused(three):
    plan = three()
    with hold(plan.layout.work, what="another build"), pytest.raises(BuildBusy, match="another build"):
        run_full(plan, NoActions(), Silent())


def test_an_output_folder_that_is_a_file_is_refused(three, tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(OutputUnwritable):
        run_full(three(), NoActions(), Silent())
