"""The full build, run: the plan's steps in order, each finished one recorded."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from m8d_build.errors import BuildError, CommandFailed, Interrupted, OutputUnwritable
from m8d_build.files.disk import needs_room, remove_tree
from m8d_build.files.lock import LOCK_NAME, hold
from m8d_build.full.finished import Finished, load_state, remaining, save_state
from m8d_build.full.steps import Command
from m8d_build.proc import run
from m8d_build.wheel.marking import mode_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Protocol

    from m8d_build.full.steps import Action, FullPlan, Step
    from m8d_build.progress import Reporter

    class Actions(Protocol):
        """What does a plan's actions."""

        def perform(self, action: Action, plan: FullPlan, log: Path) -> Path | None:
            """Do one action; return the finished wheel if that is what it made."""


__all__ = ["FullResult", "loses_compiled", "run_full", "unfinished"]


@dataclass(frozen=True)
class FullResult:
    """What a full build came to.

    Attributes:
        wheel: the finished wheel; None if the plan makes none.
        ran: ids of the steps done in this run.
        kept: ids of the steps finished by an earlier one.
        seconds: wall-clock time of this run.
    """

    wheel: Path | None
    ran: tuple[str, ...]
    kept: tuple[str, ...]
    seconds: float


def unfinished(plan: FullPlan) -> tuple[Step, ...]:
    """Return the steps a run would do now."""
    makes = [path for step in plan.steps for path in step.makes]
    return remaining(plan.steps, load_state(plan.layout.state), {path: _is_there(path) for path in makes})


def loses_compiled(plan: FullPlan) -> bool:
    """Return whether a run would remove finished sources with what is compiled in them: hours of work."""
    tree, state = plan.layout.tree, load_state(plan.layout.state)
    removes = any(str(tree) in step.clears and step.id in state for step in unfinished(plan))
    return removes and (tree / "build").is_dir()


def run_full(
    plan: FullPlan,
    actions: Actions,
    reporter: Reporter,
    *,
    fresh: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> FullResult:
    """Do what is left of a full build.

    Args:
        plan: what to do.
        actions: what does the steps that are no commands.
        reporter: hears of each step.
        fresh: forget what an earlier run finished, and remove it.
        clock: seconds, monotonic.

    Raises:
        CommandFailed: a program failed; names the log, its last lines, and what to do. The next run goes on
            there.
        Interrupted: Ctrl-C. The next run goes on with the step that was stopped.
        BuildBusy: another build works in this folder.
        OutputUnwritable: the folder cannot be made or written.
        DiskFull: there was no room left.
        BuildError: an action failed; each kind says so itself.
    """
    began = clock()
    layout = plan.layout
    with hold(layout.work, what=f"the full build of torch {plan.torch}"):
        if fresh:
            _clear(layout.work)
        _make(layout.work / "tmp")
        _make(layout.logs)
        left = unfinished(plan)
        kept = tuple(step.id for step in plan.steps if step not in left)
        if kept:
            reporter.note(f"finished by an earlier run: {', '.join(kept)}")
        state = {name: done for name, done in load_state(layout.state).items() if name in kept}
        wheel: Path | None = None
        for step in left:
            wheel = _do(step, plan, actions, reporter, state, clock) or wheel
    return FullResult(wheel, tuple(step.id for step in left), kept, clock() - began)


def _do(
    step: Step,
    plan: FullPlan,
    actions: Actions,
    reporter: Reporter,
    state: dict[str, Finished],
    clock: Callable[[], float],
) -> Path | None:
    """Do one step and remember that it is done."""
    began = clock()
    log = plan.layout.logs / f"{step.id}.log"
    wheel: Path | None = None
    try:
        with reporter.step(step.title), needs_room(plan.layout.work, f"doing: {step.title}"):
            # What a step that is not done leaves behind must not be taken for its result later on.
            save_state(plan.layout.state, state)
            for path in step.clears:
                remove_tree(Path(path))
            for part in step.parts:
                if isinstance(part, Command):
                    _command(part, step, log)
                else:
                    wheel = actions.perform(part, plan, log) or wheel
            state[step.id] = Finished(step.key, clock() - began)
            save_state(plan.layout.state, state)
    except KeyboardInterrupt as exc:
        raise Interrupted(
            f"stopped while doing: {step.title}",
            next_step="Run it again: it goes on with this step, and with what is already compiled",
            log=log if log.exists() else None,
        ) from exc
    except BuildError as exc:
        if not exc.next_step:
            exc.next_step = step.next_step
        raise
    return wheel


def _command(command: Command, step: Step, log: Path) -> None:
    try:
        run(
            command.argv,
            what=command.what,
            log=log,
            cwd=Path(command.cwd),
            env=dict((*command.env, *command.hidden)),
            timeout=command.timeout,
            next_step=step.next_step,
        )
    except CommandFailed as exc:
        advice = exc.next_step.rstrip(".")
        raise CommandFailed(
            exc.value,
            next_step=f"{advice}. The next run goes on with this step" if advice else "",
            log=exc.log,
            tail=exc.tail,
        ) from exc


def _is_there(path: str) -> bool:
    place = Path(path)
    # An overlay build has the same name.
    return any(each.suffix != ".whl" or mode_of(each) != "overlay" for each in place.parent.glob(place.name))


def _make(folder: Path) -> None:
    try:
        with needs_room(folder, "making its folders"):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise OutputUnwritable(
            f"{folder} cannot be made: {exc.strerror or exc}",
            rule="it must be a folder we may write",
            next_step="Name another folder with --out",
        ) from exc


def _clear(work: Path, keep: Sequence[str] = (LOCK_NAME, f"{LOCK_NAME}.json")) -> None:
    """Remove all of an earlier run but the lock we hold."""
    for path in work.iterdir():
        if path.name not in keep:
            remove_tree(path)
