"""The steps of a join, which make a generation's resources: store, agreement, connections, group, commit.

All of them or none. `multiworld._join.join` loads this, and torch with it, at the first join of the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from torch.distributed import PrefixStore  # type: ignore[attr-defined, unused-ignore]

from multiworld import settings
from multiworld._c10d import capabilities, groups
from multiworld._c10d.gloo import devices
from multiworld._c10d.group_spec import GroupSpec
from multiworld._c10d.routing import router
from multiworld._c10d.routing.state import WorldState
from multiworld._core.lane.greeting import LATE_GROUP
from multiworld._core.membership.request import state_text
from multiworld._core.state_machine import Broke
from multiworld._generation.busy_members import BusyMembers
from multiworld._generation.generation_errors import raise_if_lost
from multiworld._generation.resources import UNDO_BUDGET, Resources, keys_of
from multiworld._join import lane, secure
from multiworld._join.endings import is_tried_again, told_to_others
from multiworld._net.stores.address import is_list
from multiworld._net.stores.held_worlds import held
from multiworld._net.stores.opening import in_time_for, open_in_time
from multiworld._net.stores.rendezvous import REFUSING, JoinRequest, Rendezvous
from multiworld._net.stores.torchstore import PollingStore
from multiworld.errors import (
    BackendError,
    JoinAbandonedError,
    JoinError,
    JoinTimeoutError,
    MultiworldError,
    StoreUnreachableError,
)
from multiworld.events import Cause
from multiworld.registry import registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from multiworld._core.membership.roster import Endpoint, Roster
    from multiworld._generation.stage import StateMachine
    from multiworld._join.arguments import JoinPlan, StateLike
    from multiworld._net.lane.door import Door
    from multiworld._net.lane.endpoint import Endpoint as LaneEndpoint
    from multiworld._net.liveness.attachment import Attachment
    from multiworld._net.stores.store import StoreHandle
    from multiworld.events import Breakage
    from multiworld.watchdog import Watchdog

__all__ = ["LOST", "Terms", "build", "keep_devices"]

LOST = frozenset({Cause.CRASHED, Cause.HUNG, Cause.UNREACHABLE, Cause.LEFT})
"""Causes after which a member is not waited for. One with a failed operation may well come again."""

SEAT = 12
"""Characters of the process's id that are the seat of a member that was given none."""

AGAIN = 0.05
"""Seconds before a store that went away during a join is looked for again."""

_NEEDS = "A join needs threads, file descriptors, and an address of this host"


@dataclass(frozen=True)
class Terms:
    """What a join builds by.

    Attributes:
        plan: its arguments.
        machine: of the generation to be.
        past: where ranks are assigned, the generation that this process was in last; None if there was none.
        lost: ranks of its members that are known to be lost.
        left: those of them that have left in good order.
        more_lost: returns further ranks that were lost since.
        gone: gets the ids of processes that agreed to this join and were lost in it.
        deadline: ``time.monotonic()`` seconds.
        cancelled: asked often, from several threads, whether to give up.
        step: which state this process has, see `Claim.step`.
        torn: whether that is in part the state of a member that was lost while it sent it.
        known: whether this process has opened the store before: see `open_store`.
        limit: where `past` works, and the next generation is prepared beside it: see `Rendezvous.commit`.
    """

    plan: JoinPlan
    machine: StateMachine
    deadline: float
    cancelled: Callable[[], bool]
    past: Roster | None = None
    lost: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    more_lost: Callable[[], frozenset[int]] = frozenset
    gone: set[str] = field(default_factory=set)
    step: int | None = 0
    torn: bool = False
    known: bool = False
    limit: Callable[[], int] | None = None


def keep_devices() -> Callable[[], None]:
    """Keep gloo's devices of this process over a rejoin; returns what ends that."""
    return devices.pool.keep()


