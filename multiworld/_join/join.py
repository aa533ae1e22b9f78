"""Joining a world: a generation's resources (`multiworld._join.steps`), then the generation, then the handle.

All of it or nothing: each step is undone when a later one fails, on every member.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from multiworld import background_threads, settings
from multiworld._core.state_machine import Announced, Joined, JoinFailed, Stage
from multiworld._generation.resources import UNDO_BUDGET
from multiworld._generation.stage import StateMachine
from multiworld._join import threaded
from multiworld._join.advancing import Advancing
from multiworld._join.arguments import LAST_CALL, JoinPlan, Size, StateLike, is_same_state, make_plan
from multiworld._join.endings import TRY_ENDS, is_tried_again, told_to_others
from multiworld._join.kept_state import KeptState
from multiworld._join.rejoining import Rejoiner
from multiworld._join.state import bring_up_to_date
from multiworld._net.stores.address import without_login
from multiworld.errors import (
    BrokenWorldException,
    JoinAbandonedError,
    JoinTimeoutError,
    StateTransferError,
    WorldClosedError,
)
from multiworld.events import Cause, State, WorldActive, WorldJoinFailed, WorldJoining, bus
from multiworld.loading import load
from multiworld.logs.handler import from_environment
from multiworld.logs.source import about, logger
from multiworld.registry import Reservation, registry
from multiworld.world import Rejoins, World

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Mapping

    import torch
    from torch._C._distributed_c10d import Store

    from multiworld._core.membership.roster import Roster
    from multiworld._generation.generation import Generation
    from multiworld.registry import RegisteredWorld

__all__ = ["join", "join_async", "join_planned", "join_planned_async", "no_thread", "rejoin", "rejoin_async"]

_log = logger(__name__)

AGAIN = 0.005
"""Seconds until an attempt that failed is followed by the next, where a world goes on without the lost."""

CANCEL_BUDGET = 0.2
"""Seconds that a cancelled join's awaiter waits for the undoing: milliseconds, where the store answers."""

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
    rank: int | None,
    world_size: Size,
    store: str | Store | None = None,
    backend: str = "gloo",
    timeout: float | dt.timedelta | None = None,
    hang_timeout: float | dt.timedelta | None = None,
    device: torch.device | str | int | None = None,
    *,
    seat: str | None = None,
    on_loss: str = "break",
    last_call: float | dt.timedelta = LAST_CALL,
    state: StateLike | None = None,
    **unknown: NoReturn,
) -> World:
    """Join the world `name` as `rank` of `world_size`; returns when everyone is there.

    With ``rank=None`` ranks are assigned, and the size may be a range, as "2:8": the world goes on without
    members that are lost, and with others that came meanwhile (`World.reform`).

    Args:
        name: any text of 1 to 200 characters; the same on every member.
        rank: 0 to ``world_size - 1``, each taken once; None has it assigned.
        world_size: the same on every member; 1 is allowed. With ``rank=None`` also "MIN:MAX", or a pair.
        store: "tcp://host:port" (served by rank 0's process; where ranks are assigned, by the first process
            of that host), "tcp://host:port,host:port,..." (served by a process of the first host that has
            one), "etcd://host:port,.../prefix", "file:///path", or a ``torch.distributed.Store``. Worlds may
            share one. None takes MASTER_ADDR and MASTER_PORT from the
            environment.
        backend: "gloo", "nccl", "nccl2", "cpu:gloo,cuda:nccl", or any backend registered with torch.
        timeout: seconds (or a timedelta), for this join and for each operation of the world; None takes
            M8D_JOIN_TIMEOUT (30).
        hang_timeout: seconds (or a timedelta) without a sign of life after which a member counts as hung, at
            least 0.3; None takes M8D_HANG_TIMEOUT (5).
        device: where this member's tensors live ("cuda:0"); None: the CPU for gloo, the current GPU for nccl.
        seat: with ``rank=None``, a name that this member keeps over generations and restarts, and no other
            has; None makes one for the process.
        on_loss: "break", or "shrink", which calls `World.reform` in the background whenever the world breaks.
        last_call: with ``rank=None``, seconds (or a timedelta) for which further members are waited for once
            MIN are there: those that are not known to be lost after a breakage, up to MAX of them at first.
        state: with ``rank=None``, what has the world's state: an object with ``state_dict()`` and
            ``load_state_dict()``, or several by name, the same on all members. One that comes new, or is a step
            behind after a breakage, gets the latest from another before `join`, `World.reform` or
            `World.advance` returns; in a world's first generation all get rank 0's.
        **unknown: there are no others; init_process_group's names are told what they are called here.

    Raises:
        InvalidJoinError: an argument breaks a rule, or this process is in an active world of that name.
        JoinError: of one of its kinds (RankTakenError, MismatchError, JoinTimeoutError,
            StoreUnreachableError, StoreBindError, BackendError, StaleGenerationError, JoinAbandonedError):
            the same kind on every member that took part, and nothing half-made is left.
        StateTransferError: the member that sent the state was lost, and none that has one came in time; what
            `state` has is partly the sender's.
        PatchRequiredError: M8D_REQUIRE_PATCH=1, an NCCL backend, and an unpatched torch.
    """
    _refuse_unknown("join", unknown)
    plan = make_plan(
        name, rank, world_size, store, backend, timeout, hang_timeout, device,
        seat=seat, on_loss=on_loss, last_call=last_call, state=state,
    )  # fmt: skip
    return _join(plan, None, threading.Event().is_set)


