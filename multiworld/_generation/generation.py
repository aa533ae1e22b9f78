"""One generation of a world in this process: from its join to the breakage or the close that ends it.

A `World` is the user's handle and may live through several of these; a generation ends once and stays ended.
Its stage changes in `multiworld._generation.stage`, as `multiworld._core.state_machine` decides; the actions
that follow are carried out here, outside of all locks. It is made whole, of the resources that a join made.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

from multiworld._c10d import fault_classification
from multiworld._c10d.gloo import fast_path, lane_only
from multiworld._c10d.lane.collectives import GenerationCollectives
from multiworld._c10d.lane.messages import Messages
from multiworld._c10d.lane.p2p_dispatch import Channels
from multiworld._c10d.logged_calls import LoggedCalls
from multiworld._c10d.nccl.flight_recorder import recorded
from multiworld._core.lane.greeting import COLLECTIVES, CROWDS
from multiworld._core.reraise import raised_by_the_program
from multiworld._core.state_machine import Action, Broke, CloseAsked, JoinFailed, RetireAsked
from multiworld._generation.background_release import releaser
from multiworld._generation.every_step import take_from
from multiworld._generation.fail_awaited import AwaitedOperations
from multiworld._generation.generation_errors import Refusal, is_posting, over_error, raised_by_torch
from multiworld._generation.operations import GenerationOperations
from multiworld._generation.resources import Holdings
from multiworld._generation.stuck import stuck_watch
from multiworld._generation.telling import Telling
from multiworld._generation.unblocked import Unblocked
from multiworld.errors import BrokenWorldException, MultiworldError
from multiworld.events import Breakage, Cause, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import ProcessGroup

    from multiworld._c10d.groups import Group
    from multiworld._core.state_machine import StageEvent
    from multiworld._generation.resources import Resources
    from multiworld._generation.stage import StateMachine

__all__ = ["LEFT_GRACE", "Generation", "Owner"]

LEFT_GRACE = 0.25
"""Seconds an operation in flight has to end by itself after a member left in good order.

What the leaver sent before it left is in the kernel's buffers by then; cutting the sockets at once would
lose it.
"""

DRAIN_SHARE = 0.8
"""Of the time that a close may take: how long it waits for others to receive what was sent to them."""

RELEASE_DELAY = 1.0
"""Seconds after a breakage until its resources are released: its pending operations have raised by then.

Longer than `LEFT_GRACE` and `fail_awaited.CUT_GRACE` one after the other. A join that comes before releases
them at once.
"""

UNBLOCKED_AFTER = 0.5
"""Seconds after a breakage until it is looked whether the calls that were blocked have raised."""

RELEASE_BUDGET = 2.0
"""Seconds that releasing them may take; a destructor that hangs goes on in a thread of its own after that."""

_AGAIN = frozenset({
    Action.REFUSE_OPERATIONS, Action.ABORT_GROUP, Action.SAY_GOODBYE, Action.DETACH, Action.RELEASE,
    Action.RELEASE_LATER, Action.RELEASE_STORE, Action.FAIL_AWAITED, Action.FAIL_AWAITED_LATER,
})  # fmt: skip
"""Actions that Ctrl-C must not cut short, harmless when repeated. Of the others, two wait, which it ends;
those that tell take each of their steps."""

_SILENT = {Cause.CRASHED, Cause.HUNG, Cause.UNREACHABLE}
"""Causes after which a member's process does not answer; one that has failed may."""

_inherited: list[object] = []
"""What a forked child has of its parent's worlds: destroying it would wait for threads that are not there."""


class Owner(Protocol):
    """The handle that a generation belongs to: it is told of the generation's end, outside of all locks."""

    def _generation_broke(self, gen: Generation, breakage: Breakage) -> None:
        """It broke; called once."""

    def _generation_closed(self, gen: Generation) -> None:
        """It was closed, and its resources are released; called once."""