def build(terms: Terms, undo: contextlib.ExitStack) -> Resources:
    """Make what a generation needs, with all other members, until every one of them has committed.

    Args:
        terms: of the join.
        undo: gets, step by step, what releases each thing again. If this raises, the other members know, and
            the caller closes it.

    Raises:
        JoinError: the kind that every member raises.
        BaseException: what interrupted it.
    """
    watchdog = registry.watchdog()
    secure.check(terms.plan, watchdog.secure)
    router.install()
    _check_backend(terms, watchdog)
    capabilities.prepare_nccl(terms.plan.name, terms.plan.backend)
    attempt = _Attempt(terms)
    with contextlib.ExitStack() as holds:
        try:
            try:
                return _steps(terms, watchdog, holds, undo, attempt)
            except BaseException as exc:
                # The others hear of it at once, of an interrupted program too: wherever it was, also between
                # two steps.
                attempt.tell(exc)
                raise
        except BaseException as exc:
            if not attempt.told:  # the interrupt came while an error was about to be told
                attempt.tell(exc)
            if isinstance(exc, StoreUnreachableError) and terms.cancelled():  # it was waited for until then
                raise JoinAbandonedError(
                    terms.plan.name,
                    f"{terms.plan.who} of world {terms.plan.name!r} gave up while its store did not answer",
                ) from exc
            # OSError, RuntimeError: mostly the host has no descriptor or thread left.
            if isinstance(exc, (MultiworldError, OSError, RuntimeError)) and not isinstance(exc, JoinError):
                died = attempt.agreed and isinstance(exc, MultiworldError)
                raise JoinAbandonedError(
                    terms.plan.name,
                    f"world {terms.plan.name!r} could not be joined: {exc}",
                    rule="Every member must live through the join" if died else _NEEDS,
                    next_step="Join again" if died else "See what it lacks, then join again",
                ) from exc
            raise


def _check_backend(terms: Terms, watchdog: Watchdog) -> None:
    """Raise at once where this process cannot build the backend; members that wait for it are told."""
    plan = terms.plan
    try:
        groups.check_backend(plan.name, plan.backend, plan.group_device())
    except BackendError as error:
        if plan.assigned or plan.world_size == 1:  # the others do not need it, or there are none
            raise
        soon = dataclasses.replace(terms, deadline=min(terms.deadline, time.monotonic() + REFUSING))
        with contextlib.ExitStack() as holds, contextlib.ExitStack() as undo, contextlib.suppress(Exception):
            _agree(soon, watchdog, holds, undo, lambda _: None, unable=error)
        raise


class _Attempt:
    """What a join has begun with the other members, who have to hear of its failure.

    Attributes:
        polling: the store through which the group is built, once there is one.
        told: whether they were told.
    """

    def __init__(self, terms: Terms) -> None:
        self.polling: PollingStore | None = None
        self.told = False
        self._terms = terms
        self._rendezvous: Rendezvous | None = None

    @property
    def agreed(self) -> bool:
        """Whether the members have agreed on a generation."""
        return self._terms.machine.generation != 0

    def begin(self, rendezvous: Rendezvous) -> None:
        """Use `rendezvous` from now on; one before it has failed."""
        self._rendezvous = rendezvous

    def tell(self, exc: BaseException) -> None:
        """Tell the others of `exc`; what agreeing raises of itself they know."""
        reason = told_to_others(self._terms.plan, exc)
        if self._rendezvous is not None and (self.agreed or reason is not exc):
            again = is_tried_again(self._terms.plan, reason, agreed=self.agreed)
            self._rendezvous.fail(reason, keys_of(self._rendezvous, self.polling), left=not again)
        self.told = True


def _steps(
    terms: Terms,
    watchdog: Watchdog,
    holds: contextlib.ExitStack,
    undo: contextlib.ExitStack,
    attempt: _Attempt,
) -> Resources:
    plan, machine = terms.plan, terms.machine
    store, rendezvous, roster, door = _agree(terms, watchdog, holds, undo, attempt.begin)
    machine.generation, machine.rank = roster.generation, roster.rank
    registry.note(plan.name, roster.generation)
    try:
        return _with_members(terms, watchdog, undo, attempt, store, rendezvous, roster, door)
    except BaseException as exc:
        ranks = exc.missing if isinstance(exc, JoinTimeoutError) else ()
        if isinstance(exc, JoinAbandonedError):
            ranks = exc.lost
        if machine.verdict is not None and machine.verdict.cause in LOST:
            ranks = machine.verdict.ranks
        terms.gone.update(roster.members[rank].process for rank in ranks)
        raise


