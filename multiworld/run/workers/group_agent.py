"""``--restart group``: torch's agent as it is, which also says what happens and leaves no orphans."""

from __future__ import annotations

import contextlib
import os
import time
from signal import Signals
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException

from multiworld.run.events import (
    SeatTaken,
    WorkerEnded,
    WorkerFailed,
    WorkerRestarting,
    WorkerStarted,
    WorkerStopped,
)
from multiworld.run.signals import Arrivals
from multiworld.run.workers.process import Ended, message
from multiworld.run.workers.reaper_client import START

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec
    from torch.distributed.elastic.multiprocessing import LogsSpecs

    from multiworld.run.events import Happening, Happenings
    from multiworld.run.workers.reaper_client import Warden
    from multiworld.run.worldsfile.spec import WorldsPlan

__all__ = ["GroupAgent"]


class GroupAgent(LocalElasticAgent):
    """Torch's own agent and loop: when one worker fails, all are stopped and started again.

    Args:
        spec, logs_specs: as for torch's agent.
        happenings: what happens is said here.
        warden: ends the workers when the launcher cannot.
        environment: for every worker.
        signals: that torch's handlers end the run for.
        plan: of the worlds file.
        torch_options: more for torch's agent.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        *,
        happenings: Happenings,
        warden: Warden,
        environment: Mapping[str, str],
        signals: Sequence[Signals],
        plan: WorldsPlan | None,
        **torch_options: Any,
    ) -> None:
        super().__init__(spec, logs_specs, **torch_options)
        self._happenings = happenings
        self._warden = warden
        self._more = dict(environment)
        self._signals = tuple(signals)
        self._arrivals = Arrivals()
        self._plan = plan
        self._tokens: dict[int, str] = {}
        self._running: dict[int, int] = {}
        self._seat: tuple[int, int] | None = None

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

        Torch's handler raises in the main thread wherever that is: inside an ``except Exception`` of logging, of
        torch or of a destructor nothing comes of it, and the run would go on for ever.
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
        # The one place where torch hands out the environments before it starts the workers.
        for worker in self._worker_group.workers:
            token = self._tokens[worker.local_rank] = self._warden.token()
            env = envs[worker.local_rank]
            env |= {**self._more, START: token}
            if self._plan is not None:
                role, index, size = self._role(worker)
                env |= {"ROLE_NAME": role, "ROLE_RANK": str(index), "ROLE_WORLD_SIZE": str(size)}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        group: Any = worker_group  # torch declares what it fills in later as None
        seat = (int(group.group_rank), int(group.group_world_size))
        if seat != self._seat:
            self._seat = seat
            self._happenings.publish(SeatTaken(time.time(), *seat))
        self._arrivals.open()  # torch sets its handlers in there
        pids: dict[int, Any] = super()._start_workers(worker_group)
        for worker in worker_group.workers:
            pid = int(pids[worker.local_rank])
            leads = False
            with contextlib.suppress(ProcessLookupError):
                leads = os.getpgid(pid) == pid
            self._warden.started(self._tokens.pop(worker.local_rank), pid, leads=leads)
            self._running[worker.global_rank] = pid
            role, index, _ = self._role(worker)
            self._happenings.publish(
                WorkerStarted(
                    time.time(), worker.global_rank, role, index, worker.local_rank, pid, self._attempt
                )
            )
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._heed()
        self._warden.check()
        result: RunResult = super()._monitor_workers(worker_group)
        now = time.time()
        if result.state == WorkerState.FAILED:
            first = min(result.failures.values(), key=lambda failure: failure.timestamp)
            for rank, failure in result.failures.items():
                said = message(Ended(failure.exitcode, failure))
                happening: Happening = WorkerFailed(
                    now, rank, failure.pid, self._attempt, failure.exitcode, said
                )
                if failure is not first and failure.exitcode == -Signals.SIGTERM:
                    # torch's context had ended it because of the first.
                    happening = WorkerStopped(now, rank, failure.pid, failure.exitcode)
                self._happenings.publish(happening)
                self._forget(rank)
        elif result.state == WorkerState.SUCCEEDED:
            for rank, pid in list(self._running.items()):
                self._happenings.publish(WorkerEnded(now, rank, pid))
                self._forget(rank)
        self._heed()  # what comes now may take long: other nodes, or a restart
        return result

    def _forget(self, rank: int) -> None:
        pid = self._running.pop(rank, None)
        if pid is not None:
            self._warden.gone(pid)

    def _stopped(self) -> None:
        for rank, pid in list(self._running.items()):
            self._happenings.publish(WorkerStopped(time.time(), rank, pid, None))
            self._forget(rank)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        for worker in worker_group.workers:
            self._happenings.publish(
                WorkerRestarting(
                    time.time(), worker.global_rank, self._attempt, 0.0, self._remaining_restarts
                )
            )
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup, *more: Any, **options: Any) -> None:
        super()._stop_workers(worker_group, *more, **options)
        self._stopped()

    def _shutdown(self, death_sig: Signals = Signals.SIGTERM, *more: Any, **options: Any) -> None:
        super()._shutdown(death_sig, *more, **options)
        self._stopped()
