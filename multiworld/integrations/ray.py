"""Worlds of Ray's actors: a store that outlives its members, and joins that Ray's restarts do not end.

Importing it loads neither torch nor Ray. See docs/ray.md.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
import time
import uuid
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from multiworld._core import durations
from multiworld._core.reraise import as_new
from multiworld._join import join as joining
from multiworld._join.arguments import LAST_CALL, make_plan
from multiworld._join.rejoining import Rejoiner
from multiworld.errors import (
    InvalidJoinError,
    JoinAbandonedError,
    JoinTimeoutError,
    MultiworldError,
    StoreUnreachableError,
)

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable
    from concurrent.futures import Future

    import torch

    from multiworld._join.arguments import JoinPlan, Size, StateLike
    from multiworld.world import World

__all__ = ["RayStore", "join", "serve_store"]

PATIENCE = 300.0
"""Seconds for which a join waits for actors that Ray has not placed yet, by default."""
ASKING = 30.0
"""Seconds that the store's actor has to tell its address; Ray may be starting it again."""
LOOK_EVERY = 1.0
"""Seconds between two questions whether the store has another address."""
AGAIN = 0.05
"""Seconds between two tries."""

_RETRIED = (JoinTimeoutError, JoinAbandonedError, StoreUnreachableError)
"""Errors that another member's end, or its deadline, can cause: retried while there is time."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RayStore:
    """A store that an actor serves, by the actor's name: give it to the actors that join worlds there.

    Attributes:
        name: of the actor.
        namespace: Ray's, in which that is its name.
    """

    name: str
    namespace: str

    def address(self, timeout: float | dt.timedelta = ASKING) -> str:
        """Return where it is served now, for `multiworld.join`, `World.rejoin`, or `multiworld.weights`.

        Args:
            timeout: seconds, or a timedelta, that the actor has to answer; Ray may be starting it again.

        Raises:
            StoreUnreachableError: it did not, there is no such actor, or this process has no Ray any more.
            MultiworldError: Ray is not installed.
        """
        return _ask(self.name, self, durations.seconds(timeout) or 0.0)[1]

    def end(self) -> None:
        """End the actor. Active worlds go on; a join fails. Harmless when repeated."""
        ray = _ray()
        _kept.pop(self, None)
        if ray.is_initialized():  # else `get_actor` would start a cluster
            with contextlib.suppress(ValueError):  # it has ended
                ray.kill(ray.get_actor(self.name, namespace=self.namespace))


_kept: dict[RayStore, tuple[str, Any]] = {}
"""The actors that this process started, with its job: Ray ends an actor whose handles are gone."""


class _StoreServer:
    """Serves a store at a free port of its node's address, as long as its process lives."""

    def __init__(self) -> None:
        from multiworld.run.nodes.world_store import WorldStore  # noqa: PLC0415  (it loads torch)

        self._store = WorldStore(str(_ray().util.get_node_ip_address()))

    def address(self) -> str:
        """Where it is served: "tcp://host:port"."""
        return self._store.address


def serve_store(name: str | None = None, **options: Any) -> RayStore:
    """Start an actor that serves a store for worlds, and is no member of any.

    Ray starts it again where its process or node is lost; it serves another, empty store then, which `join`
    finds. Active worlds go on meanwhile. It takes no CPU, and prefers the node of the caller. It lives as
    long as the process that calls this, until `RayStore.end`, or, with ``lifetime="detached"``, as long as
    the cluster.

    Args:
        name: of the actor; None makes one.
        options: of ``ActorClass.options``, in the place of these, or beside them: as namespace="rl",
            lifetime="detached", get_if_exists=True.

    Raises:
        ValueError: Ray's, where an actor has that name.
        MultiworldError: Ray is not installed.
    """
    ray = _ray()
    here = ray.get_runtime_context()
    given: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, **options}
    if not given.keys() & {"scheduling_strategy", "resources", "label_selector"}:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        given["scheduling_strategy"] = strategies.NodeAffinitySchedulingStrategy(
            here.get_node_id(), soft=True
        )
    store = RayStore(
        f"m8d-store-{uuid.uuid4().hex[:12]}" if name is None else name,
        given.setdefault("namespace", here.namespace),
    )
    job = here.get_job_id()
    for old in [each for each, (its_job, _) in _kept.items() if its_job != job]:  # before a `ray.shutdown`
        del _kept[old]
    _kept[store] = job, ray.remote(_StoreServer).options(name=store.name, **given).remote()
    return store