class Generation:
    """One generation of one world in this process.

    Args:
        machine: its state machine, since its join began.
        resources: what the join made.
        owner: is told of its end.
        timeout: seconds, of each operation.

    Attributes:
        machine: as given; says where the generation stands.
        world, rank, size, number, roster: of the members.
        group: the process group and its sub-groups; from the generation's end on, whatever is asked raises.
        direct: its backend's operations; without plain gloo, and of a group that is made late, they take
            nothing. From the end on as `group`.
        lane: messages of CPU tensors; None where they go through the group. From the end on as `group`.
        collectives: over the lane; None where all are the backends'. From the end on as `group`.
        operations: what its members are doing.
        c10d: what the router selects for it.
        device_types: the kinds of device that it has a backend for.
        watch, expect, expect_no_more: of `AwaitedOperations`; attributes, for each message needs them.
    """

    def __init__(self, machine: StateMachine, resources: Resources, owner: Owner, timeout: float) -> None:
        roster, group, c10d = resources.roster, resources.group, resources.c10d
        self.machine = machine
        self.roster = roster
        self.world = roster.world
        self.rank = roster.rank
        self.size = len(roster.members)
        self.number = roster.generation
        self.timeout = timeout
        self.c10d = c10d
        self.device_types = group.device_types
        self.group = group
        self.operations = GenerationOperations(
            roster,
            resources.attachment,
            resources.busy,
            {} if resources.lane is None else resources.lane.readable,
            bytes if c10d.traffic is None else recorded,
        )
        c10d.operations = LoggedCalls(self.operations.log, c10d)
        made = group.pg if group.late is None else None  # one that is late may be there, or not
        self.direct = fast_path.of(made, c10d)
        self.lane: Messages | None = None
        self.collectives: GenerationCollectives | None = None
        if resources.lane is not None:
            self.lane = Messages(resources.lane, self.world, timeout, self.explain, self.operations.log)
            c10d.lane = channels = Channels(self.lane, c10d)
            carried = roster.lane_version >= COLLECTIVES
            if carried or roster.checks:
                self.collectives = c10d.collectives = GenerationCollectives(
                    self.lane,
                    channels,
                    made,
                    rank=self.rank,
                    size=self.size,
                    carried=carried,
                    crowds=roster.lane_version >= CROWDS,
                    near=roster.one_host,
                    checks=roster.checks,
                    secure=group.secure,
                )
        self._owner = owner
        self._busy = resources.busy
        self._attachment = resources.attachment
        self._holdings = Holdings(resources)
        self._telling = Telling(self.world)
        self._awaited = AwaitedOperations(machine, self.error)
        self.watch = self._awaited.watch
        self.expect = self._awaited.expect
        self.expect_no_more = self._awaited.expect_no_more
        c10d.translate = self.translate
        if self.size > 1:
            stuck_watch.add(self)
        machine.bind(self._carry_out)

    @property
    def state(self) -> State:
        """What programs see of its stage."""
        return self.machine.state

    @property
    def breakage(self) -> Breakage | None:
        """Why it broke; None as long as it has not."""
        return self.machine.breakage

    @property
    def pg(self) -> ProcessGroup:
        """The process group, made now if it is made when it is needed; blocks until it is there.

        Raises:
            BrokenWorldException, WorldClosedError: the generation is over, also as it was not made in time.
        """
        group = self.group.made()
        if group is None:
            raise self.error()
        return group

    def make(self) -> None:
        """Ask for `pg`, and keep it in no frame."""
        self.group.made()

    @property
    def stands(self) -> bool:
        """Whether asking for `pg` does not wait."""
        return self.machine.state is not State.ACTIVE or self.group.pg is not None

    @property
    def resources(self) -> Resources | None:
        """What the join made; None once it is released."""
        return self._holdings.resources

    @property
    def busy(self) -> tuple[int, ...]:
        """Ranks of the members that run, but do not answer."""
        return self._busy.ranks

    # -- its end ---------------------------------------------------------------------------------------------

    def verdict(self, breakage: Breakage) -> None:
        """This generation is over. Quick; any thread; the first one counts."""
        self.machine.apply(Broke(breakage))

    def retire(self, deadline: float, *, again: bool = False) -> bool:
        """Release what it holds, for the next generation: as `close`, but it stays broken.

        Operations that are still on their way out of a broken world raise the breakage, not a close.

        Args:
            deadline: as of `close`.
            again: see `RetireAsked`; call `tell_over` where the join comes to nothing.
        """
        self.machine.apply(RetireAsked(deadline, again))
        return self._holdings.freed

    def tell_over(self) -> None:
        """Tell the store that it is over for this process, where a claim was to tell it and did not."""
        self._holdings.tell_over()

    def close(self, deadline: float, failure: str = "") -> bool:
        """End it in good order and release what it holds, until `deadline` (``time.monotonic()`` seconds).

        Args:
            deadline: a destructor that hangs goes on in a daemon thread after it.
            failure: what ends this program, where that is no good order.

        Returns:
            Whether all is free.
        """
        self.machine.apply(CloseAsked(deadline, failure))
        return self._holdings.freed

    def keep_store(self) -> Callable[[], None]:
        """Let the store outlive this generation, if this process serves it; returns what releases it."""
        return self._holdings.keep_store()

    def linger(self) -> Callable[[], None]:
        """Let the watchdog judge the members on after the end, if this broke; returns what ends that."""
        return self._attachment.linger()

    @property
    def lost(self) -> frozenset[int]:
        """Ranks of members that were lost after it broke, as long as that is looked at (`linger`)."""
        return self._attachment.lost

    def _carry_out(self, actions: list[Action], event: StageEvent) -> None:
        """Carry out what an event leads to, all of it: the one place that does.

        The stage has changed: what an error, or Ctrl-C, left undone would never be done.
        """
        take_from(self.world, actions, lambda action: self._DO[action](self, event), _AGAIN)

    def refuse(self) -> None:
        """Let go of the process group: every operation that begins from now on raises."""
        stuck_watch.remove(self)
        self.operations.freeze()
        refusal = Refusal(self.error)
        self.group, self.direct = cast("Group", refusal), cast("fast_path.Direct", refusal)
        if self.lane is not None:
            self.lane = cast("Messages", refusal)
        if self.collectives is not None:
            self.collectives = cast("GenerationCollectives", refusal)
        self.c10d.break_(self.error)

    def _refuse_operations(self, _: StageEvent) -> None:
        self.refuse()

    def _abort_group(self, _: StageEvent) -> None:
        breakage = self.breakage
        cause = None if breakage is None else breakage.cause
        lost = breakage.ranks if breakage is not None and cause in _SILENT else ()
        self._holdings.abort(LEFT_GRACE if cause is Cause.LEFT else 0.0, lost)

    def _drain(self, event: StageEvent) -> None:
        if isinstance(event, CloseAsked) and event.failure:
            return
        now = time.monotonic()
        self._holdings.drain(now + DRAIN_SHARE * (_deadline_of(event) - now))

    def _say_goodbye(self, event: StageEvent) -> None:
        self._attachment.leave(event.failure if isinstance(event, CloseAsked) else "")

    def _detach(self, _: StageEvent) -> None:
        self._attachment.detach()

    def _release(self, event: StageEvent) -> None:
        again = isinstance(event, RetireAsked) and event.again
        self._holdings.release(_deadline_of(event), left=isinstance(event, CloseAsked), again=again)

    def _release_later(self, _: StageEvent) -> None:
        releaser.add(RELEASE_DELAY, self._retire_in_background)

    def _retire_in_background(self) -> float | None:
        self.retire(time.monotonic() + RELEASE_BUDGET)
        return self._holdings.release_spare_store()

    def _release_store(self, _: StageEvent) -> None:
        self._holdings.release_store()

    def _await_release(self, event: StageEvent) -> None:
        self._holdings.await_release(_deadline_of(event))

    def _fail_awaited(self, _: StageEvent) -> None:
        self._awaited.fail()

    def _fail_awaited_later(self, _: StageEvent) -> None:
        self._awaited.fail_later()

    def _tell_broken(self, _: StageEvent) -> None:
        breakage = self.machine.breakage
        assert breakage is not None  # noqa: S101  (a generation that broke has one)
        self._telling.broke(
            partial(self.operations.report_later, breakage),
            partial(self._watch_blocked, breakage),
            partial(self._owner._generation_broke, self, breakage),  # noqa: SLF001  (see `Owner`)
        )

    def _watch_blocked(self, breakage: Breakage) -> None:
        if self.operations.log.blocked:
            releaser.add(UNBLOCKED_AFTER, Unblocked(self.operations.log, self.roster, breakage))

    def settle(self, seconds: float) -> None:
        """Wait, so long at most, for another thread that tells subscribers of the close."""
        self._telling.settle(seconds)

    def _tell_closed(self, _: StageEvent) -> None:
        self._telling.closed(partial(self._owner._generation_closed, self))  # noqa: SLF001  (see `Owner`)

    _DO: ClassVar[dict[Action, Callable[[Generation, StageEvent], None]]] = {
        Action.REFUSE_OPERATIONS: _refuse_operations,
        Action.DRAIN: _drain,
        Action.ABORT_GROUP: _abort_group,
        Action.SAY_GOODBYE: _say_goodbye,
        Action.DETACH: _detach,
        Action.RELEASE: _release,
        Action.RELEASE_LATER: _release_later,
        Action.RELEASE_STORE: _release_store,
        Action.AWAIT_RELEASE: _await_release,
        Action.FAIL_AWAITED: _fail_awaited,
        Action.FAIL_AWAITED_LATER: _fail_awaited_later,
        Action.TELL_BROKEN: _tell_broken,
        Action.TELL_CLOSED: _tell_closed,
    }

    # -- errors ----------------------------------------------------------------------------------------------

    def error(self) -> Exception:
        """Return what an operation of this generation raises now that it is over."""
        error = over_error(self.machine)
        if isinstance(error, BrokenWorldException):
            if not isinstance(self.group, Refusal):  # the breaking thread is still at the log
                self.refuse()
            self.told()
        return error

    def told(self) -> None:
        """Note that this thread is being told that the generation is over."""
        if self.c10d.traffic is not None:
            self.c10d.traffic.told()

    def explain(self, exc: BaseException) -> BaseException:
        """Return the exception to raise instead of `exc`, an operation's; `exc` itself if it stands.

        A transport error waits a moment for the watchdog's verdict, so that all members name the same cause.
        """
        if isinstance(exc, MultiworldError) or not isinstance(exc, Exception):
            return exc
        if isinstance(exc, OSError) and raised_by_the_program(exc):  # a TimeoutError of its own, as a rule
            return exc
        if self.machine.state is not State.ACTIVE:
            return self.error()
        if lane_only.is_refusal(exc):
            return lane_only.refusal(self.world, "its lane does not carry this operation")
        fault = fault_classification.classify(exc)
        # The caller's fault, or another world's; or one that is explained off the event loop's thread.
        if fault is None or fault.told is not None or is_posting():
            return exc
        return self.fail(fault.detail, () if fault.rank is None else (fault.rank,))

    def fail(self, detail: str, ranks: tuple[int, ...]) -> Exception:
        """Break with what failed at the members `ranks`, unless the watchdog knows better; return `error`."""
        self.verdict(self._attachment.breakage_for(detail, ranks))
        return self.error()

    def translate(self, _state: object, exc: BaseException, /, *, sure: bool = True) -> BaseException | None:
        """`explain`, for a bare ``torch.distributed`` call in this world; None if `exc` stands.

        Inside ``with world:`` errors of all kinds pass: only torch's own can say anything about the world. A
        missing file, or the timeout of a connection that is not the world's, must neither break it nor be
        hidden. Without `sure`, the error may be of another group: see `_explain_guessed`.
        """
        if not isinstance(exc, RuntimeError) or not raised_by_torch(exc, fault_classification.classify):
            return None
        better = self.explain(exc) if sure else self._explain_guessed(exc)
        return None if better is exc else better

    def _explain_guessed(self, exc: RuntimeError) -> BaseException:
        """`explain`, where it is not known that `exc` is an operation's of this world.

        It gives no verdict: other members' worlds must not end for what another group has met with.
        """
        over = self.machine.state is not State.ACTIVE
        if lane_only.is_refusal(exc) and not over:
            return lane_only.refusal(self.world, "its lane does not carry this operation")
        # After the end, too: what is no transport fault is none of an operation that the end has cut off.
        fault = fault_classification.classify(exc)
        if fault is None or not fault.may_be_of(self.world):
            return exc
        if over:
            return self.error()
        if fault.told is not None or is_posting():
            return exc
        breakage = self._attachment.breakage_after_all()
        if breakage is None:
            return exc
        self.verdict(breakage)
        return self.error()

    # -- a forked child --------------------------------------------------------------------------------------

    def forked(self) -> None:
        """In a forked child: this is the parent's, whose world would end if anything of it were touched."""
        _inherited.append(
            (
                self.group,
                self.direct,
                self.lane,
                self.collectives,
                self._attachment,
                self._awaited.disown(),
                self._holdings.disown(),
            )
        )
        self.machine.forked()
        self.refuse()


def _deadline_of(event: StageEvent) -> float:
    return event.deadline if isinstance(event, JoinFailed | RetireAsked | CloseAsked) else time.monotonic()
