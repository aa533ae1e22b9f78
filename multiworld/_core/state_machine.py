"""The state machine of one generation of a world: stages, events, and what each event makes of each stage.

``step(stage, event)`` is the whole rule: it returns the next stage and the actions that follow, in the order
in which they are carried out. It knows no torch, no sockets and no clock. `multiworld._generation.stage`
holds the stage of a generation and logs each change; `multiworld._generation.generation` carries the actions
out. docs/concepts.md shows `TABLE`.

A stage is finer than the `State` that programs see (`STATES`): a member may be lost before the join is over,
or before subscribers have heard that the world is active. A generation never goes back: joining again makes
the next one, with a stage of its own.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from multiworld.events import Breakage, State

__all__ = [
    "LATE", "STATES", "TABLE", "Action", "Announced", "Broke", "CloseAsked", "Forked", "IllegalStepError",
    "JoinFailed", "Joined", "Replaced", "RetireAsked", "Row", "Stage", "StageEvent", "step", "why",
]  # fmt: skip


class Stage(enum.Enum):
    """Where a generation stands."""

    CONNECTING = "connecting"
    """The members agree, connect, and build the process group."""
    LOST = "lost"
    """A member was lost meanwhile: the join is about to fail."""
    ABANDONED = "abandoned"
    """The join came to nothing, and undoes itself what it had made."""
    OPENING = "opening"
    """Every member has committed: operations work. Breakages wait until subscribers know of the world."""
    DOOMED = "doomed"
    """As OPENING, and a member was lost."""
    ACTIVE = "active"
    """Every member is there, and subscribers know."""
    BROKEN = "broken"
    """A member is lost: operations raise. Its resources are still held."""
    RETIRED = "retired"
    """It broke, and its resources are released, or about to be."""
    REPLACED = "replaced"
    """This process went on to the generation that was prepared beside it. Others may not have yet."""
    CLOSED = "closed"
    """This process closed it."""
    INHERITED = "inherited"
    """This process was forked from the one whose generation it is."""


STATES = {
    Stage.CONNECTING: State.JOINING,
    Stage.LOST: State.JOINING,
    Stage.ABANDONED: State.CLOSED,
    Stage.OPENING: State.ACTIVE,
    Stage.DOOMED: State.ACTIVE,
    Stage.ACTIVE: State.ACTIVE,
    Stage.BROKEN: State.BROKEN,
    Stage.RETIRED: State.BROKEN,
    Stage.REPLACED: State.CLOSED,
    Stage.CLOSED: State.CLOSED,
    Stage.INHERITED: State.CLOSED,
}
"""What programs see of each stage."""


class Action(enum.Enum):
    """What a generation does about an event."""

    REFUSE_OPERATIONS = "refuse-operations"
    """The world's methods, and bare calls of torch.distributed in it, raise from now on."""
    DRAIN = "drain"
    """What was sent to the other members is received there; until shortly before the deadline."""
    ABORT_GROUP = "abort-group"
    """Pending operations of the process group raise; where a member left in good order, a moment later."""
    SAY_GOODBYE = "say-goodbye"
    """The other members learn that this one leaves, and the watchdog stops watching."""
    DETACH = "detach"
    """The watchdog stops watching; the other members know of the breakage."""
    RELEASE = "release"
    """The group, its entry in the store, and the store are released; not a store that this process serves."""
    RELEASE_LATER = "release-later"
    """A thread in the background retires the generation when its pending operations have raised."""
    RELEASE_STORE = "release-store"
    """The store is released, though this process serves it."""
    AWAIT_RELEASE = "await-release"
    """Another thread releases the resources, or has: wait for it."""
    FAIL_AWAITED = "fail-awaited"
    """Awaited operations that still wait raise."""
    FAIL_AWAITED_LATER = "fail-awaited-later"
    """The same, when they have had a moment to end by themselves."""
    TELL_BROKEN = "tell-broken"
    """Subscribers and ``on_break`` functions are told, unless another thread has begun to."""
    TELL_CLOSED = "tell-closed"
    """Subscribers are told, after the breakage."""


