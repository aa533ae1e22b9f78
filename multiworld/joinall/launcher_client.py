"""Client of the launcher in a worker: fetches the worker's worlds, and the store where they meet."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from multiworld import settings
from multiworld._join.arguments import LAST_CALL, make_plan
from multiworld.errors import MultiworldError, StoreUnreachableError
from multiworld.launched.reports import CONTROL

if TYPE_CHECKING:
    import datetime as dt

    from multiworld._join.arguments import JoinPlan, StateLike
    from multiworld.launched.reports import LauncherReports
    from multiworld.launched.retirement import Retirement

__all__ = ["AssignedWorld", "LauncherClient"]

_LAUNCH = "Run the script with m8d-run --worlds FILE.toml SCRIPT, or use multiworld.join"


@dataclass(frozen=True)
class AssignedWorld:
    """One world of this worker, from the launcher's answer.

    Attributes:
        rank: None where it is assigned: then `seat` is this worker's name, which it keeps.
        size: a number, or "MIN:MAX".
    """

    name: str
    rank: int | None
    size: int | str
    seat: str | None
    last_call: float
    backend: str
    store: str
    served: bool
    timeout: float | None
    hang_timeout: float | None
    device: str | None
    after: tuple[str, ...]

    @classmethod
    def read(cls, said: dict[str, Any], local_rank: str) -> AssignedWorld:
        """Read it from the launcher's answer."""
        device = said.get("device")
        return cls(
            said["name"],
            said["rank"],
            said["world_size"],
            said.get("seat"),
            LAST_CALL if said.get("last_call") is None else said["last_call"],
            said["backend"],
            said["store"],
            bool(said.get("launcher")),
            said.get("timeout"),
            said.get("hang_timeout"),
            device.replace("{local_rank}", local_rank) if device else None,
            tuple(said.get("after", ())),
        )

    def plan(
        self, timeout: float | dt.timedelta | None, gpu: int | None, state: StateLike | None = None
    ) -> JoinPlan:
        """Return the join's plan, with the caller's timeout, if any, current GPU and state.

        Raises:
            InvalidJoinError: a state for a world whose members have ranks, or one that is none.
        """
        made = make_plan(
            self.name,
            self.rank,
            self.size,
            self.store,
            self.backend,
            self.timeout if timeout is None else timeout,
            self.hang_timeout,
            self.device,
            seat=self.seat,
            last_call=self.last_call,
            state=state,
        )
        return replace(
            made, served=self.served, gpu=gpu if made.gpu is not None and gpu is not None else made.gpu
        )


class LauncherClient:
    """The worlds that this process's launcher assigned to it, and the store where they meet.

    Args:
        reports: this process's connection to the launcher.
    """

    def __init__(self, reports: LauncherReports) -> None:
        self._reports = reports
        self._calling = threading.Lock()
        self._assigned: dict[str, AssignedWorld] = {}

    @property
    def retirement(self) -> Retirement:
        """Whether the launcher retires this worker."""
        return self._reports.retirement

    def ask(self, patience: float) -> dict[str, AssignedWorld]:
        """Return this worker's worlds by name, from the launcher's answer; without one, from its last.

        Args:
            patience: seconds to wait for an answer.

        Raises:
            MultiworldError: the launcher has never answered.
        """
        deadline = time.monotonic() + patience
        if not self._calling.acquire(timeout=patience):
            if self._assigned:
                return self._assigned
            raise _refusal("the launcher has not answered yet")
        try:
            answer = self._call(deadline)
            if answer is not None:
                if (error := answer.get("error")) is not None:
                    raise _refusal(str(error))
                local_rank = settings.environment("LOCAL_RANK") or "0"
                told = [AssignedWorld.read(each, local_rank) for each in answer["worlds"]]
                self._assigned = {each.name: each for each in told}
            elif not self._assigned:
                path = settings.environment(CONTROL)
                raise _refusal(f"the launcher at {path} does not answer", "See what the launcher logs")
        finally:
            self._calling.release()
        return self._assigned

    def _call(self, deadline: float) -> dict[str, Any] | None:
        try:
            client = self._reports.connect(deadline)
        except LookupError as exc:
            raise _refusal(f"{exc.args[0]}: this process has no launcher") from exc
        except OSError as exc:
            if self._assigned:
                return None  # it answered before
            path = settings.environment(CONTROL)
            raise _refusal(
                f"the launcher cannot be reached at {path}: {exc.strerror or exc}",
                "See whether the launcher runs, and what removed its socket: it is there until the run's end",
            ) from exc
        return client.ask("worlds", deadline=deadline)

    def store_of(self, plan: JoinPlan) -> Any:
        """Return the present store of a world: the launcher's may have moved since.

        Raises:
            StoreUnreachableError: the launcher has no store.
        """
        store = self._present(plan)
        if store == "":
            raise StoreUnreachableError(
                plan.name,
                f"world {plan.name!r}: the launcher has no store yet",
                rule="Worlds without a store of their own meet at the launcher's",
                next_step="See what the launcher logs",
            )
        return store

    def following(self, plan: JoinPlan) -> JoinPlan:
        """Return the plan of a world that finds the launcher's store also after that has moved."""
        return replace(plan, present=self._address) if plan.served else plan

    def _address(self) -> str:
        client = self._reports.client
        return "" if client is None else client.store

    def moved(self, store: Any, plan: JoinPlan) -> bool:
        """Whether the present store of a world is another than `store`."""
        return bool(self._present(plan) != store)

    def _present(self, plan: JoinPlan) -> Any:
        return self._address() or plan.store if plan.served else plan.store


def _refusal(value: str, next_step: str = _LAUNCH) -> MultiworldError:
    return MultiworldError(
        value,
        rule="join_all joins the worlds of a worlds file, which the launcher gives to its workers",
        next_step=next_step,
    )