async def join_async(
    name: str,
    rank: int | None,
    world_size: Size,
    store: str | Store | None = None,
    backend: str = "gloo",
    timeout: float | dt.timedelta | None = None,
    hang_timeout: float | dt.timedelta | None = None,
    device: torch.device | str | int | None = None,
    *,
    seat: str | None = None,
    on_loss: str = "break",
    last_call: float | dt.timedelta = LAST_CALL,
    state: StateLike | None = None,
    **unknown: NoReturn,
) -> World:
    """`join`, awaitable. A cancelled one is undone, and the other members get JoinAbandonedError.

    Where ranks are assigned, the others go on without it.
    """
    _refuse_unknown("join_async", unknown)
    plan = make_plan(
        name, rank, world_size, store, backend, timeout, hang_timeout, device,
        seat=seat, on_loss=on_loss, last_call=last_call, state=state,
    )  # fmt: skip
    return await join_planned_async(plan, threading.Event().is_set)


def _refuse_unknown(function: str, unknown: Mapping[str, object]) -> None:
    for name in unknown:
        hint = _CALLED.get(name)
        raise TypeError(
            f"{function}() got an unexpected keyword argument {name!r}" + (f": {hint}" if hint else "")
        )


def join_planned(plan: JoinPlan, cancelled: Callable[[], bool]) -> World:
    """`join` with a plan that was made already; given up with JoinAbandonedError when `cancelled` says so."""
    return _join(plan, None, cancelled)


async def join_planned_async(plan: JoinPlan, cancelled: Callable[[], bool]) -> World:
    """`join_planned`, awaitable, as `join_async`."""

    def run(stopped: Callable[[], bool]) -> World:
        def given_up() -> bool:
            return stopped() or cancelled()

        # Also once it has come about: the loop may be held up, and cancel it later.
        return _join(plan, None, given_up, given_up)

    return await _threaded(plan, run)