@dataclass(frozen=True)
class Joined:
    """Every member has committed."""


@dataclass(frozen=True)
class JoinFailed:
    """The join came to nothing: `error`. Releasing may take until `deadline`."""

    error: BaseException
    deadline: float = 0.0


@dataclass(frozen=True)
class Announced:
    """Subscribers know that the world is active."""


@dataclass(frozen=True)
class Broke:
    """The watchdog's verdict, or an operation's error that needs none."""

    breakage: Breakage


@dataclass(frozen=True)
class Replaced:
    """This process goes on to the generation that was prepared beside it; `by`: its number, 0: it leaves."""

    by: int = 0


@dataclass(frozen=True)
class RetireAsked:
    """A generation that broke, or was replaced, is to release its resources, until `deadline`.

    `again`: this process joins the world again, and its claim says that the generation is over for it.
    """

    deadline: float = 0.0
    again: bool = False


@dataclass(frozen=True)
class CloseAsked:
    """This process closes the world, until `deadline`; `failure` says what ends its program, if anything."""

    deadline: float = 0.0
    failure: str = ""


@dataclass(frozen=True)
class Forked:
    """This process is a forked child."""


StageEvent = Joined | JoinFailed | Announced | Broke | Replaced | RetireAsked | CloseAsked | Forked


class IllegalStepError(RuntimeError):
    """An event that cannot happen in this stage: a fault in this package, never the user's.

    Args:
        stage: of the generation.
        event: what came.
    """

    def __init__(self, stage: Stage, event: StageEvent) -> None:
        self.stage = stage
        self.event = event
        super().__init__(f"{type(event).__name__} cannot happen to a generation that is {stage.value}")


class Row(NamedTuple):
    """The next stage, and the actions on the way."""

    to: Stage
    actions: tuple[Action, ...] = ()


# Goodbye before the group goes: else the others see its connections close before they know why.
_LEAVE = (
    Action.REFUSE_OPERATIONS,
    Action.SAY_GOODBYE,
    Action.RELEASE,
    Action.RELEASE_STORE,
    Action.FAIL_AWAITED,
)
_CLOSE = (Action.REFUSE_OPERATIONS, Action.DRAIN, *_LEAVE[1:], Action.TELL_CLOSED)
_BREAK = (
    Action.REFUSE_OPERATIONS,
    Action.ABORT_GROUP,
    Action.FAIL_AWAITED_LATER,
    Action.TELL_BROKEN,
    Action.RELEASE_LATER,
)
_TELL = (Action.TELL_BROKEN, Action.TELL_CLOSED)

