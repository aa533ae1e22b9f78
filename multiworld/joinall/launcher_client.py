"""Client of the launcher in a worker: fetches the worker's worlds and store, reports the worlds' states."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from multiworld import settings
from multiworld._c10d.waiter_pool import pool
from multiworld._join.arguments import LAST_CALL, make_plan
from multiworld._net.launcher_connection import ControlClient
from multiworld.errors import MultiworldError, StoreUnreachableError
from multiworld.events import (
    MemberBusy,
    WorldActive,
    WorldBroken,
    WorldClosed,
    WorldJoinFailed,
    WorldJoining,
    WorldStateReceived,
    WorldUnblocked,
    bus,
)
from multiworld.joinall.retirement import Retirement
from multiworld.status import fitting, process_status, waits_of

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Collection

    from multiworld._join.arguments import JoinPlan, StateLike
    from multiworld.events import Event

__all__ = ["AssignedWorld", "LauncherClient"]

_WAITS = 1.0
"""Seconds that members have to say what they are doing, when the launcher looks."""

_STATES: dict[type[Event], str] = {
    WorldJoining: "joining",
    WorldActive: "active",
    MemberBusy: "active",
    WorldBroken: "broken",
    WorldClosed: "closed",
    WorldJoinFailed: "failed",
}


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
    """This process's connection to its launcher, made when it is first needed.

    Attributes:
        retirement: whether the launcher retires this worker.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.retirement = Retirement()
        self._calling = threading.Lock()
        self._client: ControlClient | None = None
        self._assigned: dict[str, AssignedWorld] = {}
        self._causes: dict[str, str] = {}
        self._closed: set[str] = set()

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
            client, answer = self._client, None
            if client is not None:
                answer = client.ask("worlds", deadline=deadline)
            elif not self._assigned:
                answer = self._call(deadline)
            if answer is not None:
                if (error := answer.get("error")) is not None:
                    raise _refusal(str(error))
                local_rank = settings.environment("LOCAL_RANK") or "0"
                told = [AssignedWorld.read(each, local_rank) for each in answer["worlds"]]
                self._assigned = {each.name: each for each in told}
        finally:
            self._calling.release()
        return self._assigned

    def _call(self, deadline: float) -> dict[str, Any]:
        path, rank = settings.environment("M8D_CONTROL"), settings.environment("RANK") or ""
        if not path or not rank.isdigit():
            raise _refusal(f"M8D_CONTROL is {path!r} and RANK is {rank!r}: this process has no launcher")
        attempt = settings.environment("TORCHELASTIC_RESTART_COUNT") or ""
        hello = {
            "hello": "worker",
            "rank": int(rank),
            "pid": os.getpid(),
            "attempt": int(attempt) if attempt.isdigit() else 0,
        }
        try:
            client = ControlClient(path, deadline=deadline, retired=self.retirement.begin, looked=self._look)
        except OSError as exc:
            raise _refusal(f"the launcher cannot be reached at {path}: {exc.strerror or exc}") from exc
        answer = client.hello(hello, deadline=deadline)
        if answer is None:
            client.close()
            raise _refusal(f"the launcher at {path} does not answer")
        if "error" in answer:
            client.close()
            return answer
        self._client = client
        bus.subscribe(self._tell)
        return answer

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

    def moved(self, store: Any, plan: JoinPlan) -> bool:
        """Whether the present store of a world is another than `store`."""
        return bool(self._present(plan) != store)

    def _present(self, plan: JoinPlan) -> Any:
        client = self._client
        return client.store or plan.store if plan.served and client is not None else plan.store

    def _tell(self, event: Event) -> None:
        """Report an event of a world to the launcher. Never blocks."""
        client, state = self._client, _STATES.get(type(event))
        if client is None or os.getpid() != self._pid:
            return
        if isinstance(event, WorldStateReceived):
            client.report({"world": event.world, "received": event.received, "total": event.total})
        if isinstance(event, WorldUnblocked):
            at = time.time() - (time.monotonic() - event.at)
            client.report({"world": event.world, "generation": event.generation, "raised": at})
        if state is None:
            return
        world, detail, cause = event.world, "", ""
        ranks: tuple[int, ...] = ()
        if isinstance(event, WorldBroken):
            detail, cause = event.breakage.detail, str(event.breakage.cause)
            ranks = event.breakage.ranks
            self._causes[world] = cause
        elif isinstance(event, WorldJoinFailed):
            if world in self._closed:
                return  # it was given up because of the close, which was reported
            detail, cause = str(event.error), self._causes.get(world, "")
        elif isinstance(event, MemberBusy):
            if event.busy and len(event.ranks) == 1:
                detail = f"rank {event.ranks[0]} busy: runs, but does not answer"
            elif event.busy:
                detail = f"ranks {', '.join(map(str, event.ranks))} busy: run, but do not answer"
        elif isinstance(event, WorldClosed):
            self._closed.add(world)
        elif isinstance(event, WorldJoining):
            self._closed.discard(world)
        else:
            self._causes.pop(world, None)
        said = {
            "world": world,
            "state": state,
            "generation": event.generation,
            "detail": detail[:2000],
            "cause": cause,
            **({"ranks": list(ranks)} if ranks else {}),
        }
        if isinstance(event, WorldActive) and (found := self._assigned.get(world)) is not None:
            said |= {"size": event.world_size, "sizes": found.size if found.rank is None else ""}
        client.report(said)

    def _look(self, question: dict[str, Any]) -> None:
        """Answer how this process's worlds stand, in another thread: members are asked."""
        with contextlib.suppress(RuntimeError):  # the host has no thread left for this process
            pool.run(lambda: self._answer(question))

    def _answer(self, question: dict[str, Any]) -> None:
        client = self._client
        if client is None or os.getpid() != self._pid:
            return
        names = [each for each in question.get("worlds") or () if isinstance(each, str)]
        found = {
            "look": question["look"],
            "status": process_status(members=_members(question.get("members"))),
            "waits": waits_of(names, _WAITS),
        }
        client.report(fitting(found))

    def forked(self) -> None:
        """Close the parent's connection in a forked child."""
        if self._client is not None:
            self._client.close()


def _members(named: object) -> Collection[str] | None:
    """Return the names of worlds whose members are asked for; None: of all."""
    return [each for each in named if isinstance(each, str)] if isinstance(named, list) else None


def _refusal(value: str) -> MultiworldError:
    return MultiworldError(
        value,
        rule="join_all joins the worlds of a worlds file, which the launcher gives to its workers",
        next_step="Run the script with m8d-run --worlds FILE.toml SCRIPT, or use multiworld.join",
    )
