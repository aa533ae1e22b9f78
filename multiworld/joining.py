"""Joining a world: store, agreement, connections, process group, commit; all of it or nothing.

Each step is undone when a later one fails, on every member: the rendezvous carries the reason to the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from multiworld import settings
from multiworld._net.stores.opening import in_time_for, open_in_time
from multiworld.errors import (
    JoinAbandonedError,
    JoinError,
    MultiworldError,
    StoreUnreachableError,
)
from multiworld.events import WorldActive, WorldJoinFailed, WorldJoining, bus
from multiworld.generation import Generation
from multiworld.joinplan import JoinPlan, make_plan
from multiworld.registry import Reservation, registry
from multiworld.work import seen
from multiworld.world import World

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Iterator, Mapping

    import torch
    from torch._C._distributed_c10d import Store

    from multiworld._core.membership.roster import Endpoint, Roster
    from multiworld._net.stores.rendezvous import Rendezvous
    from multiworld._net.stores.store import StoreHandle
    from multiworld.watchdog import Watchdog

__all__ = ["join", "join_async", "join_planned", "rejoin", "rejoin_async"]

UNDO_BUDGET = 2.0
"""Seconds that undoing a failed join may take."""

CANCEL_BUDGET = 0.2
"""Seconds that a cancelled join's awaiter waits for the undoing, which takes milliseconds where the store answers."""

AGAIN = 0.05
"""Seconds before a store that went away during a join is looked for again."""


_CALLED = {
    "init_method": "members meet at store='tcp://host:port', or 'file:///path'; 'env://' is what no store means",
    "group_name": "a world's name is the first argument",
    "world_name": "a world's name is the first argument",
    "device_id": "it is called device here",
    "pg_options": "a world's groups are made with the backend's defaults",
}
"""Arguments of `init_process_group` and of pymultiworld that are called otherwise here."""


def join(
    name: str,
    rank: int,
    world_size: int,
    store: str | Store | None = None,
    backend: str = "gloo",
    timeout: float | dt.timedelta | None = None,
    hang_timeout: float | dt.timedelta | None = None,
    device: torch.device | str | int | None = None,
    **unknown: NoReturn,
) -> World:
    """Join the world `name` as `rank` of `world_size`; returns when everyone is there.

    Args:
        name: any text of 1 to 200 characters; the same on every member.
        rank: 0 to ``world_size - 1``, each taken once.
        world_size: the same on every member; 1 is allowed.
        store: "tcp://host:port" (served by rank 0's process), "file:///path", or a ``torch.distributed.Store``.
            Worlds may share one. None takes MASTER_ADDR and MASTER_PORT from the environment.
        backend: "gloo", "nccl", "nccl2", "cpu:gloo,cuda:nccl", or any backend registered with torch.
        timeout: seconds (or a timedelta), for this join and for each operation of the world; None takes
            M8D_JOIN_TIMEOUT (30).
        hang_timeout: seconds (or a timedelta) without a sign of life after which a member counts as hung, at least 0.3; None takes
            M8D_HANG_TIMEOUT (5).
        device: where this member's tensors live ("cuda:0"); None: the CPU for gloo, the current GPU for nccl.
        **unknown: there are no others; init_process_group's names are told what they are called here.

    Raises:
        InvalidJoinError: an argument breaks a rule, or this process is in an active world of that name.
        JoinError: of one of its kinds (RankTakenError, MismatchError, JoinTimeoutError, StoreUnreachableError,
            StoreBindError, BackendError, StaleGenerationError, JoinAbandonedError): the same kind on every member
            that took part, and nothing half-made is left.
        PatchRequiredError: M8D_REQUIRE_PATCH=1, an NCCL backend, and an unpatched torch.
    """
    _refuse_unknown("join", unknown)
    plan = make_plan(name, rank, world_size, store, backend, timeout, hang_timeout, device)
    return _join(plan, None, threading.Event().is_set)


async def join_async(
    name: str,
    rank: int,
    world_size: int,
    store: str | Store | None = None,
    backend: str = "gloo",
    timeout: float | dt.timedelta | None = None,
    hang_timeout: float | dt.timedelta | None = None,
    device: torch.device | str | int | None = None,
    **unknown: NoReturn,
) -> World:
    """`join`, awaitable. Cancelling it undoes what was made here, and the other members get JoinAbandonedError."""
    _refuse_unknown("join_async", unknown)
    plan = make_plan(name, rank, world_size, store, backend, timeout, hang_timeout, device)
    return await _threaded(plan, lambda cancelled: _join(plan, None, cancelled))