def rejoin(
    world: World,
    timeout: float | dt.timedelta | None = None,
    store: str | Store | None = None,
    *,
    planned: bool = False,
    state: StateLike | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> World:
    """See `World.rejoin`; given up with JoinAbandonedError when `cancelled` says so.

    Args:
        world: as the others, of `World.rejoin`.
        timeout: see there.
        store: see there.
        planned: whether that is the place to which who planned the world has moved, not the program's choice.
        state: has the world's state from now on; None: what had it before. Other objects come without it, as a
            newcomer's do.
        cancelled: whether to give up.
    """
    plan = _again(world, timeout, store, planned=planned)
    if state is not None:
        plan = replace(plan, state=state)
    return _join(plan, world, cancelled or threading.Event().is_set)


async def rejoin_async(
    world: World, timeout: float | dt.timedelta | None = None, store: str | Store | None = None
) -> World:
    """See `World.rejoin_async`."""
    plan = _again(world, timeout, store)
    return await _threaded(plan, lambda cancelled: _join(plan, world, cancelled, cancelled))


def _again(
    world: World, timeout: float | dt.timedelta | None, store: str | Store | None, *, planned: bool = False
) -> JoinPlan:
    plan = world._plan
    chosen = store is not None and not planned  # by the program: a launcher serves nothing there
    if timeout is None and store is None:
        return replace(plan, store=plan.meets_at)
    return replace(
        make_plan(
            plan.name,
            None if plan.assigned else plan.rank,
            (plan.least, plan.world_size) if plan.assigned else plan.world_size,
            plan.meets_at if store is None else store,
            plan.backend,
            plan.timeout if timeout is None else timeout,
            plan.hang_timeout,
            plan.device,
            seat=plan.seat or None,
            on_loss=plan.on_loss,
            last_call=plan.last_call,
            state=plan.state,
        ),
        device=plan.device,
        gpu=plan.gpu,
        served=plan.served and not chosen,
        present=None if chosen else plan.present,
    )


def _join(
    plan: JoinPlan,
    world: World | None,
    cancelled: Callable[[], bool],
    withdrawn: Callable[[], bool] | None = None,
) -> World:
    """Join, or join again; where ranks are assigned, without members that are lost meanwhile.

    `withdrawn` says, also after the join, whether what awaited it was cancelled: its world is closed then.
    """
    from_environment()
    if settings.environment("M8D_CONTROL"):
        from multiworld.launched import reports  # only workers of a launcher need it

        reports.connect_if_launched()
    # With the first join of the process this loads torch, which takes seconds that are not the join's.
    load("multiworld._generation.generation")
    load("multiworld._join.steps")
    deadline = time.monotonic() + plan.timeout
    while registry.being_undone(plan.name) and not cancelled() and time.monotonic() < deadline:
        time.sleep(AGAIN)
    with contextlib.ExitStack() as lingering:
        known = world is not None and world._plan.meets_at == plan.store
        tries = _Tries(lingering, withdrawn, known=known)
        if not plan.assigned:
            return _join_once(plan, world, cancelled, deadline, tries)
        return _join_assigned(plan, world, cancelled, deadline, tries)


@dataclass
class _Tries:
    """What the tries of one join share.

    Attributes:
        lingering: ends the watch over the members of generations that broke before, or meanwhile.
        withdrawn: as of `_join`.
        gone: ids of processes that were lost in one of the tries.
        agreed: whether the last try failed after its members had agreed on a generation.
        known: whether this process has opened the store before, for this world or in one of the tries.
        cut_off: ids of processes that ended the transfers of a state in one of the tries.
    """

    lingering: contextlib.ExitStack
    withdrawn: Callable[[], bool] | None = None
    gone: set[str] = field(default_factory=set)
    cut_off: set[str] = field(default_factory=set)
    agreed: bool = False
    known: bool = False

    def anew(self, gen: Generation) -> bool:
        """Whether the timeout begins anew as `gen` broke while a state was sent: once for each process.

        Otherwise two that cannot get a state to each other would have all members try for ever.
        """
        ranks = () if gen.breakage is None else gen.breakage.ranks
        fresh = {gen.roster.members[rank].process for rank in ranks} - self.cut_off
        self.cut_off |= fresh
        return bool(fresh)


def _join_assigned(
    plan: JoinPlan, world: World | None, cancelled: Callable[[], bool], deadline: float, tries: _Tries
) -> World:
    """Join, and again without the members that are lost meanwhile."""
    kept = KeptState()
    handle = world
    closes = world._closes if world is not None else 0

    def given_up() -> bool:
        return cancelled() or (handle is not None and handle._closes != closes)

    while True:
        tries.agreed = kept.begun = False
        try:
            handle = _join_once(plan, handle, given_up, deadline, tries)
            if world is None:  # one that is joined again is closed once its state has come
                _not_given_up(
                    plan, cancelled
                )  # just now; a later cancellation finds the world, and closes it
            bring_up_to_date(handle, kept)
        except TRY_ENDS as error:
            # A member was lost, or was late. The others go on, and this one with them.
            other = handle is not None and registry.worlds().get(plan.name, handle) is not handle
            stopped = given_up() or registry.ending
            final = not is_tried_again(plan, error, agreed=tries.agreed)
            if kept.begun and handle is not None and tries.anew(handle._gen):
                # Transfers may have taken longer.
                deadline = max(deadline, time.monotonic() + plan.timeout)
            if final or other or stopped or time.monotonic() + AGAIN >= deadline:
                _close_new(handle, world)
                if world is None and handle is not None and handle._torn and not stopped:
                    raise _torn(plan) from error
                if isinstance(error, BrokenWorldException) and not (other or stopped):
                    lacks = handle is not None and handle._state_claimed is None
                    raise (_without_state if lacks else _without_others)(plan, error) from error
                raise
            tries.known = True
            time.sleep(AGAIN)
        except WorldClosedError as error:
            closed = given_up()
            _close_new(handle, world)
            if closed:  # while its state was brought
                raise _closed_meanwhile(plan) from error
            raise
        except BaseException:
            _close_new(handle, world)
            raise
        else:
            if plan.on_loss == "shrink" and world is None:
                Rejoiner(handle, lambda world, closed: rejoin(world, cancelled=closed))
            return handle


def _torn(plan: JoinPlan) -> StateTransferError:
    return StateTransferError(
        plan.name,
        f"{plan.who} of world {plan.name!r} has a part of the state of a member that was lost while it sent it, "
        f"and none that has a state came within {plan.timeout:g} s",
        rule="A state is a member's own, or another's as a whole",
        next_step="Load its own state again, then join again",
    )


def _without_state(plan: JoinPlan, error: BrokenWorldException) -> JoinTimeoutError:
    return JoinTimeoutError(
        plan.name,
        f"{plan.who} of world {plan.name!r} was let in, and did not get its state within {plan.timeout:g} s: {error}",
        rule="The members that work let a newcomer in, and send it the state, when each of them calls advance",
        next_step="See that they call it at least that often, or give a longer timeout",
    )


def _without_others(plan: JoinPlan, error: BrokenWorldException) -> JoinTimeoutError:
    return JoinTimeoutError(
        plan.name,
        f"{plan.who} of world {plan.name!r} met the others, and the world broke while they joined: {error}",
        rule="A join is over when all members have the world's state",
        next_step="Join again, or give a longer timeout",
    )


def _close_new(handle: World | None, world: World | None) -> None:
    """Close the handle of a join that failed when it had come about already; not one that is joined again."""
    if handle is not None and world is None:
        handle.close(UNDO_BUDGET)


def _not_given_up(plan: JoinPlan, cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise JoinAbandonedError(plan.name, f"{plan.who} of world {plan.name!r} gave up")


def _join_once(
    plan: JoinPlan, world: World | None, cancelled: Callable[[], bool], deadline: float, tries: _Tries
) -> World:
    """Join, or join again: one try."""
    _not_given_up(plan, cancelled)
    machine = StateMachine(plan.name, plan.rank)
    try:
        handle, made = _committed(plan, world, cancelled, deadline, tries, machine)
        number, rank, size = machine.generation, machine.rank, made.size
        bus.publish(WorldActive(plan.name, number, rank, time.monotonic(), size))
    finally:
        # Also where Ctrl-C came right after every member had committed: a breakage waits for this.
        if machine.stage in {Stage.OPENING, Stage.DOOMED}:
            machine.apply(Announced())
    return handle


def _committed(
    plan: JoinPlan,
    world: World | None,
    cancelled: Callable[[], bool],
    deadline: float,
    tries: _Tries,
    machine: StateMachine,
) -> tuple[World, Generation]:
    """Join, or join again, until every member has committed."""
    joined = Reservation(registry, plan.name, plan.rank, cancelled, tries.withdrawn)
    handle = world
    with contextlib.ExitStack() as kept:
        # First, and so done last: wherever an interrupt comes, the name is free then.
        kept.callback(joined.end)
        registry.hook()  # before the first thread that asks a store
        old = registry.reserve(plan.name, world, joined)
        from multiworld._generation import generation  # loaded by `_join`: this module loads no torch
        from multiworld._join import steps

        if world is not None:
            kept.callback(world._join_ended)
            world._join_began(machine)
        try:
            if old is not None or world is not None:
                kept.callback(steps.keep_devices())
                kept.callback(registry.watchdog().keep())
                _retire(plan, old, world, kept, tries.lingering, deadline)
            # Told after the end of the generation before: `_retire` waits until that was told.
            _begins(plan)
            past, lost, left = _past(world, tries.gone) if plan.assigned else (None, (), ())
            # Objects that are given now have none of the world's state, whatever those before had.
            new = world is not None and not is_same_state(plan.state, world._plan.state)
            terms = steps.Terms(
                plan,
                machine,
                deadline,
                # The interpreter waits for a thread that joins, if it is no daemon.
                lambda: cancelled() or machine.state is State.CLOSED or registry.ending,
                past=past,
                lost=lost,
                left=left,
                more_lost=frozenset if world is None or past is None else _more_lost(world),
                gone=tries.gone,
                step=0 if world is None else None if new else world._state_claimed,
                torn=world is not None and world._torn and not new,
                known=tries.known,
            )
            with contextlib.ExitStack() as undo:
                resources = steps.build(terms, undo)

                def make(owner: World) -> Generation:
                    return generation.Generation(machine, resources, owner, plan.timeout)

                if handle is None:
                    handle = World(plan, make, Rejoins(_advancing, rejoin, rejoin_async))
                made = handle._gen if world is None else make(world)
                undo.callback(made.refuse)
                resources.c10d.on_destroyed = lambda: _destroyed(made)
                if machine.apply(Joined()) is Stage.ABANDONED:
                    raise _closed_meanwhile(plan)  # noqa: TRY301  (it is told to subscribers, as others are)
                handle._enter(plan, made)
                handle._torn = handle._torn and not new
                handle._begins(resources.steps, made.rank, resources.step)
                undo.pop_all()
            if machine.state is State.CLOSED:
                raise _closed_meanwhile(plan)  # noqa: TRY301  (it is told to subscribers)
            joined.generation, joined.rank, joined.world = machine.generation, machine.rank, handle
        except BaseException as exc:
            tries.agreed = machine.generation != 0
            # Perhaps interrupted when the others were active: they see this member leave.
            machine.apply(JoinFailed(exc, time.monotonic() + UNDO_BUDGET))
            if handle is not None:
                handle._leave_registry()  # which a generation that is entered, and closed, does not
            if world is not None:
                world._gen.tell_over()
            # No name for what is told: with one, this frame and the error would keep each other.
            bus.publish(WorldJoinFailed(plan.name, 0, plan.rank, time.monotonic(), told_to_others(plan, exc)))
            raise
    return handle, made


def _retire(
    plan: JoinPlan,
    old: RegisteredWorld | None,
    world: World | None,
    kept: contextlib.ExitStack,
    lingering: contextlib.ExitStack,
    deadline: float,
) -> None:
    """Release the generation that is over: of the world that joins again, and of one that had its name before."""
    for ended in (old, world):
        if ended is not None:
            # Others may wait at the store that this process serves: it stays up until the new hold is there.
            kept.callback(ended._gen.keep_store())
            # Until the last of several tries: they ask which members are lost meanwhile.
            lingering.callback(ended._gen.linger())
            # A claim at another store would tell nothing to those that wait at this one.
            again = world is not None and ended is world and world._plan.meets_at == plan.store
            ended._gen.retire(min(deadline, time.monotonic() + UNDO_BUDGET), again=again)


def _begins(plan: JoinPlan) -> None:
    where = without_login(plan.store) if isinstance(plan.store, str) else type(plan.store).__name__
    _log.info("world %r: %s joins at %s", plan.name, plan.who, where, extra=about(plan.name))
    bus.publish(WorldJoining(plan.name, 0, plan.rank, time.monotonic()))


def _past(world: World | None, gone: set[str]) -> tuple[Roster | None, tuple[int, ...], tuple[int, ...]]:
    """The generation that this process was in last, its members that are lost, and which of them have left."""
    from multiworld._join.steps import LOST

    if world is None:
        return None, (), ()
    gen = world._gen
    breakage = gen.breakage
    lost = set(gen.lost)
    if breakage is not None and breakage.cause in LOST:
        lost.update(breakage.ranks)
    lost.update(member.rank for member in gen.roster.members if member.process in gone)
    left = breakage.ranks if breakage is not None and breakage.cause is Cause.LEFT else ()
    return gen.roster, tuple(sorted(lost)), tuple(sorted(left))


def _more_lost(world: World) -> Callable[[], frozenset[int]]:
    """What asks for the members of this process's last generation that were lost after it broke."""
    gen = weakref.ref(world._gen)  # what asks lives as long as the next one, and this one would with it

    def more_lost() -> frozenset[int]:
        past = gen()
        return frozenset() if past is None else past.lost

    return more_lost


def _advancing(world: World) -> Advancing:
    return Advancing(world, _destroyed)


def _closed_meanwhile(plan: JoinPlan) -> JoinAbandonedError:
    return JoinAbandonedError(
        plan.name,
        f"world {plan.name!r} was closed by another thread while it was joined",
        rule="A world that is closed stays closed",
        next_step="Join again",
    )


def _destroyed(gen: Generation) -> None:
    """User code destroyed the world's default group: that closes the world, without waiting inside torch."""
    found = registry.worlds().get(gen.world)
    if found is not None and found._gen is gen:
        threading.Thread(target=found.close, daemon=True, name=f"m8d-close-{gen.world}").start()


async def _threaded(plan: JoinPlan, run: Callable[[Callable[[], bool]], World]) -> World:
    """Run a join on a thread of its own; a cancellation is over when the thread has undone its work."""
    stop = threading.Event()
    taken = threading.Lock()  # by the caller, who then has the world, or by the thread, which then closes it

    def over(world: World | None, told: bool) -> None:
        if not told:
            stop.set()
        if world is not None and stop.is_set() and taken.acquire(blocking=False):
            world.close(UNDO_BUDGET)

    try:
        result = threaded.start(lambda: run(stop.is_set), f"m8d-join-{plan.name}", over)
    except RuntimeError as error:
        raise no_thread(plan.name, error) from error
    try:
        return await asyncio.shield(result)
    except asyncio.CancelledError:
        stop.set()
        found: Any = registry.worlds().get(plan.name)
        if found is not None and found._plan is plan and found.state is State.ACTIVE:
            # This join's: it waits for its state, which may take long.
            background_threads.call(partial(found.close, UNDO_BUDGET), f"m8d-close-{plan.name}")
        # The thread undoes its work, or closes the world that came after all: even if this is cancelled once
        # more, or takes longer than that.
        result.add_done_callback(lambda late: _close_late(late, taken))
        await asyncio.wait({result}, timeout=CANCEL_BUDGET)
        raise
    finally:
        del result  # it has the error, which has this frame


def no_thread(world: str, error: RuntimeError) -> JoinAbandonedError:
    """Return what a join raises for which `error` says that no thread could be started."""
    return JoinAbandonedError(
        world,
        f"world {world!r} could not be joined: {error}",
        rule="A join runs in threads",
        next_step="See how many this process may have (ulimit -u), then join again",
    )


def _close_late(result: asyncio.Future[World], taken: threading.Lock) -> None:
    """Close the world of a join that was cancelled when it had come about already, unless its thread does."""
    if not result.cancelled() and result.exception() is None and taken.acquire(blocking=False):
        world = result.result()
        background_threads.call(partial(world.close, UNDO_BUDGET), f"m8d-close-{world.name}")
