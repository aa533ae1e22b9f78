"""Worlds of Ray's actors: a store that outlives its members, and joins that Ray's restarts do not end.

Importing it loads neither torch nor Ray. See docs/ray.md.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from multiworld._core import durations
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

    import torch

    from multiworld._join.arguments import JoinPlan, Size, StateLike
    from multiworld.world import World

__all__ = ["join", "serve_store", "store_address"]

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


class _StoreServer:
    """Serves a store at a free port of its node's address, as long as its process lives."""

    def __init__(self) -> None:
        from multiworld.run.nodes.world_store import WorldStore  # noqa: PLC0415  (it loads torch)

        self._store = WorldStore(str(_ray().util.get_node_ip_address()))

    def address(self) -> str:
        """Where it is served: "tcp://host:port"."""
        return self._store.address


def serve_store(**options: Any) -> Any:
    """Start an actor that serves a store for worlds, and is no member of any.

    Ray starts it again where its process or node is lost; it serves another, empty store then, which `join`
    finds. Active worlds go on meanwhile. It takes no CPU, and runs on the node of the caller while that is
    there.

    Args:
        options: of ``ActorClass.options``, in the place of these: as name="worlds", namespace="rl",
            lifetime="detached", get_if_exists=True.

    Returns:
        The actor's handle: give it to the actors that join. Ray ends it with the last handle, or with the
        job, unless it is detached.

    Raises:
        MultiworldError: Ray is not installed.
    """
    ray = _ray()
    given: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, **options}
    if "scheduling_strategy" not in given and "resources" not in given and "label_selector" not in given:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        here = ray.get_runtime_context().get_node_id()
        given["scheduling_strategy"] = strategies.NodeAffinitySchedulingStrategy(here, soft=True)
    return ray.remote(_StoreServer).options(**given).remote()


def store_address(store: Any, timeout: float | dt.timedelta = ASKING) -> str:
    """Return the present address of a store, for `multiworld.join`, `World.rejoin`, or `multiworld.weights`.

    Args:
        store: what `serve_store` returned.
        timeout: seconds, or a timedelta, that its actor has to answer.

    Raises:
        StoreUnreachableError: it did not, or it is gone for good.
        MultiworldError: Ray is not installed.
    """
    return _ask("ray", store, durations.seconds(timeout) or 0.0)


def join(
    name: str,
    rank: int | None,
    world_size: Size,
    store: Any,
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
            ``store=store_address(store)``.
        patience: seconds, or a timedelta, for which it is tried.

    Raises:
        InvalidJoinError: an argument breaks a rule, or this process is in an active world of that name.
        JoinError: see `multiworld.join`; of those that another member's end can cause, the last one when
            `patience` is over.
        MultiworldError: Ray is not installed.
    """
    _ray()
    left = durations.seconds(patience)
    if not callable(getattr(getattr(store, "address", None), "remote", None)) or left is None or left < 0:
        raise InvalidJoinError(
            str(name),
            f"world {name!r}: store={store!r}, patience={patience!r}",
            rule="The store is an actor's handle; patience is seconds, or a timedelta, from 0 on",
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


def _join(plan: JoinPlan, store: Any, deadline: float) -> World:
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
                raise last from exc  # `exc` may only say that the try was given up
            if type(last) is not type(exc):
                _log.warning("world %r is not joined yet: %s", plan.name, exc)
            last = exc
        time.sleep(AGAIN)


def _rejoin(world: World, store: Any, closed: Callable[[], bool]) -> None:
    """Join a world again that broke, at the store's present address."""
    place = _Place(world.name, store)
    joining.rejoin(world, store=place.address, cancelled=lambda: closed() or place.moved())


class _Place:
    """Where the store is while one join lasts.

    Attributes:
        address: when the join began.

    Raises:
        StoreUnreachableError: its actor does not answer.
    """

    def __init__(self, world: str, store: Any, timeout: float = ASKING) -> None:
        self.address = _ask(world, store, timeout)
        self._store = store
        self._present = self.address
        self._question: Any = None
        self._next = time.monotonic() + LOOK_EVERY
        self._asking = threading.Lock()

    def moved(self) -> bool:
        """Whether the store has another address by now. Never blocks: the answer is that of the last look."""
        if self._asking.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._asking.release()
        return self._present != self.address

    def _look(self) -> None:
        ray = _ray()
        if self._question is None:
            if time.monotonic() >= self._next:
                self._question = self._store.address.remote()
        elif ray.wait([self._question], timeout=0)[0]:
            question, self._question, self._next = self._question, None, time.monotonic() + LOOK_EVERY
            with contextlib.suppress(ray.exceptions.RayError):  # gone for good: the join's timeout ends it
                self._present = ray.get(question)


def _ask(world: str, store: Any, timeout: float) -> str:
    ray = _ray()
    try:
        return str(ray.get(store.address.remote(), timeout=timeout))
    except ray.exceptions.RayError as exc:
        raise StoreUnreachableError(
            world,
            f"the actor that serves the store did not tell its address: {type(exc).__name__}",
            rule=f"It answers within {timeout:g} s, as long as a handle of it is kept and a node has room",
            next_step="See that its job and its handle live, and what Ray says of the actor",
        ) from exc


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
