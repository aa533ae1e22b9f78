"""``--restart group``: torch's agent with its own loop, which also publishes events and leaves no orphans."""

from __future__ import annotations

import contextlib
import os
import time
from signal import Signals
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException

from multiworld.run.errors import starting_workers
from multiworld.run.events import (
    SlotTaken,
    WorkerEnded,
    WorkerFailed,
    WorkerRestarting,
    WorkerStarted,
    WorkerStopped,
)
from multiworld.run.signals import Arrivals, repeats_ignored
from multiworld.run.workers.logs import log_files
from multiworld.run.workers.process import ProcessExit, message
from multiworld.run.workers.reaper_client import START

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec
    from torch.distributed.elastic.multiprocessing import LogsSpecs

    from multiworld.run.events import EventBus, RunEvent
    from multiworld.run.workers.reaper_client import ReaperClient
    from multiworld.run.worldsfile.worlds_plan import WorldsPlan

__all__ = ["GroupAgent"]


class GroupAgent(LocalElasticAgent):
    """Torch's own agent and loop: when one worker fails, all are stopped and started again.

    Args:
        spec, logs_specs: as for torch's agent.
        bus: gets the run's events.
        reaper: ends the workers if the launcher is killed.
        environment: for every worker.
        signals: that torch's handlers end the run for.
        grace: seconds between the signal to workers and SIGKILL.
        plan: of the worlds file.
        credentials: as `AgentContext.credentials`.
        torch_options: more for torch's agent.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        *,
        bus: EventBus,
        reaper: ReaperClient,
        environment: Mapping[str, str],
        signals: Sequence[Signals],
        grace: float,
        plan: WorldsPlan | None,
        credentials: Callable[[int, str, int], Mapping[str, str]],
        **torch_options: Any,
    ) -> None:
        super().__init__(spec, logs_specs, **torch_options)
        self._bus = bus
        self._reaper = reaper
        self._more = dict(environment)
        self._signals = tuple(signals)
        self._grace = grace
        self._arrivals = Arrivals()
        self._stopping = False
        self._plan = plan
        self._credentials = credentials
        self._tokens: dict[int, str] = {}
        self._running: dict[int, int] = {}
        self._slot: tuple[int, int] | None = None

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers until they have ended, as torch's agent does.

        Raises:
            SignalException: one of `signals` came.
        """
        try:
            result: RunResult = super().run(role)
        finally:
            self._arrivals.close()
        return result

    def _heed(self) -> None:
        """Raise for a signal whose exception was lost on its way here.

        Torch's handler raises in the main thread at any point: an ``except Exception`` of logging, of torch
        or of a destructor swallows it there, and the run would go on for ever.
        """
        came = self._arrivals.take(self._signals)
        if came is not None:
            raise SignalException(f"Process {os.getpid()} got signal: {came}", sigval=came)

    @property
    def _attempt(self) -> int:
        return int(self._worker_group.spec.max_restarts - self._remaining_restarts)

    def _role(self, worker: Worker) -> tuple[str, int, int]:
        if self._plan is None:
            return self._worker_group.spec.role, worker.role_rank, worker.role_world_size
        member = self._plan.member_at(worker.global_rank)
        return member.role, member.index, self._plan.role_size(member.role)

    def _setup_local_watchdog(self, envs: dict[int, dict[str, str]]) -> None:
        super()._setup_local_watchdog(envs)
        # The only method that torch calls with the environments before it starts the workers.
        for worker in self._worker_group.workers:
            token = self._tokens[worker.local_rank] = self._reaper.token()
            env = envs[worker.local_rank]
            role, index, size = self._role(worker)
            env |= {**self._more, **self._credentials(worker.global_rank, role, index), START: token}
            if self._plan is not None:
                env |= {"ROLE_NAME": role, "ROLE_RANK": str(index), "ROLE_WORLD_SIZE": str(size)}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        group: Any = worker_group  # torch declares what it fills in later as None
        slot = (int(group.group_rank), int(group.group_world_size))
        if slot != self._slot:
            self._slot = slot
            self._bus.publish(SlotTaken(time.time(), *slot))
        self._arrivals.open()  # torch sets its handlers in there
        with starting_workers():
            pids: dict[int, Any] = super()._start_workers(worker_group)
        self._give_grace()
        for worker in worker_group.workers:
            pid = int(pids[worker.local_rank])
            leads = False
            with contextlib.suppress(ProcessLookupError):
                leads = os.getpgid(pid) == pid
            self._reaper.started(self._tokens.pop(worker.local_rank), pid, leads=leads)
            self._running[worker.global_rank] = pid
            role, index, _ = self._role(worker)
            local, context = worker.local_rank, self._pcontext
            files = ("", "") if context is None else log_files(context, local)
            self._bus.publish(
                WorkerStarted(time.time(), worker.global_rank, role, index, local, pid, self._attempt, *files)
            )
        return pids

    def _give_grace(self) -> None:
        """Have torch's context end workers with this run's grace period, not with its own of 30 s.

        torch passes the period on only when the run ends, not after a failure, nor for a restart.
        """
        context: Any = self._pcontext
        close, grace = context.close, self._grace

        def with_grace(death_sig: Signals | None = None, timeout: float = 0.0) -> None:
            del timeout
            close(death_sig, grace)

        context.close = with_grace

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._heed()
        self._reaper.check()
        result: RunResult = super()._monitor_workers(worker_group)
        now = time.time()
        if result.state == WorkerState.FAILED:
            first = min(result.failures.values(), key=lambda failure: failure.timestamp)
            for rank, failure in result.failures.items():
                said = message(ProcessExit(failure.exitcode, failure))
                event: RunEvent = WorkerFailed(now, rank, failure.pid, self._attempt, failure.exitcode, said)
                if failure is not first and failure.exitcode == -Signals.SIGTERM:
                    # torch's context ended it because of the first failure.

                    event = WorkerStopped(now, rank, failure.pid, failure.exitcode)
                self._bus.publish(event)
                self._forget(rank)
        elif result.state == WorkerState.SUCCEEDED:
            for rank, pid in list(self._running.items()):
                self._bus.publish(WorkerEnded(now, rank, pid))
                self._forget(rank)
        self._heed()  # the next step may take long: a rendezvous with other nodes, or a restart
        return result

    def _forget(self, rank: int) -> None:
        pid = self._running.pop(rank, None)
        if pid is not None:
            self._reaper.gone(pid)

    def _stopped(self) -> None:
        for rank, pid in list(self._running.items()):
            self._bus.publish(WorkerStopped(time.time(), rank, pid, None))
            self._forget(rank)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        for worker in worker_group.workers:
            self._bus.publish(
                WorkerRestarting(
                    time.time(), worker.global_rank, self._attempt, 0.0, self._remaining_restarts
                )
            )
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup, *more: Any, **options: Any) -> None:
        self._stopping = True
        try:
            super()._stop_workers(worker_group, *more, **options)
        finally:
            self._stopping = False
        self._stopped()
        self._heed()  # the next step of a restart is a rendezvous, which may wait for other nodes

    def _shutdown(self, death_sig: Signals = Signals.SIGTERM, *more: Any, **options: Any) -> None:
        number = death_sig
        while True:
            try:
                with contextlib.nullcontext() if self._stopping else repeats_ignored(death_sig):
                    super()._shutdown(number, *more, **options)
                break
            except SignalException:
                if self._stopping:  # for a restart: it is the first one, and torch's loop ends the run for it
                    raise
                number = Signals.SIGKILL  # a further one, while they have their time: it is over
        self._stopped()
