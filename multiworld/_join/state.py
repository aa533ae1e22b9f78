"""A world's state, brought to members that come without it, or are a step behind, when a generation begins.

The world is active then. All members wait here until the state is where it is needed, however long that
takes: otherwise those that neither send nor receive would wait in their next operation, and for its timeout
only. Each pause of a transfer has a limit. A member lost meanwhile breaks the world, as in any operation;
what came whole until then need not come again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import TYPE_CHECKING, Any

from multiworld import settings
from multiworld._core.membership.state_sources import sources
from multiworld.errors import MismatchError
from multiworld.events import WorldReady, WorldStateReceived, bus
from multiworld.logs.source import about, logger
from multiworld.uninterrupted import stream_of_caller

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from multiworld._generation.generation import Generation
    from multiworld._generation.resources import Resources
    from multiworld._join.arguments import JoinPlan
    from multiworld._join.kept_state import KeptState
    from multiworld.world import World

__all__ = ["bring_up_to_date", "wait_for_all"]

_log = logger(__name__)

TELL_EVERY = 0.1
"""Seconds between two events of one transfer."""


def bring_up_to_date(world: World, kept: KeptState) -> None:
    """Send this member's state to those that need it, or receive it; return when all have what they need.

    Args:
        world: active.
        kept: what came whole in an earlier try; told when transfers begin.

    Raises:
        BrokenWorldException: a member was lost meanwhile, or the other end gave up.
        StateError: this member's state has what cannot be sent.
        StateTransferError: what came is damaged, or breaks a rule.
        Exception: of the state's own methods; the world is broken then.
        MismatchError: some members have no lane.
    """
    plan, gen = world._plan, world._gen
    if plan.state is None:
        return
    resources = gen.resources
    if resources is None:
        raise gen.error()
    steps = resources.steps
    wanted = sources(steps, resources.roster.torn)
    provider = wanted.get(gen.rank)
    own = steps[gen.rank] if steps else None
    if wanted and gen.lane is None:
        raise _no_lane(world)
    receivers = [rank for rank, source in wanted.items() if source == gen.rank]
    began = has_it = time.monotonic()
    try:
        meet = _meeting(gen, resources) if wanted else _not_at_all
        if wanted and provider is None and not receivers:
            world._state_is_whole(gen)  # it serves what it has while others get theirs
        # Those that are here run no code of the program until the end of the transfers, or have limits in it.
        meet(plan.timeout)
        kept.begun = bool(wanted)
        if provider is not None:
            together = partial(meet, settings.MAX_TIMEOUT)
            has_it = _receive(world, gen, provider, kept, together, new=own is None or own < 0)
        else:
            if receivers:
                _send(gen, plan, receivers)
                has_it = time.monotonic()  # it stood still until then
            meet(settings.MAX_TIMEOUT)
    except BaseException as error:
        # The others hear of it here: no transfer may have begun that would tell the other end.
        if gen.state.value == "active":
            gen.fail(
                f"rank {gen.rank} gave up the transfer of a state: {type(error).__name__}: {error}",
                (gen.rank,),
            )
        raise
    if gen.state.value != "active":
        raise gen.error()
    world._state_is_whole(gen)
    seconds = has_it - began  # of this member alone: others may get theirs for longer
    if provider is not None:
        text = "world %r: rank %d has its state from rank %d, in %.3f s"
        extra = about(gen.world, gen.number, gen.rank)
        _log.info(text, gen.world, gen.rank, provider, seconds, extra=extra)
    source = -1 if provider is None else provider
    bus.publish(WorldReady(gen.world, gen.number, gen.rank, has_it, source, seconds))


def wait_for_all(world: World) -> None:
    """Wait until all members are here, and what they posted is over; for however long they work before.

    Where some have no lane, the world's barrier alone waits, for the world's timeout.

    Raises:
        Exception: the world's error.
    """
    gen = world._gen
    resources = gen.resources
    if resources is None:
        raise gen.error()
    if gen.size > 1:
        _meeting(gen, resources, "last member's end")(settings.MAX_TIMEOUT)
    world.barrier()


def _send(gen: Generation, plan: JoinPlan, receivers: list[int]) -> None:
    from multiworld._c10d.lane.state_transfer import send_state

    lane = gen.lane
    assert lane is not None  # noqa: S101  (the caller has looked)
    state = _of(plan)

    stream = stream_of_caller()  # in which its tensors are computed

    def send(rank: int) -> None:
        with _without(gen, rank), stream():
            send_state(lane, rank, state, deadline=time.monotonic() + plan.timeout, patience=plan.timeout)

    if len(receivers) == 1:
        send(receivers[0])
        return
    # To all at once: each waits for no longer than the world's timeout until something comes.
    threads = ThreadPoolExecutor(len(receivers), "m8d-state")
    each = None
    try:
        for each in as_completed([threads.submit(send, rank) for rank in receivers]):
            each.result()
    finally:
        del each  # its error has this frame, which has the state
        threads.shutdown(wait=False)  # after an error the generation is over, which ends the others


def _meeting(gen: Generation, resources: Resources, *what: str) -> Callable[[float], None]:
    """Return what waits for all members, so many seconds at most; for none where some cannot."""
    if gen.lane is None or not resources.roster.meets:
        return _not_at_all
    from multiworld._c10d.lane.state_meeting import StateMeeting

    return StateMeeting(gen.lane, gen.rank, gen.size, *what).wait


def _not_at_all(_: float) -> None:
    """No member waits for the others."""


def _receive(
    world: World,
    gen: Generation,
    provider: int,
    kept: KeptState,
    together: Callable[[], None],
    *,
    new: bool,
) -> float:
    """Receive the state, and load it; return when it had come, in ``time.monotonic()`` seconds."""
    from multiworld._c10d.lane.state_transfer import receive_state

    plan = world._plan
    assert gen.lane is not None  # noqa: S101  (the caller has looked)
    told = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= TELL_EVERY or done == total:
            told = now
            bus.publish(WorldStateReceived(gen.world, gen.number, gen.rank, now, provider, done, total))

    # A member that comes new has nothing to lose; one that is a step behind keeps its own until all has come.
    with _without(gen, provider):
        came = receive_state(
            gen.lane,
            provider,
            into=_rooms(plan) if new else None,
            in_place=new,
            deadline=time.monotonic() + plan.timeout,
            patience=plan.timeout,
            progress=progress,
            kept=kept.tensors,
            changes=world._state_is_torn,
        )
    has_it = time.monotonic()
    world._state_is_torn()  # also where nothing was received in place
    try:
        together()  # before it is loaded: the other members wait for that in their next operation
    finally:  # it has come, also where the world has broken meanwhile
        _load(plan, came)
        world._state_is_whole(gen)
        kept.tensors.clear()
    return has_it


@contextlib.contextmanager
def _without(gen: Generation, peer: int) -> Iterator[None]:
    """Where the other end gives up, break the world: the members go on without it, as after its death."""
    from multiworld._c10d.lane.state_line import GaveUpError

    try:
        yield
    except GaveUpError as error:
        raise gen.fail(error.value, (peer,)) from error


def _rooms(plan: JoinPlan) -> dict[str, Any] | None:
    """Return this member's own state, to receive into; None where it cannot be asked for it.

    A member that comes back after the others went on without it may have one that does not fit their steps.
    """
    try:
        return _of(plan)
    except Exception as error:  # noqa: BLE001  (the state's own)
        _log.info("The state of before is not reused: %s: %s", type(error).__name__, error)
        return None


def _of(plan: JoinPlan) -> dict[str, Any]:
    state = plan.state
    if isinstance(state, Mapping):
        return {name: each.state_dict() for name, each in state.items()}
    assert state is not None  # noqa: S101  (the caller has looked)
    return {"": state.state_dict()}


def _load(plan: JoinPlan, came: dict[str, Any]) -> None:
    state = plan.state
    if isinstance(state, Mapping):
        for name, each in state.items():
            each.load_state_dict(came[name])
    elif state is not None:
        state.load_state_dict(came[""])


def _no_lane(world: World) -> MismatchError:
    return MismatchError(
        world.name,
        f"world {world.name!r} has a state, and not all of its members have a lane to send it over",
        rule="A state travels over the lane: gloo's CPU tensors, and M8D_LANE unset, on all members",
        next_step="Unset M8D_LANE on all members, or give newcomers the state another way",
    )