TABLE: dict[tuple[Stage, type[StageEvent]], Row] = {
    (Stage.CONNECTING, Joined): Row(Stage.OPENING),
    (Stage.CONNECTING, Broke): Row(Stage.LOST),
    (Stage.CONNECTING, JoinFailed): Row(Stage.ABANDONED),
    (Stage.CONNECTING, CloseAsked): Row(Stage.ABANDONED),
    (Stage.LOST, JoinFailed): Row(Stage.ABANDONED),
    (Stage.LOST, CloseAsked): Row(Stage.ABANDONED),
    (Stage.LOST, Joined): Row(Stage.DOOMED),
    (Stage.OPENING, Announced): Row(Stage.ACTIVE),
    (Stage.OPENING, Broke): Row(Stage.DOOMED),
    (Stage.OPENING, JoinFailed): Row(Stage.CLOSED, _LEAVE),
    (Stage.OPENING, CloseAsked): Row(Stage.CLOSED, _CLOSE),
    # Another thread goes on while subscribers are still told. The next generation tells of a member that was
    # lost, if it is one of that as well.
    (Stage.OPENING, Replaced): Row(Stage.REPLACED, (Action.REFUSE_OPERATIONS,)),
    (Stage.DOOMED, Replaced): Row(Stage.REPLACED, (Action.REFUSE_OPERATIONS,)),
    (Stage.DOOMED, Announced): Row(Stage.BROKEN, _BREAK),
    (Stage.DOOMED, JoinFailed): Row(Stage.CLOSED, _LEAVE),
    (Stage.DOOMED, CloseAsked): Row(Stage.CLOSED, (*_LEAVE, Action.TELL_CLOSED)),
    (Stage.ACTIVE, Broke): Row(Stage.BROKEN, _BREAK),
    (Stage.ACTIVE, CloseAsked): Row(Stage.CLOSED, _CLOSE),
    (Stage.ACTIVE, Replaced): Row(Stage.REPLACED, (Action.REFUSE_OPERATIONS,)),
    # No member needs it any more: what was sent in it may still have to be received.
    (Stage.REPLACED, RetireAsked): Row(Stage.CLOSED, (Action.DRAIN, *_LEAVE[1:])),
    (Stage.REPLACED, CloseAsked): Row(Stage.CLOSED, (Action.DRAIN, *_LEAVE[1:])),
    # The thread in which it broke may still be at the log: the breakage is told before what came later.
    (Stage.BROKEN, RetireAsked): Row(
        Stage.RETIRED, (Action.DETACH, Action.RELEASE, Action.FAIL_AWAITED, Action.TELL_BROKEN)
    ),
    (Stage.BROKEN, CloseAsked): Row(
        Stage.CLOSED,
        (Action.DETACH, Action.RELEASE, Action.RELEASE_STORE, Action.FAIL_AWAITED, *_TELL),
    ),
    (Stage.RETIRED, RetireAsked): Row(Stage.RETIRED, (Action.AWAIT_RELEASE,)),
    (Stage.RETIRED, CloseAsked): Row(Stage.CLOSED, (Action.AWAIT_RELEASE, Action.RELEASE_STORE, *_TELL)),
    # Another thread closed it when every member had committed, and before its join had returned.
    (Stage.CLOSED, JoinFailed): Row(Stage.CLOSED, (Action.AWAIT_RELEASE,)),
    (Stage.CLOSED, RetireAsked): Row(Stage.CLOSED, (Action.AWAIT_RELEASE,)),
    (Stage.CLOSED, CloseAsked): Row(Stage.CLOSED, (Action.AWAIT_RELEASE, Action.RELEASE_STORE)),
}
"""What an event makes of a stage. A pair that is neither here nor in `LATE` is illegal."""

LATE: dict[Stage, tuple[type[StageEvent], ...]] = {
    Stage.LOST: (Broke,),
    Stage.ABANDONED: (Joined, JoinFailed, Broke, CloseAsked),
    Stage.DOOMED: (Broke,),
    Stage.BROKEN: (Broke, Replaced),
    Stage.RETIRED: (Broke, Replaced),
    Stage.REPLACED: (Announced, Broke),
    Stage.CLOSED: (Announced, Broke, Replaced),
    Stage.INHERITED: (Announced, Broke, Replaced, RetireAsked, CloseAsked),
}
"""Events that come too late to matter: the first verdict holds, and a generation that is over stays so."""


def step(stage: Stage, event: StageEvent) -> Row:
    """Return the stage after `event`, and the actions that it leads to, in order.

    Raises:
        IllegalStepError: `event` cannot happen in `stage`.
    """
    kind = type(event)
    if kind is Forked:  # whatever it was
        return Row(Stage.INHERITED)
    row = TABLE.get((stage, kind))
    if row is not None:
        return row
    if kind in LATE.get(stage, ()):
        return Row(stage)
    raise IllegalStepError(stage, event)


def why(event: StageEvent) -> str:
    """Say for a log why a stage changed."""
    if isinstance(event, Broke):
        return f"{event.breakage.cause}: {event.breakage.detail}"
    if isinstance(event, JoinFailed):
        return f"{type(event.error).__name__}: {event.error}"
    if isinstance(event, Replaced):
        return f"replaced by generation {event.by}" if event.by else "this process leaves as planned"
    if isinstance(event, CloseAsked):
        return f"closed by this process{', which ends: ' + event.failure if event.failure else ''}"
    return _WHY[type(event)]


_WHY: dict[type[StageEvent], str] = {
    Joined: "every member has committed",
    Announced: "subscribers know",
    RetireAsked: "its resources are released",
    Forked: "it belongs to the process that this one was forked from",
}
