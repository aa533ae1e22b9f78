"""``--restart worker``: torch's agent with workers that restart one by one, while the others run on."""

from __future__ import annotations

import inspect
import logging
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from signal import Signals
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import (
    TORCHELASTIC_TIMER_FILE,
    LocalElasticAgent,
)
from torch.distributed.elastic.events.api import EventSource
from torch.distributed.elastic.metrics.api import put_metric
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.utils.api import macros

from multiworld.run.errors import RunError, starting_workers
from multiworld.run.events import (
    Note,
    WorkerEnded,
    WorkerFailed,
    WorkerRestarting,
    WorkerStarted,
    WorkerStopped,
    WorldChanged,
)
from multiworld.run.nodes.handlers import first_rendezvous
from multiworld.run.nodes.interface import Lost, Over, Reassigned, Stop
from multiworld.run.view.state import UP_AFTER
from multiworld.run.workers.contexts import ForkedContext, FunctionContext, ProgramContext, filtered_tails
from multiworld.run.workers.logs import AskedForLogs, AskingLogs, RunLogs, log_files
from multiworld.run.workers.node_events import NodeEvents, same_ranks
from multiworld.run.workers.process import WorkerProcess, message, stop_all
from multiworld.run.workers.ranks import environment, prefixes, worker_ranks
from multiworld.run.workers.reaper_client import START
from multiworld.run.workers.retirements import Retirements
from multiworld.run.workers.scaler import DRAIN_SIGNAL, Crew, Request, Scaler

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from multiworld.run.events import EventBus, RunEvent
    from multiworld.run.nodes.interface import NodeEvent, Nodes
    from multiworld.run.nodes.slots import Assignment
    from multiworld.run.signals import Wake
    from multiworld.run.workers.fork_client import ForkClient
    from multiworld.run.workers.ranks import WorkerRank
    from multiworld.run.workers.reaper_client import ReaperClient
    from multiworld.run.workers.restarts import Restarts
    from multiworld.run.worldsfile.worlds_plan import WorldsPlan

__all__ = ["GROUP_HINT", "AgentContext", "WorkerAgent"]

GROUP_HINT = (
    "If the workers share torch's default group (init_process_group), use --restart group: that group cannot"
    " take a worker back that was started again alone."
)
"""Hint after the first failure of a run in which no worker has reported a world."""

IDLE_HINT = (
    "all workers of this node were retired: it keeps its seat, and waits for m8d-run scale, or for the end of"
    " the run"
)
"""Note of a launcher that has a seat and no workers."""

# Torch 2.4 and 2.6 else close the rendezvous with the agent: no node could take the place of one that leaves.
_of_shutdown = inspect.signature(LocalElasticAgent._shutdown).parameters  # noqa: SLF001  (it is overridden)
_KEEPS_OPEN: dict[str, Any] = {"is_restart": True} if "is_restart" in _of_shutdown else {}


def _with(result: RunResult | None, another: RunResult | None) -> RunResult | None:
    """Return both results of one turn as one: of failures in the same second the first listed counts."""
    if result is None or another is None or not result.is_failed():
        return another or result
    return RunResult(state=result.state, failures={**result.failures, **another.failures})


@dataclass
class AgentContext:
    """Objects and settings that an agent works with.

    Attributes:
        nodes: the other nodes.
        restarts: decides on failed workers.
        bus: gets the run's events.
        reaper: ends the workers if the launcher is killed.
        wake: waits for descriptors, signals and the time of the loop.
        signals: that end the run.
        grace: seconds between the signal and SIGKILL.
        drain: seconds that workers have to retire when the launcher gets SIGTERM; 0: they get it at once.
        plan: of the worlds file.
        environment: for every worker.
        credentials: returns more of it for a worker that is about to start, by rank, role and rank in it.
        commands: requests to start or retire workers, from other threads, which then rouse `wake`.
        tell_retiring: tells the workers of these ranks, and no others, that they retire.
        forks: forks workers that have modules imported; None: each worker is a program that starts anew.
    """

    nodes: Nodes
    restarts: Restarts
    bus: EventBus
    reaper: ReaperClient
    wake: Wake
    signals: tuple[Signals, ...]
    grace: float
    drain: float = 0.0
    plan: WorldsPlan | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    credentials: Callable[[int, str, int], Mapping[str, str]] = lambda *_: {}
    commands: SimpleQueue[Request] = field(default_factory=SimpleQueue)
    tell_retiring: Callable[[Iterable[int]], None] = lambda _: None
    forks: ForkClient | None = None


