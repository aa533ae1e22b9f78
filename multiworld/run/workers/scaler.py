"""Carries out what changes the number of this node's workers: commands, the drain signal, losses for good."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from signal import Signals
from typing import TYPE_CHECKING, Any, NamedTuple

from multiworld.logs.source import logger
from multiworld.run.errors import ArgumentsError
from multiworld.run.events import Note, WorkerEnded, WorkerRetiring, WorkerStopped
from multiworld.run.signals import is_another
from multiworld.run.workers import scaling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from multiworld.run.events import EventBus
    from multiworld.run.workers.process import ProcessExit, WorkerProcess
    from multiworld.run.workers.ranks import WorkerRank
    from multiworld.run.workers.retirements import Retirements
    from multiworld.run.worldsfile.worlds_plan import WorldsPlan

__all__ = ["DRAIN_SIGNAL", "Crew", "Request", "Scaler"]

DRAIN_SIGNAL = Signals.SIGUSR1
"""Signal to the launcher: it retires every worker of this node that the run can do without."""

_log = logger(__name__)


class Request(NamedTuple):
    """A request of ``m8d-run scale`` or ``m8d-run retire``.

    Attributes:
        said: see `scaling.Command`.
        answer: gets what is done, or why nothing is.
        waits: whether the command still waits for the answer.
    """

    said: dict[str, Any]
    answer: Callable[[dict[str, Any]], None]
    waits: Callable[[], bool] = lambda: True


@dataclass
class Crew:
    """The workers of this node, by global rank.

    Attributes:
        retirements: of those that were asked to end.
        places: those that there may be.
        vacant: ranks of seats that no node has: no node has workers for them.
        wanted: those that are to go on, or have ended with 0.
        processes: those that run.
        due: monotonic seconds at which one is started again.
        values: what those returned that have ended with 0.
    """

    retirements: Retirements
    places: dict[int, WorkerRank] = field(default_factory=dict)
    vacant: tuple[int, ...] = ()
    wanted: set[int] = field(default_factory=set)
    processes: dict[int, WorkerProcess] = field(default_factory=dict)
    due: dict[int, float] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        """Whether some have ended with 0, and all others, or were retired."""
        return self._still and bool(self.wanted) and self.wanted <= self.values.keys()

    @property
    def idle(self) -> bool:
        """Whether all were retired: none has ended with 0, and there may be some again."""
        return self._still and not self.wanted

    @property
    def _still(self) -> bool:
        """Whether none runs, or is to run, where there may be some."""
        return bool(self.places) and not self.processes and not self.due

    def going_on(self) -> list[scaling.Worker]:
        """Those that were neither retired nor have ended."""
        return [
            scaling.Worker(rank, process.started, process.came_up)
            if (process := self.processes.get(rank)) is not None
            else scaling.Worker(rank, float("inf"), member=False)
            for rank in sorted(self.wanted - self.values.keys())
        ]


class Scaler:
    """Starts and retires workers of a crew.

    Args:
        crew: of this node; changed here.
        plan: of the worlds file.
        bus: gets the run's events.
        tell_retiring: tells the workers of these ranks, and no others, that they retire.
        start: starts the worker of a rank.

    Attributes:
        drain_end: monotonic seconds at which the drain that SIGTERM began ends; infinity: none was begun.
    """

    def __init__(
        self,
        crew: Crew,
        plan: WorldsPlan | None,
        bus: EventBus,
        tell_retiring: Callable[[Iterable[int]], None],
        start: Callable[[int], None],
    ) -> None:
        self._crew, self._plan, self._bus = crew, plan, bus
        self._tell_retiring, self._start = tell_retiring, start
        self.drain_end = math.inf

    @property
    def draining(self) -> bool:
        """Whether this launcher ends once its workers have retired: its ranks are another node's then."""
        return self.drain_end != math.inf

    @property
    def signals(self) -> tuple[Signals, ...]:
        """Signals to the launcher that mean `drain`; none where the run cannot do without any worker."""
        return (DRAIN_SIGNAL,) if self._plan is not None and self._plan.changing else ()

    def obey(self, request: Request, nodes: int) -> None:
        """Carry out a request, and answer it; whatever is wrong with it, the run goes on.

        One whose command has given up is dropped: people were told that it has failed.

        Args:
            request: of another thread.
            nodes: number of nodes that have workers; 0: this one has none, or they have ended.
        """
        crew = self._crew
        if not request.waits():
            return
        try:
            change = scaling.changed(
                scaling.read(request.said),
                self._plan,
                tuple(crew.places),
                crew.going_on(),
                crew.retirements.ranks,
                nodes=nodes,
                vacant=crew.vacant,
            )
        except ArgumentsError as error:
            request.answer({"error": str(error)})
            return
        except Exception as error:  # noqa: BLE001  (answered; healthy workers must not end for it)
            _log.exception("a request to scale or retire could not be read")
            request.answer({"error": f"{type(error).__name__}: {error}"})
            return
        failed = self._change(change)
        names = {rank: f"{place.role}:{place.role_rank} (rank {rank})" for rank, place in crew.places.items()}
        done = [f"starts {names[rank]}" for rank in change.start if rank not in failed]
        done += [f"retires {names[rank]}" for rank in change.retire]
        if failed:
            said = [f"{names[rank]} could not be started: {why}" for rank, why in failed.items()]
            request.answer({"error": "; ".join(said + done)})
        else:
            request.answer({"done": done})

    def drain(self, seconds: float = scaling.DRAIN) -> None:
        """Retire every worker of this node that the run can do without; each has so many seconds."""
        crew = self._crew
        retire = scaling.spared(self._plan, tuple(crew.places), crew.going_on(), crew.vacant)
        self._change(scaling.Change(retire=retire, drain=seconds))

    def drains_first(self, number: Signals, seconds: float) -> bool:
        """Retire workers at the first SIGTERM; return whether the end of the run waits for them.

        Args:
            number: of the signal to the launcher.
            seconds: of --drain; 0: no signal is waited with.
        """
        if self.draining and seconds:
            return not is_another(number, Signals.SIGTERM, time.monotonic() - (self.drain_end - seconds))
        if number != Signals.SIGTERM or not seconds or self.draining or not self.signals:
            return False
        self.drain(seconds)
        retiring = len(self._crew.retirements.ranks)
        if retiring:
            self.drain_end = time.monotonic() + seconds
            text = f"got SIGTERM: workers retire first, {retiring} of {len(self._crew.processes)}"
            self._bus.publish(Note(time.time(), logging.WARNING, text))
        return retiring > 0

    def drained(self) -> bool:
        """Whether the drain that SIGTERM began is over."""
        return self.draining and (not self._crew.retirements.ranks or time.monotonic() >= self.drain_end)

    @property
    def fixed_ended(self) -> bool:
        """Whether this node has workers of a role that is no range, and all that are wanted ended with 0."""
        changing = set() if self._plan is None else {role.name for role in self._plan.changing}
        fixed = {rank for rank, place in self._crew.places.items() if place.role not in changing}
        return bool(fixed) and self._crew.wanted <= self._crew.values.keys()

    def _change(self, change: scaling.Change) -> dict[int, str]:
        """Start and retire workers; return why some could not be started, which are not wanted then."""
        crew, failed = self._crew, dict[int, str]()
        for rank in change.retire:
            crew.wanted.discard(rank)
            if crew.due.pop(rank, None) is not None:  # no process: it is gone at once
                self._bus.publish(WorkerRetiring(time.time(), rank, 0.0))
            if rank in crew.processes and rank not in crew.retirements:
                crew.retirements.begin(rank, change.drain, time.monotonic())
                self._bus.publish(WorkerRetiring(time.time(), rank, change.drain))
        self._tell_retiring(crew.retirements.ranks)
        for rank in change.start:
            crew.wanted.add(rank)
            crew.values.pop(rank, None)  # it had ended with 0, and works again
            if rank in crew.processes:
                continue  # it starts once the retired one has ended
            try:
                self._start(rank)
            except Exception as error:  # noqa: BLE001  (who asked for it is told; the others go on)
                failed[rank] = f"{type(error).__name__}: {error}"
                crew.wanted.discard(rank)
                text = f"rank {rank} could not be started: {failed[rank]}"
                self._bus.publish(Note(time.time(), logging.WARNING, text))
        return failed

    def press(self) -> None:
        """Signal the retired workers whose time is over."""
        for rank, number in self._crew.retirements.due(time.monotonic()):
            text = f"rank {rank} was retired and has not ended: it gets {number.name}"
            self._bus.publish(Note(time.time(), logging.WARNING, text))
            self._crew.processes[rank].send(number)

    def forget(self) -> None:
        """All workers are ended in another way."""
        self._crew.due.clear()
        self._crew.retirements.clear()
        self._tell_retiring(())

    def has_retired(self, process: WorkerProcess, ended: ProcessExit) -> None:
        """A retired worker's process has ended."""
        rank, now = process.rank, time.time()
        self._crew.retirements.ended(rank)
        self._tell_retiring(self._crew.retirements.ranks)
        if ended.failure is None:
            self._bus.publish(WorkerEnded(now, rank, process.pid))
        else:
            self._bus.publish(WorkerStopped(now, rank, process.pid, ended.exitcode))
        if rank in self._crew.wanted:  # it was asked for again meanwhile
            self._crew.due[rank] = time.monotonic()

    def goes_on_without(self, rank: int) -> bool:
        """Whether the run goes on without a worker that failed for good; then it is not wanted any more.

        As long as this node has another one of its role: what fails on all of them ends the run.
        """
        crew, plan = self._crew, self._plan
        others = [each for each in crew.going_on() if each.rank != rank]
        if plan is None or not scaling.spares(plan, rank, tuple(crew.places), others, crew.vacant):
            return False
        crew.wanted.discard(rank)
        return True
