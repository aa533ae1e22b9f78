"""The stage of one generation in this process: one setter, which logs every change.

The logger is "multiworld.state" (docs/logs.md): breakages are at WARNING, other changes of `State` at INFO,
the stages in between at DEBUG.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from multiworld._core.state_machine import STATES, Broke, Forked, Replaced, Stage, StageEvent, step, why
from multiworld.events import Cause, State
from multiworld.logs.source import about, logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld._core.state_machine import Action
    from multiworld.events import Breakage

    Executor = Callable[[list[Action], StageEvent], None]
    _Change = tuple[Stage, Stage, list[Action]]

__all__ = ["StateMachine"]

_log = logger("multiworld.state")


class StateMachine:
    """Where one generation stands, from the first step of its join to its end.

    The join makes it; the generation that the join makes is bound to it, and carries its actions out. Before
    that no row of the table has any.

    Args:
        world: name.
        rank: of this process.

    Attributes:
        generation: its number; 0 until the members have agreed on it.
        stage, state: where it stands, and what programs see of it; only `apply` changes them.
        since: ``time.monotonic()`` seconds of the last change of `state`.
        verdict: the first breakage that was seen.
        replaced: number of the generation to which this process went on without a breakage, 0 where it left;
            None as long as it has not.
    """

    __slots__ = (
        "_broken", "_executor", "_lock", "generation", "rank", "replaced", "since", "stage", "state",
        "verdict", "world",
    )  # fmt: skip

    def __init__(self, world: str, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.generation = 0
        self.stage = Stage.CONNECTING
        self.state = STATES[self.stage]
        self.since = time.monotonic()
        self.verdict: Breakage | None = None
        self._broken = False
        self.replaced: int | None = None
        self._executor: Executor | None = None
        self._lock = threading.Lock()

    @property
    def breakage(self) -> Breakage | None:
        """The verdict, once `state` has said that the generation is broken by it, and from that moment on."""
        return self.verdict if self._broken or self.state is State.BROKEN else None

    def bind(self, executor: Executor) -> None:
        """Have `executor` carry out the actions of every event from now on, in the thread that applies it.

        It takes them out of the list that it is given, and is called again where some are left.
        """
        self._executor = executor

    def apply(self, event: StageEvent) -> Stage:
        """Change the stage, log that, and have the actions carried out; return the stage after `event`.

        Raises:
            IllegalStepError: the event cannot happen in this stage.
        """
        changes: list[_Change] = []
        try:
            try:
                self._change(event, changes)
                before, stage, _ = changes[0]
                if stage is not before:  # not under the lock: a handler of the log is the program's own
                    self._log_change(before, stage, event)
            except Exception:
                raise
            except BaseException:  # Ctrl-C: the event is not lost, nor what follows it
                if not changes:
                    self._change(event, changes)
                raise
        finally:
            try:
                self._carry_out(changes, event)
            finally:  # Ctrl-C came before that had begun
                self._carry_out(changes, event)
        return stage

    def _change(self, event: StageEvent, changes: list[_Change]) -> None:
        with self._lock:
            before = self.stage
            stage, actions = step(before, event)
            left = list(actions)
            if stage is not before:
                if isinstance(event, Broke):
                    self.verdict = event.breakage
                if isinstance(event, Replaced):
                    self.replaced = event.by
                if self.state is not STATES[stage]:
                    self.since = time.monotonic()
                broken = self._broken or stage is Stage.BROKEN
                self.state, self.stage = STATES[stage], stage
                self._broken = broken
            # No call in between, after which Python looks for signals: these are one step.
            changes.append((before, stage, left))

    def _carry_out(self, changes: list[_Change], event: StageEvent) -> None:
        if changes and (left := changes[0][2]):
            assert self._executor is not None  # noqa: S101  (no row before `bind` has actions)
            self._executor(left, event)

    def _log_change(self, before: Stage, stage: Stage, event: StageEvent) -> None:
        level = logging.DEBUG if STATES[before] is STATES[stage] else logging.INFO
        if stage is Stage.BROKEN and self.breakage is not None and self.breakage.cause is not Cause.LEFT:
            level = logging.WARNING
        if not _log.isEnabledFor(level):
            return
        if stage is Stage.BROKEN and self.breakage is not None:  # perhaps one that was seen before
            event = Broke(self.breakage)
        what = (self.world, self.generation, self.rank, before.value, stage.value, why(event))
        extra = about(self.world, self.generation, self.rank, kind=f"{before.value} {stage.value}")
        _log.log(level, "world %r, generation %d, rank %d: %s -> %s (%s)", *what, extra=extra)

    def forked(self) -> None:
        """In a forked child: the generation is the parent's. Another thread may have held the lock."""
        self._lock = threading.Lock()
        self.apply(Forked())