def _refuse_unknown(function: str, unknown: Mapping[str, object]) -> None:
    for name in unknown:
        hint = _CALLED.get(name)
        raise TypeError(
            f"{function}() got an unexpected keyword argument {name!r}" + (f": {hint}" if hint else "")
        )


def join_planned(plan: JoinPlan, cancelled: Callable[[], bool]) -> World:
    """`join` with a plan that was made already; given up with JoinAbandonedError when `cancelled` says so."""
    return _join(plan, None, cancelled)


def rejoin(
    world: World,
    timeout: float | dt.timedelta | None = None,
    store: str | Store | None = None,
    *,
    cancelled: Callable[[], bool] | None = None,
) -> World:
    """See `World.rejoin`; given up with JoinAbandonedError when `cancelled` says so."""
    return _join(_again(world, timeout, store), world, cancelled or threading.Event().is_set)


async def rejoin_async(
    world: World, timeout: float | dt.timedelta | None = None, store: str | Store | None = None
) -> World:
    """See `World.rejoin_async`."""
    plan = _again(world, timeout, store)
    return await _threaded(plan, lambda cancelled: _join(plan, world, cancelled))


def _again(world: World, timeout: float | dt.timedelta | None, store: str | Store | None) -> JoinPlan:
    plan = world._plan  # noqa: SLF001  (joins make worlds)
    if timeout is None and store is None:
        return plan
    return replace(
        make_plan(
            plan.name,
            plan.rank,
            plan.world_size,
            plan.store if store is None else store,
            plan.backend,
            plan.timeout if timeout is None else timeout,
            plan.hang_timeout,
            plan.device,
        ),
        device=plan.device,
        gpu=plan.gpu,
        served=plan.served,
    )


def _join(plan: JoinPlan, world: World | None, cancelled: Callable[[], bool]) -> World:
    _load_torch()
    if cancelled():
        raise JoinAbandonedError(plan.name, f"rank {plan.rank} of world {plan.name!r} gave up")
    deadline = time.monotonic() + plan.timeout
    gen: Generation | None = None
    joined = Reservation(registry, plan.name, plan.rank)
    with contextlib.ExitStack() as kept:
        # First, and so done last: wherever an interrupt comes, the name is free then.
        kept.callback(joined.end)
        old = registry.reserve(plan.name, world, joined)
        was_closed = _never
        if world is not None:
            kept.callback(world._join_ended)  # noqa: SLF001  (joins make worlds)
            was_closed = world._join_began()  # noqa: SLF001
        try:
            bus.publish(WorldJoining(plan.name, 0, plan.rank, time.monotonic()))
            if old is not None or world is not None:
                from multiworld._c10d.gloo import devices  # noqa: PLC0415  (joins load torch, and this goes with it)

                kept.callback(devices.pool.keep())
            for ended in (old, world):
                if ended is not None:
                    # Others may wait at the store that this process serves: it stays up until the new hold is there.
                    kept.callback(ended._gen.keep_store())  # noqa: SLF001  (same)
                    ended._gen.retire(min(deadline, time.monotonic() + UNDO_BUDGET))  # noqa: SLF001  (same)
            keeper: list[World] = []
            made = gen = Generation(
                plan.name,
                plan.rank,
                plan.world_size,
                lambda g: keeper[0]._broke(g) if keeper else None,  # noqa: SLF001
            )
            handle = world if world is not None else World(plan, gen)
            keeper.append(handle)
            _build(
                plan,
                gen,
                deadline,
                lambda: cancelled() or was_closed(),
                lambda: handle._enter_generation(plan, made),  # noqa: SLF001
            )
            if was_closed():
                raise _closed_meanwhile(handle)  # noqa: TRY301  (it is told to subscribers, as others are)
            joined.generation, joined.world = gen.number, handle
        except Exception as exc:
            bus.publish(WorldJoinFailed(plan.name, 0, plan.rank, time.monotonic(), exc))
            raise
        except BaseException:  # interrupted, perhaps when the others were active: they see this member leave
            if joined.world is None and gen is not None and gen.rendezvous is not None:
                gen.close(time.monotonic() + UNDO_BUDGET)
            raise
    bus.publish(WorldActive(plan.name, gen.number, plan.rank, time.monotonic(), plan.world_size))
    gen.heed()
    return handle


def _load_torch() -> None:
    """Load torch: the first join of the process does, and not before. It takes seconds, which are not the join's."""
    from multiworld._c10d import capabilities, groups  # noqa: F401, PLC0415
    from multiworld._c10d.routing import router, state  # noqa: F401, PLC0415
    from multiworld._net.stores import store  # noqa: F401, PLC0415