def _with_members(
    terms: Terms,
    watchdog: Watchdog,
    undo: contextlib.ExitStack,
    attempt: _Attempt,
    store: StoreHandle,
    rendezvous: Rendezvous,
    roster: Roster,
    door: Door | None,
) -> Resources:
    """Build the generation that was agreed on."""
    plan, machine = terms.plan, terms.machine
    secure.require_lanes(plan, roster)
    deadline = terms.deadline
    if plan.assigned:  # the others go on without a member that does not connect
        deadline = min(deadline, time.monotonic() + plan.hang_timeout)

    def check() -> None:
        rendezvous.check()
        raise_if_lost(machine)

    busy = BusyMembers(plan.name, roster.generation, roster.rank)
    endpoint: LaneEndpoint | None = None
    begun: Attachment | None = None

    def connect(attachment: Attachment, check_attachment: Callable[[], None]) -> None:
        def check_both() -> None:
            check()
            check_attachment()

        nonlocal endpoint, begun
        begun = attachment
        made = endpoint = lane.connect(
            door, roster, attachment, machine, deadline=terms.deadline, check=check_both
        )
        if made is not None:
            undo.callback(lambda: made.fail(ConnectionAbortedError("the join came to nothing")))

    def last_word(error: BaseException | None) -> str:
        """Return what the others are told: they wait for a member that joins again, not for one that left."""
        again = plan.assigned and is_tried_again(plan, error, agreed=True)
        if not again or terms.cancelled() or time.monotonic() >= terms.deadline:
            return ""
        return f"it gave up generation {roster.generation} ({type(error).__name__}), and joins again"

    def part(_kind: object, error: BaseException | None, _trace: object) -> None:
        if begun is not None:
            begun.leave(last_word(error))

    undo.push(part)  # before it is attached: an interrupt may come as soon as it is
    attachment = watchdog.attach(
        roster,
        lambda breakage: _apply_verdict(machine, breakage),
        deadline=deadline,
        cancelled=_raised(check),
        on_busy=busy.note,
        meanwhile=connect,
        last_word=last_word,
    )
    undo.push(part)
    state = WorldState(name=plan.name, generation=roster.generation)
    undo.callback(state.forget)
    polling = attempt.polling = PollingStore(
        store,
        prefix=rendezvous.prefix,
        check_cancelled=check,
        call=in_time_for(store, world=plan.name, deadline=terms.deadline, cancelled=terms.cancelled),
    )
    late = endpoint is not None and roster.lane_version >= LATE_GROUP
    group = groups.build(
        GroupSpec(
            world=plan.name,
            generation=roster.generation,
            rank=roster.rank,
            size=roster.size,
            backend=plan.backend,
            device=plan.group_device(),
            gpu=plan.gpu,
            timeout=plan.timeout,
            store=polling,
            local_host=store.local_host,
            check_cancelled=check,
            fresh_store=lambda: PrefixStore(rendezvous.prefix, store.fresh()),
            secure=not secure.gloo_may_connect(settings.load()),
        ),
        state,
        late=late,
    )
    undo.callback(lambda: group.close(time.monotonic() + UNDO_BUDGET))
    if endpoint is not None and late:
        lane.make_when_needed(group, endpoint, roster, attachment, machine, timeout=plan.timeout)
    undo.push(part)  # before: members that are active hear of it, not of closed connections
    raise_if_lost(machine)
    rendezvous.commit(lambda: raise_if_lost(machine), terms.limit)
    made = Resources(
        roster=roster,
        attachment=attachment,
        busy=busy,
        c10d=state,
        group=group,
        rendezvous=rendezvous,
        store=store,
        group_store=polling,
        lane=endpoint,
        steps=tuple(each if each is None or each < 0 else rendezvous.entry or each for each in roster.steps),
    )
    undo.callback(lambda: rendezvous.over(made.keys))
    if not late:
        group.joined()
    return made


