"""torch's agent, with workers that restart alone: a failed one is started again in its place, the others run on."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from signal import Signals
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.api import EventSource
from torch.distributed.elastic.metrics.api import put_metric
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.utils.api import macros

from multiworld.run.errors import RunError
from multiworld.run.events import (
    Note,
    WorkerEnded,
    WorkerFailed,
    WorkerRestarting,
    WorkerStarted,
    WorkerStopped,
    WorldChanged,
)
from multiworld.run.nodes.interface import Lost, Over, Seated, Stop
from multiworld.run.view.state import UP_AFTER
from multiworld.run.workers.contexts import FunctionContext, ProgramContext, filtered_tails
from multiworld.run.workers.logs import AskedForLogs, AskingLogs, RunLogs
from multiworld.run.workers.process import Cell, message, stop_all
from multiworld.run.workers.ranks import environment, places, prefixes
from multiworld.run.workers.reaper_client import START

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping

    from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
    from torch.distributed.elastic.multiprocessing import LogsSpecs

    from multiworld.run.events import Happening, Happenings
    from multiworld.run.nodes.interface import NodeEvent, Nodes
    from multiworld.run.nodes.slots import Seating
    from multiworld.run.signals import Wake
    from multiworld.run.workers.ranks import Place
    from multiworld.run.workers.reaper_client import Warden
    from multiworld.run.workers.restarts import Restarts
    from multiworld.run.worldsfile.spec import WorldsPlan

__all__ = ["GROUP_HINT", "Outfit", "WorkerAgent"]

GROUP_HINT = (
    "If the workers share torch's default group (init_process_group), use --restart group: that group cannot take"
    " a worker back that was started again alone."
)
"""What is said where a worker failed in a run in which no worker has reported a world."""


@dataclass
class Outfit:
    """What an agent works with.

    Attributes:
        nodes: the others.
        restarts: decides on failed workers.
        happenings: what happens is said here.
        warden: ends the workers when the launcher cannot.
        wake: what the loop sleeps on.
        signals: that end the run.
        grace: seconds between the signal and SIGKILL.
        plan: of the worlds file.
        environment: for every worker.
    """

    nodes: Nodes
    restarts: Restarts
    happenings: Happenings
    warden: Warden
    wake: Wake
    signals: tuple[Signals, ...]
    grace: float
    plan: WorldsPlan | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


class WorkerAgent(LocalElasticAgent):
    """An agent whose workers fail and restart one by one, under one rendezvous.

    Args:
        spec, logs_specs: as for torch's agent.
        outfit: what it works with.
        torch_options: more for torch's agent.

    Attributes:
        seating: where this node sits; None before the first rendezvous.
        reason: why the run ended, if not because a worker failed; for people.
    """

    def __init__(self, spec: WorkerSpec, logs_specs: LogsSpecs, outfit: Outfit, **torch_options: Any) -> None:
        super().__init__(spec, logs_specs, **torch_options)
        self._outfit = outfit
        self._filters: tuple[list[str], list[str]] = (
            list(getattr(spec, "duplicate_stdout_filters", None) or []),
            list(getattr(spec, "duplicate_stderr_filters", None) or []),
        )
        self._logs = RunLogs(logs_specs, self._filters)
        self._places: dict[int, Place] = {}
        self._envs: dict[int, dict[str, str]] = {}
        self._cells: dict[int, Cell] = {}
        self._due: dict[int, float] = {}
        self._values: dict[int, Any] = {}
        self._retired: list[threading.Thread] = []
        self._tick = 0.0
        self._done = False
        self._said_group = False
        self._worlds = False
        self._failed = ""
        self.seating: Seating | None = None
        self.reason = ""
        outfit.happenings.listen(self._heard)

    def _heard(self, happening: Happening) -> None:
        # In the control server's thread.
        self._worlds = self._worlds or isinstance(happening, WorldChanged)
        if isinstance(happening, WorldChanged) and happening.state == "active":
            cell = self._cells.get(happening.rank)
            if cell is not None:
                cell.came_up = True

    # before the workers start

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        spec = worker_group.spec
        group: Any = worker_group  # torch declares what it fills in later as None
        with self.record_duration("RENDEZVOUS"):
            info = spec.rdzv_handler.next_rendezvous()
        group.store = info.store
        meeting: Any = info.bootstrap_store_info
        group.master_addr = spec.master_addr or meeting.master_addr
        group.master_port = spec.master_port or meeting.master_port
        with self.record_duration("ASSIGN_WORKER_RANKS"):
            self._take(self._outfit.nodes.settle(info))

    def _take(self, seating: Seating) -> None:
        """Note where this node sits."""
        group: Any = self._worker_group
        self.seating = seating
        group.group_rank = seating.seat
        group.group_world_size = seating.nodes
        if seating.size is not None:
            group.spec.local_world_size = seating.size  # torch puts it into the workers' environment
        found = places(seating, group.spec.local_world_size, group.spec.role, self._outfit.plan)
        self._places = {place.rank: place for place in found}
        group.workers = [
            Worker(place.local_rank, place.rank, place.role_rank, place.world_size, place.role_size)
            for place in found
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # Before there is a worker a signal does what it does to any program.
        self._outfit.wake.listen(self._outfit.signals)
        if self._places:
            self._envs = self._deal(worker_group)
            self._logs.prepare(self._envs)
        return {place.local_rank: self._start(place) for place in self._places.values()}

    def _deal(self, worker_group: WorkerGroup) -> dict[int, dict[str, str]]:
        """Have torch make the workers' environments, as it does for all of them at once."""
        logs_specs, self._logs_specs = self._logs_specs, AskingLogs()
        try:
            super()._start_workers(worker_group)
        except AskedForLogs as asked:
            return asked.envs
        finally:
            self._logs_specs = logs_specs
        raise RunError(
            "torch started workers without asking where their logs go",
            rule="This version of torch.distributed.elastic is not known to the launcher",
            next_step="Use --restart group, and report it",
        )

    def _setup_local_watchdog(self, envs: dict[int, dict[str, str]]) -> None:
        if self._worker_watchdog is None:
            super()._setup_local_watchdog(envs)

    def _setup_healthcheck(self) -> None:
        if self._health_check_server is None:
            super()._setup_healthcheck()

    # one worker

    def _start(self, place: Place) -> int:
        spec, outfit = self._worker_group.spec, self._outfit
        attempt = outfit.restarts.attempt(place.rank)
        token = outfit.warden.token()
        env = {
            **self._envs[place.local_rank],
            **environment(place, attempt),
            **outfit.environment,
            START: token,
        }
        dest = self._logs.next_start(place.local_rank)
        heads = prefixes(self._log_line_prefix_template, place)
        args = tuple(macros.substitute(list(spec.args), str(place.local_rank)))
        more: dict[str, Any] = {
            "local_rank": place.local_rank,
            "prefixes": heads,
            "numa_options": getattr(spec, "numa_options", None),
            "tails": filtered_tails(place.role, dest, heads, self._filters, self._logs.filtered),
        }
        context: ProgramContext | FunctionContext
        if isinstance(spec.entrypoint, str):
            context = ProgramContext(place.role, spec.entrypoint, args, env, dest, **more)
        else:
            more |= {"start_method": self._start_method, "signals": outfit.wake.listening}
            function: Any = spec.entrypoint
            context = FunctionContext(place.role, function, args, env, dest, **more)
        try:
            context.start()
        except Exception:
            context.close()
            raise
        cell = self._cells[place.rank] = Cell(context, place.rank, place.local_rank, attempt)
        outfit.warden.started(token, cell.pid, leads=cell.leads)
        if cell.descriptor is not None:
            outfit.wake.add(cell.descriptor)
        outfit.happenings.publish(
            WorkerStarted(
                time.time(), place.rank, place.role, place.role_rank, place.local_rank, cell.pid, attempt
            )
        )
        return cell.pid

    def _start_again(self, rank: int) -> None:
        place = self._places[rank]
        worker = next(w for w in self._worker_group.workers if w.global_rank == rank)
        worker.id = self._start(place)
        self._record("START", worker)

    def _record(self, state: str, worker: Worker) -> None:
        event = self._construct_event(state, EventSource.WORKER, worker)
        events.record(event, getattr(self._worker_group.spec, "event_log_handler", "null"))

    def _retire(self, cell: Cell) -> None:
        if cell.descriptor is not None:
            self._outfit.wake.remove(cell.descriptor)
        self._outfit.warden.gone(cell.pid)
        self._retired = [thread for thread in self._retired if thread.is_alive()]
        self._retired.append(cell.close())

    def _over(self, cell: Cell) -> RunResult | None:
        """A worker's process has ended; return the run's result if that is its end as well."""
        outfit, rank = self._outfit, cell.rank
        lived = time.monotonic() - cell.started
        ended = cell.collect()
        del self._cells[rank]
        now = time.time()
        if ended.failure is None:
            self._values[rank] = ended.value
            outfit.happenings.publish(WorkerEnded(now, rank, cell.pid))
            return None
        said = message(ended)
        outfit.happenings.publish(WorkerFailed(now, rank, cell.pid, cell.attempt, ended.exitcode or 0, said))
        restart = outfit.restarts.failed(rank, came_up=cell.came_up or lived >= UP_AFTER)
        if restart is None:
            place = self._places[rank]
            self._failed = f"rank {rank} ({place.role}:{place.role_rank}) failed: {said}"
            return RunResult(state=WorkerState.FAILED, failures={rank: ended.failure})
        self._remaining_restarts = min(self._remaining_restarts, restart.left)
        self._due[rank] = time.monotonic() + restart.delay
        outfit.happenings.publish(WorkerRestarting(now, rank, restart.attempt, restart.delay, restart.left))
        if not (self._worlds or self._said_group) and self._places[rank].world_size > 1:
            self._said_group = True
            self._note(logging.WARNING, GROUP_HINT)
        return None

    # the loop

    def _invoke_run(self, role: str = "") -> RunResult:
        del role
        group = self._worker_group
        self._initialize_workers(group)
        while True:
            number = self._outfit.wake.signalled()
            if number is not None:
                raise SignalException(f"the launcher got {number.name}", sigval=number)
            result = self._step()
            if result is not None:
                group.state = result.state
                return result
            self._outfit.wake.wait(self._until())

    def _until(self) -> float:
        return min([self._tick, *self._due.values()]) - time.monotonic()

    def _step(self) -> RunResult | None:
        nodes = self._outfit.nodes
        now = time.monotonic()
        result = None
        if now >= self._tick:
            self._tick = now + self._worker_group.spec.monitor_interval
            result = self._at_interval()
        for event in nodes.poll():
            result = result or self._on(event)
        over = [cell for cell in self._cells.values() if cell.ended()]
        for cell in over:
            result = self._over(cell) or result
        if result is None:
            for rank in [rank for rank, at in self._due.items() if at <= time.monotonic()]:
                del self._due[rank]
                self._start_again(rank)
        for cell in over:  # the replacement comes first
            self._retire(cell)
        if self._places and len(self._values) == len(self._places) and not self._done:
            self._done = True
            nodes.done()
        return result

    def _at_interval(self) -> RunResult | None:
        outfit, role = self._outfit, self._worker_group.spec.role
        outfit.nodes.watch()
        if outfit.warden.check():
            self._note(
                logging.WARNING, "the program that ends orphaned workers had died and was started again"
            )
        put_metric(f"workers.{role}.remaining_restarts", self._remaining_restarts)
        put_metric(f"workers.{role}.healthy", 1)
        limit = getattr(self, "_uninterruptible_state_timeout", 0)
        for cell in self._cells.values() if limit > 0 else ():
            stuck = self._update_uninterruptible_dwell(cell.pid, role, limit)
            if stuck is not None and stuck >= limit:
                # It holds a device that a replacement would need: torch's agent ends as well.
                self.reason = self._failed = (
                    f"rank {cell.rank} (pid {cell.pid}) has been in uninterruptible sleep for {stuck:.0f} s"
                )
                return RunResult(state=WorkerState.FAILED)
        return None

    def _on(self, event: NodeEvent) -> RunResult | None:
        """Do what the other nodes make necessary; return the run's result if they end it."""
        match event:
            case Over(lost=()):
                return RunResult(state=WorkerState.SUCCEEDED, return_values=dict(self._values))
            case Over(lost=lost):
                self.reason = (
                    f"nobody took the place of ranks {', '.join(map(str, lost))}, whose node was lost"
                )
                return RunResult(state=WorkerState.FAILED)
            case Stop(reason=reason):
                self.reason = reason
                return RunResult(state=WorkerState.FAILED)
            case Seated(seating=seating):
                self._seated(seating)
            case Lost():
                pass  # it is in the log; the seat is the nodes' business
        return None

    def _seated(self, seating: Seating) -> None:
        before = None if self.seating is None else (self.seating.seat, self.seating.base_rank)
        if before == (seating.seat, seating.base_rank):
            self.seating = seating
            return
        # Whoever has these ranks next may start at once.
        self._end(Signals.SIGKILL, 0.0)
        self._take(seating)
        self._values.clear()
        self._done = False
        for local_rank, pid in self._start_workers(self._worker_group).items():
            worker = self._worker_group.workers[local_rank]
            worker.id = pid
            self._record("START", worker)

    def _note(self, level: int, text: str) -> None:
        self._outfit.happenings.publish(Note(time.time(), level, text))

    # the end

    def _end(self, number: Signals, grace: float, *, leave: bool = False) -> None:
        """End all workers.

        Args:
            number: the first signal.
            grace: seconds until SIGKILL.
            leave: tell the other nodes meanwhile.
        """
        outfit = self._outfit
        self._due.clear()
        cells, self._cells = dict(self._cells), {}

        def meanwhile() -> None:
            if leave:
                outfit.nodes.close(self._failed)

        done = stop_all(cells.values(), number, grace, outfit.wake, meanwhile=meanwhile)
        for rank, ended in done.items():
            cell = cells[rank]
            outfit.happenings.publish(WorkerStopped(time.time(), rank, cell.pid, ended.exitcode))
            if ended.exitcode is None and not cell.ended():
                self._note(logging.ERROR, f"rank {rank} (pid {cell.pid}) is still there after SIGKILL")
            self._retire(cell)

    def _shutdown(self, death_sig: Signals = Signals.SIGTERM, *_: Any, **__: Any) -> None:
        self._end(death_sig, self._outfit.grace, leave=True)
        super()._shutdown(death_sig)
        for thread in self._retired:
            thread.join(5.0)
        self._logs.close()