def _build(
    plan: JoinPlan,
    gen: Generation,
    deadline: float,
    cancelled: Callable[[], bool],
    adopt: Callable[[], None],
) -> None:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined, unused-ignore]  # noqa: PLC0415

    from multiworld._c10d import capabilities, groups  # noqa: PLC0415
    from multiworld._c10d.group_spec import GroupSpec  # noqa: PLC0415
    from multiworld._c10d.routing import router  # noqa: PLC0415
    from multiworld._c10d.routing.state import WorldState  # noqa: PLC0415
    from multiworld._net.stores.store import PollingStore  # noqa: PLC0415

    watchdog = registry.watchdog()
    router.install()
    capabilities.prepare_nccl(plan.name, plan.backend)
    gen.timeout = plan.timeout
    with contextlib.ExitStack() as holds, contextlib.ExitStack() as undo:
        polling: PollingStore | None = None
        ways: list[Rendezvous] = []  # the last one is in use, or was

        def keys() -> list[str]:
            """What this member set in the store for its process group."""
            prefix = ways[-1].prefix
            return [f"{prefix}/{key}" for key in polling.written] if polling is not None else []

        try:
            store, rendezvous, roster = _agree(plan, watchdog, deadline, cancelled, holds, undo, ways.append)
            gen.number, gen.roster = roster.generation, roster

            def check() -> None:
                rendezvous.check()
                gen.check_early()

            attachment = watchdog.attach(
                roster, gen.verdict, deadline=deadline, cancelled=_raised(check), on_busy=gen.answers
            )
            undo.callback(attachment.detach)
            gen.attachment = attachment
            state = WorldState(name=plan.name, generation=roster.generation)
            undo.callback(state.forget)
            state.translate, state.parked = gen.translate, gen.parked
            gen.c10d = state
            polling = PollingStore(
                store,
                prefix=rendezvous.prefix,
                check_cancelled=check,
                call=in_time_for(store, world=plan.name, deadline=deadline, cancelled=cancelled),
            )
            group = groups.build(
                GroupSpec(
                    world=plan.name,
                    generation=roster.generation,
                    rank=plan.rank,
                    size=plan.world_size,
                    backend=plan.backend,
                    device=plan.torch_device() if plan.device is not None or plan.uses_nccl else None,
                    gpu=plan.gpu,
                    timeout=plan.timeout,
                    store=polling,
                    local_host=store.local_host,
                    check_cancelled=check,
                    fresh_store=lambda: PrefixStore(rendezvous.prefix, store.fresh()),
                ),
                state,
            )
            undo.callback(lambda: group.close(time.monotonic() + UNDO_BUDGET))
            gen.check_early()
            rendezvous.commit(gen.check_early)
            group.joined()
            gen.rendezvous, gen.store, gen.keys, gen.group = rendezvous, store, keys, group
            state.on_destroyed = lambda: _destroyed(gen)
            adopt()
            gen.activate()
        except BaseException as exc:
            # The others hear of it at once, of an interrupted program too: wherever it was, also between two steps.
            # What agreeing raises of itself they know.
            reason = exc if isinstance(exc, Exception) else _interrupted(plan, exc)
            if ways and (gen.roster is not None or reason is not exc):
                ways[-1].fail(reason, keys())
            if gen.roster is not None and isinstance(exc, MultiworldError) and not isinstance(exc, JoinError):
                raise JoinAbandonedError(
                    plan.name,
                    f"world {plan.name!r} could not be joined: {exc}",
                    rule="Every member must live through the join",
                    next_step="Join again",
                ) from exc
            raise
        undo.pop_all()


def _agree(
    plan: JoinPlan,
    watchdog: Watchdog,
    deadline: float,
    cancelled: Callable[[], bool],
    holds: contextlib.ExitStack,
    undo: contextlib.ExitStack,
    begun: Callable[[Rendezvous], object],
) -> tuple[StoreHandle, Rendezvous, Roster]:
    """Open the store and meet the others there, until `deadline`; `begun` is told before a claim is made.

    A server that goes away is waited for, as one that has not come yet is: rank 0 may be on its way out of its last
    generation, or have died, and its successor serves the same address again.
    """
    from multiworld._net.stores.rendezvous import JoinRequest, Rendezvous  # noqa: PLC0415

    while True:
        store = open_in_time(
            plan.store,
            world=plan.name,
            serve=plan.rank == 0 and not plan.served,
            deadline=deadline,
            cancelled=cancelled,
        )
        undo.callback(store.close)
        endpoint = holds.enter_context(_listening(watchdog, store.local_host))
        rendezvous = Rendezvous(
            store.store,
            _request(plan, watchdog.process, endpoint, JoinRequest),
            deadline=deadline,
            cancelled=cancelled,
        )
        begun(rendezvous)
        try:
            return store, rendezvous, rendezvous.agree()
        except StoreUnreachableError:
            undo.close()
            holds.close()
            if not isinstance(plan.store, str) or time.monotonic() + AGAIN >= deadline or cancelled():
                raise  # a store object is the caller's: there is no other to be had
        time.sleep(AGAIN)