def _agree(
    terms: Terms,
    watchdog: Watchdog,
    holds: contextlib.ExitStack,
    undo: contextlib.ExitStack,
    begun: Callable[[Rendezvous], object],
    *,
    unable: JoinError | None = None,
) -> tuple[StoreHandle, Rendezvous, Roster, Door | None]:
    """Open the store and meet the others there, until the deadline; `begun` is told before a claim is made.

    Where this process is `unable` to join, the others are told of that there, and it is raised.

    A server that goes away is waited for, as one that has not come yet is: rank 0 may be on its way out of
    its last generation, or have died, and its successor serves the same address again.
    """
    plan, deadline, cancelled, known = terms.plan, terms.deadline, terms.cancelled, terms.known
    while True:
        store = open_in_time(
            plan.store,
            world=plan.name,
            serve=(plan.rank == 0 or plan.assigned or is_list(plan.store)) and not plan.served,
            only=not plan.assigned,
            known=known,
            process=watchdog.process,
            deadline=deadline,
            cancelled=cancelled,
        )
        undo.callback(store.close)
        endpoint = holds.enter_context(_listening(watchdog, store.local_host))
        door = lane.open_door(plan, store.local_host, watchdog.process)
        if door is not None:
            holds.enter_context(door)
        rendezvous = Rendezvous(
            store.store,
            _request(terms, watchdog.process, endpoint, door),
            deadline=deadline,
            given=plan.timeout,
            last_call=plan.last_call,
            cancelled=cancelled,
            more_lost=terms.more_lost,
            held=partial(held, store.store, plan.name) if plan.served else None,
            unable=unable,
        )
        begun(rendezvous)
        try:
            return store, rendezvous, rendezvous.agree(), door
        except StoreUnreachableError:
            undo.close()
            holds.close()
            if not isinstance(plan.store, str) or time.monotonic() + AGAIN >= deadline or cancelled():
                raise  # a store object is the caller's: there is no other to be had
        known = True
        time.sleep(AGAIN)


@contextlib.contextmanager
def _listening(watchdog: Watchdog, host: str) -> Iterator[Endpoint]:
    """A listener of the watchdog for the time of a join; a world that was attached holds it itself."""
    endpoint: Endpoint | None = None
    try:
        endpoint = watchdog.endpoint(host)
        yield endpoint
    finally:
        if endpoint is not None:
            watchdog.release_endpoint(endpoint)


def _request(terms: Terms, process: str, endpoint: Endpoint, door: Door | None) -> JoinRequest:
    plan, past = terms.plan, terms.past
    last, held = registry.last(plan.name)
    if plan.assigned:
        last, held = max(last, registry.noted(plan.name)), -1
    return JoinRequest(
        world=plan.name,
        rank=plan.rank,
        size=plan.world_size,
        backend=plan.backend,
        device_type="cuda" if plan.uses_nccl else plan.torch_device().type,
        process=process,
        endpoint=endpoint,
        pid=os.getpid(),
        hostname=socket.gethostname(),
        hang_timeout=plan.hang_timeout,
        last_generation=last,
        held_rank=None if held < 0 else held,
        run=settings.run_id(),
        lane=None if door is None else door.address,
        least=plan.least,
        seat=(plan.seat or process[:SEAT]) if plan.assigned else "",
        past=() if past is None else past.members,
        past_generation=0 if past is None else past.generation,
        past_rank=0 if past is None else past.rank,
        lost=terms.lost,
        left=terms.left,
        step=terms.step,
        torn=terms.torn,
        working=terms.limit is not None,
        state=_state_text(plan.state),
    )


def _state_text(state: StateLike | None) -> str:
    if state is None:
        return ""
    return state_text(state if isinstance(state, Mapping) else None)


def _apply_verdict(machine: StateMachine, breakage: Breakage) -> None:
    machine.apply(Broke(breakage))


def _raised(check: Callable[[], None]) -> Callable[[], bool]:
    """`check` as a predicate that lets its exception through: the reason is better than a yes."""

    def run() -> bool:
        check()
        return False

    return run