class WorkerAgent(LocalElasticAgent):
    """An agent whose workers fail and restart one by one, under one rendezvous.

    Args:
        spec, logs_specs: as for torch's agent.
        context: objects and settings that it works with.
        torch_options: more for torch's agent.

    Attributes:
        assignment: of this node; None before the first rendezvous.
        reason: why the run ended, if not because a worker failed; for people.
        alone: whether only this node ends, and the run goes on without it.
    """

    def __init__(
        self, spec: WorkerSpec, logs_specs: LogsSpecs, context: AgentContext, **torch_options: Any
    ) -> None:
        super().__init__(spec, logs_specs, **torch_options)
        self._context = context
        self._filters: tuple[list[str], list[str]] = (
            list(getattr(spec, "duplicate_stdout_filters", None) or []),
            list(getattr(spec, "duplicate_stderr_filters", None) or []),
        )
        self._logs = RunLogs(logs_specs, self._filters, spec.local_world_size)
        self._envs: dict[int, dict[str, str]] = {}
        self._timer_file: dict[str, str] = {}
        self._crew = Crew(Retirements(context.grace))
        self._scaler = Scaler(self._crew, context.plan, context.bus, context.tell_retiring, self._start_again)
        self._retired: list[threading.Thread] = []
        self._events = NodeEvents(context.nodes)
        self._tick = 0.0
        self._done = False
        self._idle: bool | None = False  # as the other nodes were told; None: not since this seat was taken
        self._said_group = False
        self._worlds = False
        self._failed = ""
        self.assignment: Assignment | None = None
        self.reason = ""
        self.alone = False
        context.bus.subscribe(self._heard)

    def _heard(self, event: RunEvent) -> None:
        # In the control server's thread.
        self._worlds = self._worlds or isinstance(event, WorldChanged)
        if isinstance(event, WorldChanged) and event.state == "active":
            process = self._crew.processes.get(event.rank)
            if process is not None:
                process.came_up = True

    # before the workers start

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        spec = worker_group.spec
        group: Any = worker_group  # torch declares what it fills in later as None
        with self.record_duration("RENDEZVOUS"):
            info = first_rendezvous(spec.rdzv_handler, partial(self._note, logging.WARNING))
        group.store = info.store
        bootstrap: Any = info.bootstrap_store_info
        group.master_addr = spec.master_addr or bootstrap.master_addr
        group.master_port = spec.master_port or bootstrap.master_port
        with self.record_duration("ASSIGN_WORKER_RANKS"):
            self._take(self._context.nodes.settle(info))

    def _take(self, assignment: Assignment) -> None:
        """Adopt an assignment: torch's worker group gets the workers of this node's slot."""
        group: Any = self._worker_group
        self.assignment = assignment
        group.group_rank = assignment.slot
        group.group_world_size = assignment.nodes
        if assignment.size is not None:
            group.spec.local_world_size = assignment.size  # torch puts it into the workers' environment
        found = worker_ranks(assignment, group.spec.local_world_size, group.spec.role, self._context.plan)
        self._crew.places = {place.rank: place for place in found}
        self._crew.vacant = assignment.vacant
        self._crew.wanted = set(self._crew.places if assignment.starting is None else assignment.starting)
        group.workers = [
            Worker(place.local_rank, place.rank, place.role_rank, place.world_size, place.role_size)
            for place in found
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # Signals are handled from the first worker on; before that they have Python's default effect.
        self._context.wake.listen((*self._context.signals, *self._scaler.signals))
        if self._crew.places:
            self._envs = self._torch_environments(worker_group)
            with starting_workers():
                self._logs.prepare(self._envs)
        wake, ends, forks = self._context.wake, self._context.signals, self._context.forks
        if forks is not None:
            forks.wait_ready(lambda: wake.came(ends) or self._events.void(self.assignment))
            if wake.came(ends):
                return {}  # the loop ends the run
        if self._events.void(self.assignment):
            return {}  # the loop handles what the other nodes said: this slot may be another node's
        places = [each for each in self._crew.places.values() if each.rank in self._crew.wanted]
        with starting_workers():
            return {place.local_rank: self._start(place) for place in places}

    def _torch_environments(self, worker_group: WorkerGroup) -> dict[int, dict[str, str]]:
        """Return the workers' environments as torch makes them, which it does for all workers at once."""
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
            self._timer_file = {key: envs[0][key] for key in (TORCHELASTIC_TIMER_FILE,) if key in envs[0]}
        else:  # it serves the workers of a seat that is taken again, too
            for env in envs.values():
                env.update(self._timer_file)

    def _setup_healthcheck(self) -> None:
        if self._health_check_server is None:
            super()._setup_healthcheck()

    # one worker

    def _start(self, place: WorkerRank) -> int:
        context = self._context
        attempt = context.restarts.attempt(place.rank)
        env = {
            **self._envs[place.local_rank],
            **environment(place, attempt),
            **context.environment,
            **context.credentials(place.rank, place.role, place.role_rank),
        }
        dest = self._logs.next_start(place.local_rank)
        token = context.reaper.token()
        try:
            started = self._begin(place, {**env, START: token}, dest)
        except Exception:
            context.reaper.not_started(token)
            raise
        process = self._crew.processes[place.rank] = WorkerProcess(
            started, place.rank, place.local_rank, attempt
        )
        context.reaper.started(token, process.pid, leads=process.leads)
        if process.descriptor is not None:
            context.wake.add(process.descriptor)
        context.bus.publish(
            WorkerStarted(
                time.time(),
                place.rank,
                place.role,
                place.role_rank,
                place.local_rank,
                process.pid,
                attempt,
                *log_files(dest),
            )
        )
        if isinstance(started, ForkedContext):  # its first word comes after the news that it was started
            self._released(started, place.rank)
        return process.pid

    def _begin(
        self, place: WorkerRank, env: dict[str, str], dest: LogsDest
    ) -> ProgramContext | FunctionContext:
        """Start a worker's process, and the readers of its output."""
        spec, context = self._worker_group.spec, self._context
        heads = prefixes(self._log_line_prefix_template, place)
        args = tuple(macros.substitute(list(spec.args), str(place.local_rank)))
        more: dict[str, Any] = {
            "local_rank": place.local_rank,
            "prefixes": heads,
            "numa_options": getattr(spec, "numa_options", None),
            "tails": filtered_tails(place.role, dest, heads, self._filters, self._logs.filtered),
        }
        started: ProgramContext | FunctionContext
        if isinstance(spec.entrypoint, str) and context.forks is not None:
            more["forks"] = context.forks
            started = ForkedContext(place.role, spec.entrypoint, args, env, dest, **more)
        elif isinstance(spec.entrypoint, str):
            started = ProgramContext(place.role, spec.entrypoint, args, env, dest, **more)
        else:
            more |= {"start_method": self._start_method, "signals": context.wake.listening}
            function: Any = spec.entrypoint
            started = FunctionContext(place.role, function, args, env, dest, **more)
        try:
            started.start()
        except Exception:
            started.close()
            raise
        return started

    def _released(self, started: ForkedContext, rank: int) -> None:
        if started.forked is not None:
            started.forked.go()
        else:
            self._note(logging.WARNING, f"--preload: rank {rank} starts without it: {started.refused}")

    def _start_again(self, rank: int) -> None:
        place = self._crew.places[rank]
        worker = next(w for w in self._worker_group.workers if w.global_rank == rank)
        worker.id = self._start(place)
        self._record("START", worker)

    def _record(self, state: str, worker: Worker) -> None:
        event = self._construct_event(state, EventSource.WORKER, worker)
        events.record(event, getattr(self._worker_group.spec, "event_log_handler", "null"))

    def _retire(self, process: WorkerProcess) -> None:
        if process.descriptor is not None:
            self._context.wake.remove(process.descriptor)
        self._context.reaper.gone(process.pid)
        self._retired = [thread for thread in self._retired if thread.is_alive()]
        self._retired.append(process.close())

    def _over(self, process: WorkerProcess) -> RunResult | None:
        """Handle the end of a worker's process; return the run's result if that ends the run."""
        context, rank = self._context, process.rank
        lived = time.monotonic() - process.started
        ended = process.collect()
        del self._crew.processes[rank]
        now = time.time()
        if rank in self._crew.retirements:
            self._scaler.has_retired(process, ended)
            return None
        if ended.failure is None:
            self._crew.values[rank] = ended.value
            context.bus.publish(WorkerEnded(now, rank, process.pid))
            return None
        said = message(ended)
        context.bus.publish(WorkerFailed(now, rank, process.pid, process.attempt, ended.exitcode or 0, said))
        came_up = process.came_up or lived >= UP_AFTER
        return self._failed_once(rank, f"failed: {said}", {rank: ended.failure}, came_up=came_up)

    def _retry(self, rank: int) -> RunResult | None:
        """Start a worker again whose time has come; return the run's result if that ends the run."""
        try:
            self._start_again(rank)
        except (
            OSError,
            RuntimeError,
            RunError,
        ) as error:  # the host has too little left, perhaps for a moment
            said = f"could not be started: {type(error).__name__}: {error}"
            self._note(logging.WARNING, f"rank {rank} {said}")
            return self._failed_once(rank, said, {}, came_up=False)
        return None

    def _failed_once(
        self, rank: int, said: str, failures: dict[int, ProcessFailure], *, came_up: bool
    ) -> RunResult | None:
        """Have a worker started again that has failed; return the run's result if it may not be."""
        context, now = self._context, time.time()
        restart = context.restarts.failed(rank, came_up=came_up)
        if restart is None:
            place = self._crew.places[rank]
            if self._scaler.goes_on_without(rank):
                left = len(self._crew.wanted)
                self._note(
                    logging.WARNING, f"rank {rank} is not started again: the run goes on with {left} workers"
                )
                return None
            failed = f"rank {rank} ({place.role}:{place.role_rank}) {said}"
            self._failed = self._failed or failed  # of several in one turn the first
            if not failures:
                self.reason = self.reason or failed
            return RunResult(state=WorkerState.FAILED, failures=failures)
        self._remaining_restarts = min(self._remaining_restarts, restart.left)
        self._crew.due[rank] = time.monotonic() + restart.delay
        context.bus.publish(WorkerRestarting(now, rank, restart.attempt, restart.delay, restart.left))
        if not (self._worlds or self._said_group) and self._crew.places[rank].world_size > 1:
            self._said_group = True
            self._note(logging.WARNING, GROUP_HINT)
        return None

    # the loop

    def _invoke_run(self, role: str = "") -> RunResult:
        del role
        group = self._worker_group
        self._initialize_workers(group)
        while True:
            number = self._context.wake.signalled()
            if number == DRAIN_SIGNAL and number not in self._context.signals:
                self._scaler.drain()
            elif number is not None and not self._scaler.drains_first(number, self._context.drain):
                raise SignalException(f"the launcher got {number.name}", sigval=number)
            result = self._step()
            if result is not None:
                group.state = result.state
                # torch's agent records an event for each of them.
                group.workers = [each for each in group.workers if each.global_rank in self._crew.wanted]
                return result
            if self._scaler.drained():
                if self._scaler.fixed_ended:  # else another node would get their ranks, and do the work again
                    self._context.nodes.done()
                raise SignalException("the launcher got SIGTERM", sigval=Signals.SIGTERM)
            self._wait()

    def _wait(self) -> None:
        """Sleep until there is something to do."""
        with self._woken_by_nodes():
            self._context.wake.wait(self._until())

    @contextmanager
    def _woken_by_nodes(self) -> Iterator[None]:
        """Wake for events of the other nodes: only while they are read next."""
        wake, others = self._context.wake, self._context.nodes.fileno()
        wake.add(others)
        try:
            yield
        finally:
            wake.remove(others)

    def _until(self) -> float:
        first = min(
            [self._tick, self._crew.retirements.at(), self._scaler.drain_end, *self._crew.due.values()]
        )
        return first - time.monotonic()

    def _step(self) -> RunResult | None:
        context, now = self._context, time.monotonic()
        result = None
        if now >= self._tick:
            self._tick = now + self._worker_group.spec.monitor_interval
            result = self._at_interval()
        while (event := self._events.take()) is not None:
            result = result or self._on(event)
        over = [process for process in self._crew.processes.values() if process.ended()]
        stood = context.reaper.ended_workers()  # after the look at the processes: it is said before they end
        if stood is not None:
            over = []  # no failures
            if result is None:
                self._stood_still(stood)
        for process in over:
            result = _with(result, self._over(process))
        if result is None:
            for rank in [rank for rank, at in self._crew.due.items() if at <= time.monotonic()]:
                del self._crew.due[rank]
                result = _with(result, self._retry(rank))
            self._obey()
            self._scaler.press()
        for process in over:  # the replacement comes first
            self._retire(process)
        if not self._scaler.draining:
            self._tell_ended()
        return result

    def _tell_ended(self) -> None:
        """Tell the other nodes that the workers have ended with 0, or were all retired, or are some again."""
        nodes, idle = self._context.nodes, self._crew.idle
        if self._crew.over and not self._done:
            self._done = True
            nodes.done()
        if idle != self._idle:
            self._idle = idle
            nodes.idle(yes=idle)
            if idle:
                self._note(logging.INFO, IDLE_HINT)

    def _obey(self) -> None:
        while not self._context.commands.empty():
            request = self._context.commands.get_nowait()
            there = self.assignment is not None and self.assignment.slot is not None and not self._done
            self._scaler.obey(request, self.assignment.nodes if there and self.assignment is not None else 0)

    def _at_interval(self) -> RunResult | None:
        context, role = self._context, self._worker_group.spec.role
        context.nodes.watch()
        if said := context.reaper.check():
            self._note(logging.WARNING, said)
        if context.forks is not None:
            context.forks.check()
        put_metric(f"workers.{role}.remaining_restarts", self._remaining_restarts)
        put_metric(f"workers.{role}.healthy", 1)
        limit = getattr(self, "_uninterruptible_state_timeout", 0)
        for process in self._crew.processes.values() if limit > 0 else ():
            stuck = self._update_uninterruptible_dwell(process.pid, role, limit)
            if stuck is not None and stuck >= limit:
                # It holds a device that its replacement would need: torch's agent ends the run here too.
                self.reason = self._failed = (
                    f"rank {process.rank} (pid {process.pid}) has been in uninterruptible sleep for "
                    f"{stuck:.0f} s"
                )
                return RunResult(state=WorkerState.FAILED)
        return None

    def _on(self, event: NodeEvent) -> RunResult | None:
        """Handle an event of the other nodes; return the run's result if it ends the run."""
        match event:
            case Over(lost=()):
                return RunResult(state=WorkerState.SUCCEEDED, return_values=dict(self._crew.values))
            case Over(lost=lost):
                self.reason = (
                    f"no node took the place of ranks {', '.join(map(str, lost))}, whose node was lost"
                )
                return RunResult(state=WorkerState.FAILED)
            case Stop(reason=reason, alone=alone):
                self.reason, self.alone = reason, alone
                return RunResult(state=WorkerState.FAILED)
            case Reassigned(assignment=assignment):
                self._reassigned(assignment)
            case Lost():
                pass  # it is in the log; `Nodes` gives the slot away
        return None

    def _reassigned(self, assignment: Assignment) -> None:
        if same_ranks(self.assignment, assignment):
            self.assignment = assignment
            self._crew.vacant = assignment.vacant
            return
        # The next holder of these ranks may start at once.

        self._end(Signals.SIGKILL, 0.0)
        self._tell_stood_still(self._context.reaper.ended_workers())
        self._context.reaper.renew()
        self._take(assignment)
        self._crew.values.clear()
        self._done, self._idle = False, None
        for local_rank, pid in self._start_workers(self._worker_group).items():
            worker = self._worker_group.workers[local_rank]
            worker.id = pid
            self._record("START", worker)

    def _stood_still(self, seconds: float) -> None:
        """Give the seat up: the reaper has ended the workers, for it may be another node's by now.

        Args:
            seconds: for which this launcher stood still; 0: it was only late with the news of a lost seat.
        """
        self._tell_stood_still(seconds)
        if self.assignment is not None:
            self._reassigned(self.assignment.without_slot())
        if seconds:
            self._context.nodes.stood_still()

    def _tell_stood_still(self, seconds: float | None) -> None:
        if seconds:
            self._note(
                logging.WARNING,
                f"this launcher stood still for {seconds:.0f} s or longer: its workers were ended, for "
                "another node may have their ranks",
            )

    def _note(self, level: int, text: str) -> None:
        self._context.bus.publish(Note(time.time(), level, text))

    # the end

    def _end(self, number: Signals, grace: float, *, leave: bool = False) -> None:
        """End all workers.

        Args:
            number: the first signal.
            grace: seconds until SIGKILL.
            leave: leave the other nodes; after the workers, whose ranks are another node's then. A run that
                has failed is over for all: they are told at once.
        """
        context = self._context
        self._scaler.forget()
        processes, self._crew.processes = dict(self._crew.processes), {}

        stop = partial(stop_all, processes.values(), number, grace, context.wake, ends=context.signals)
        if leave and self._failed:
            done = stop(meanwhile=partial(context.nodes.close, self._failed))
        elif leave:
            with self._woken_by_nodes():
                done = stop(hurry=self._lost_seat)
        else:
            done = stop()
        for rank, ended in done.items():
            process = processes[rank]
            context.bus.publish(WorkerStopped(time.time(), rank, process.pid, ended.exitcode))
            if ended.exitcode is None and not process.ended():
                self._note(logging.ERROR, f"rank {rank} (pid {process.pid}) is still there after SIGKILL")
            self._retire(process)
        if leave:
            context.nodes.close(self._failed)

    def _lost_seat(self) -> bool:
        """Whether this node was cut off while its workers end: their ranks are soon another node's."""
        events = self._context.nodes.poll()
        return any(isinstance(each, Reassigned) and each.assignment.slot is None for each in events)

    def _shutdown(self, death_sig: Signals = Signals.SIGTERM, *_: Any, **__: Any) -> None:
        self._end(death_sig, self._context.grace, leave=True)
        super()._shutdown(death_sig, **_KEEPS_OPEN)
        for thread in self._retired:
            thread.join(5.0)
        self._logs.close()