def join(
    name: str,
    rank: int | None,
    world_size: Size,
    store: RayStore,
    backend: str = "gloo",
    timeout: float | dt.timedelta | None = None,
    hang_timeout: float | dt.timedelta | None = None,
    device: torch.device | str | int | None = None,
    *,
    seat: str | None = None,
    last_call: float | dt.timedelta = LAST_CALL,
    state: StateLike | None = None,
    rejoin: bool = True,
    patience: float | dt.timedelta = PATIENCE,
) -> World:
    """Join a world from an actor, or from any process of a Ray job; returns when everyone is there.

    It is `multiworld.join` for processes that Ray starts, moves and starts again: it tries again where other
    members are late, or are lost while they join, because Ray does not restart an actor whose ``__init__``
    raises. An actor that Ray restarts calls it again with the same rank, and so takes its place.

    Args:
        name: as for `multiworld.join`.
        rank: as there.
        world_size: as there.
        store: what `serve_store` returned.
        backend: as there.
        timeout: as there: seconds (or a timedelta) of each try, and of each operation.
        hang_timeout: as there.
        device: as there.
        seat: as there.
        last_call: as there.
        state: as there.
        rejoin: whether the world, whenever it breaks, is joined again in the background, at the store's
            present address, until it is active or closed. Operations raise BrokenWorldException meanwhile,
            and `World.wait_active` waits. Not with a `state`: call `World.rejoin` where it breaks, with
            ``store=store.address()``.
        patience: seconds, or a timedelta, for which it is tried.

    Raises:
        InvalidJoinError: an argument breaks a rule, or this process is in an active world of that name.
        JoinError: see `multiworld.join`; of those that another member's end can cause, the last one when
            `patience` is over.
        StoreUnreachableError: Ray is not initialised in this process.
        MultiworldError: Ray is not installed.
    """
    _check_initialised(_ray(), name)
    left = durations.seconds(patience)
    if not isinstance(store, RayStore) or left is None or left < 0:
        raise InvalidJoinError(
            str(name),
            f"world {name!r}: store={store!r}, patience={patience!r}",
            rule="The store is a RayStore; patience is seconds, or a timedelta, from 0 on",
            next_step="Give what serve_store() returned; for an address use multiworld.join",
        )
    plan = make_plan(
        name, rank, world_size, "tcp://store:1", backend, timeout, hang_timeout, device,
        seat=seat, last_call=last_call, state=state,
    )  # fmt: skip
    # No member serves the store, also where its address is one of this host.
    world = _join(replace(plan, served=True), store, time.monotonic() + left)
    if rejoin and state is None:
        Rejoiner(world, lambda broken, closed: _rejoin(broken, store, closed))
    return world


def _join(plan: JoinPlan, store: RayStore, deadline: float) -> World:
    """Join, and try again until the deadline; the first try lasts as long as its timeout says."""
    last: Exception | None = None
    while True:
        try:
            place = _Place(plan.name, store, min(ASKING, max(1.0, deadline - time.monotonic())))
            tried = last is not None

            def cancelled(place: _Place = place, tried: bool = tried) -> bool:
                return place.moved() or (tried and time.monotonic() >= deadline)

            return joining.join_planned(replace(plan, store=place.address), cancelled)
        except _RETRIED as exc:
            if time.monotonic() + AGAIN >= deadline:
                if last is None:
                    raise
                raise as_new(last) from exc  # `exc` may only say that the try was given up
            if type(last) is not type(exc):
                _log.warning("world %r is not joined yet: %s", plan.name, exc)
            last = as_new(exc)  # without its frames, of which this is one
        time.sleep(AGAIN)


def _rejoin(world: World, store: RayStore, closed: Callable[[], bool]) -> None:
    """Join a world again that broke, at the store's present address."""
    place = _Place(world.name, store)
    joining.rejoin(world, store=place.address, planned=True, cancelled=lambda: closed() or place.moved())


class _Place:
    """Where the store is while one join lasts.

    Attributes:
        address: when the join began.

    Raises:
        StoreUnreachableError: its actor does not answer.
    """

    def __init__(self, world: str, store: RayStore, timeout: float = ASKING) -> None:
        self._actor, self.address = _ask(world, store, timeout)
        self._present = self.address
        self._answer: Future[str] | None = None
        self._next = time.monotonic() + LOOK_EVERY
        self._asking = threading.Lock()

    def moved(self) -> bool:
        """Whether the store has another address by now. Does not wait: it goes by the last answer."""
        if self._asking.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._asking.release()
        return self._present != self.address

    def _look(self) -> None:
        if self._answer is None:
            # A call after `ray.shutdown` would start a cluster.
            if time.monotonic() >= self._next and _ray().is_initialized():
                self._answer = self._actor.address.remote().future()
        elif self._answer.done():
            answer, self._answer, self._next = self._answer, None, time.monotonic() + LOOK_EVERY
            if answer.exception() is None:  # else it has ended: the join's timeout tells of it
                self._present = answer.result()


def _ask(world: str, store: RayStore, timeout: float) -> tuple[Any, str]:
    """Return the actor that serves a store, and its address."""
    ray = _ray()
    _check_initialised(ray, world)
    try:
        actor = ray.get_actor(store.name, namespace=store.namespace)
        # A future, because `ray.get` complains where an async actor's thread calls it.
        return actor, str(actor.address.remote().future().result(timeout))
    except (ray.exceptions.RayError, FutureTimeoutError, ValueError) as exc:
        raise StoreUnreachableError(
            world,
            f"the actor {store.name!r} did not tell the store's address: {type(exc).__name__}",
            rule=f"It answers within {timeout:g} s, as long as the process lives that started it",
            next_step="Keep that process, or start the actor with lifetime='detached'",
        ) from exc


def _check_initialised(ray: Any, world: str) -> None:
    """Refuse a process that has no Ray, as after `ray.shutdown`: Ray's calls would start a cluster."""
    if not ray.is_initialized():
        raise StoreUnreachableError(
            str(world),
            "Ray is not initialised in this process",
            rule="The store's actor is found by the process's connection to its cluster",
            next_step="Call ray.init() first",
        )


def _ray() -> Any:
    """Return the module ray.

    Raises:
        MultiworldError: it is not installed.
    """
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util")
    except ImportError as error:
        raise MultiworldError(
            "Ray is not installed",
            rule="Worlds of Ray's actors need it",
            next_step="pip install 'm8d[ray]'",
        ) from error
    return ray