@contextlib.contextmanager
def _listening(watchdog: Watchdog, host: str) -> Iterator[Endpoint]:
    """A listener of the watchdog for the time of a join; a world that was attached holds it itself."""
    endpoint = watchdog.endpoint(host)
    try:
        yield endpoint
    finally:
        watchdog.release_endpoint(endpoint)


def _never() -> bool:
    return False


def _closed_meanwhile(handle: World) -> JoinAbandonedError:
    handle.close(UNDO_BUDGET)
    return JoinAbandonedError(
        handle.name,
        f"world {handle.name!r} was closed by another thread while it was joined",
        rule="A world that is closed stays closed",
        next_step="Join again",
    )


def _interrupted(plan: JoinPlan, exc: BaseException) -> JoinAbandonedError:
    return JoinAbandonedError(
        plan.name, f"rank {plan.rank} of world {plan.name!r} was interrupted: {type(exc).__name__}"
    )


def _destroyed(gen: Generation) -> None:
    """User code destroyed the world's default group: that closes the world, without waiting inside torch."""
    found = registry.worlds().get(gen.world)
    if found is not None and found._gen is gen:  # noqa: SLF001  (joins make worlds)
        threading.Thread(target=found.close, daemon=True, name=f"m8d-close-{gen.world}").start()


def _raised(check: Callable[[], None]) -> Callable[[], bool]:
    """`check` as a predicate that lets its exception through: the reason is better than a yes."""

    def run() -> bool:
        check()
        return False

    return run


def _request(plan: JoinPlan, process: str, endpoint: Endpoint, kind: Callable[..., Any]) -> Any:
    last, held = registry.last(plan.name)
    device_type = "cuda" if plan.uses_nccl else plan.torch_device().type
    return kind(
        world=plan.name,
        rank=plan.rank,
        size=plan.world_size,
        backend=plan.backend,
        device_type=device_type,
        process=process,
        endpoint=endpoint,
        pid=os.getpid(),
        hostname=socket.gethostname(),
        hang_timeout=plan.hang_timeout,
        last_generation=last,
        held_rank=None if held < 0 else held,
        run=settings.run_id(),
    )


async def _threaded(plan: JoinPlan, run: Callable[[Callable[[], bool]], World]) -> World:
    """Run a join on a thread of its own; a cancellation reaches it, and is over when it has undone its work."""
    loop = asyncio.get_running_loop()
    stop = threading.Event()
    result: asyncio.Future[World] = loop.create_future()
    result.add_done_callback(seen)  # its awaiter may be cancelled, and then cancelled again
    taken = threading.Lock()  # by the caller, who then has the world, or by the thread, which then closes it

    def settle(world: World | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        elif world is not None:
            result.set_result(world)

    def work() -> None:
        world: World | None = None
        error: BaseException | None = None
        try:
            world = run(stop.is_set)
        except BaseException as exc:  # noqa: BLE001  (it is raised where the join is awaited)
            error = exc
        try:
            loop.call_soon_threadsafe(settle, world, error)
        except RuntimeError:  # the loop was closed meanwhile: nobody waits
            stop.set()
        if world is not None and stop.is_set() and taken.acquire(blocking=False):
            world.close(UNDO_BUDGET)

    threading.Thread(target=work, daemon=True, name=f"m8d-join-{plan.name}").start()
    try:
        return await asyncio.shield(result)
    except asyncio.CancelledError:
        stop.set()
        # The thread undoes its work, or closes the world that came after all: even if this is cancelled once more,
        # or takes longer than that.
        result.add_done_callback(lambda late: _close_late(late, taken))
        await asyncio.wait({result}, timeout=CANCEL_BUDGET)
        raise


def _close_late(result: asyncio.Future[World], taken: threading.Lock) -> None:
    """Close the world of a join that was cancelled when it had come about already, unless its thread does."""
    if not result.cancelled() and result.exception() is None and taken.acquire(blocking=False):
        world = result.result()
        threading.Thread(
            target=world.close, args=(UNDO_BUDGET,), daemon=True, name=f"m8d-close-{world.name}"
        ).start()
