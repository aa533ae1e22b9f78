"""The states of a world, and what each happening makes of them.

`step` is the whole rule: ``step(state, event) -> (state, actions)``. It knows no torch, no sockets and no clock;
the owner of a world calls it under the world's lock and carries the actions out after releasing it.

::

    JOINING ── Joined ──────────────> ACTIVE
    JOINING ── JoinFailed, Broke ───> CLOSED
    JOINING, ACTIVE, BROKEN ── CloseAsked ──> CLOSED
    ACTIVE  ── Broke ───────────────> BROKEN

What comes late changes nothing: `Broke` in BROKEN or CLOSED (the first verdict holds), `CloseAsked` in CLOSED,
`Joined` and `JoinFailed` in CLOSED (the world was closed while it joined). Anything else is a fault of the
caller. A broken world never becomes active again: joining it again makes a new world, of the next generation.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from multiworld.events import Breakage, State

__all__ = ["Action", "Broke", "CloseAsked", "Happening", "IllegalStepError", "JoinFailed", "Joined", "step"]


class Action(enum.Enum):
    """What is to be done, in the order in which `step` gives it."""

    TELL_ACTIVE = "tell-active"
    """The join's caller gets the world; subscribers hear of it."""
    ABORT_GROUP = "abort-group"
    """Every pending operation of the process group raises, now."""
    TELL_BROKEN = "tell-broken"
    """``on_break`` callbacks and subscribers hear of it."""
    SAY_GOODBYE = "say-goodbye"
    """The other members learn that this one left in good order."""
    RELEASE = "release"
    """Group, connections, store and registry entry are given back."""
    TELL_JOIN_FAILED = "tell-join-failed"
    """Subscribers hear that the join came to nothing."""
    TELL_CLOSED = "tell-closed"
    """Subscribers hear that the world is closed."""


@dataclass(frozen=True)
class Joined:
    """Every member is there and said so."""


@dataclass(frozen=True)
class JoinFailed:
    """The join came to nothing: `error`."""

    error: Exception


@dataclass(frozen=True)
class Broke:
    """The watchdog's verdict."""

    breakage: Breakage


@dataclass(frozen=True)
class CloseAsked:
    """This process closes the world."""


Happening = Joined | JoinFailed | Broke | CloseAsked


class IllegalStepError(RuntimeError):
    """A happening that this state cannot see: a fault in this package, never the user's.

    Args:
        state: the world's.
        event: what came.
    """

    def __init__(self, state: State, event: Happening) -> None:
        self.state = state
        self.event = event
        super().__init__(f"{type(event).__name__} cannot happen to a world that is {state}")


_NOTHING: tuple[Action, ...] = ()

# (state, kind of happening) -> (next state, actions). A pair that is not here is illegal.
_TABLE: dict[tuple[State, type], tuple[State, tuple[Action, ...]]] = {
    (State.JOINING, Joined): (State.ACTIVE, (Action.TELL_ACTIVE,)),
    (State.JOINING, JoinFailed): (
        State.CLOSED,
        (Action.ABORT_GROUP, Action.RELEASE, Action.TELL_JOIN_FAILED),
    ),
    (State.JOINING, Broke): (State.CLOSED, (Action.ABORT_GROUP, Action.RELEASE, Action.TELL_JOIN_FAILED)),
    # The others are told first: their own joins then end at once instead of at their deadlines.
    (State.JOINING, CloseAsked): (
        State.CLOSED,
        (Action.SAY_GOODBYE, Action.ABORT_GROUP, Action.RELEASE, Action.TELL_JOIN_FAILED),
    ),
    (State.ACTIVE, Broke): (State.BROKEN, (Action.ABORT_GROUP, Action.TELL_BROKEN)),
    # Goodbye before the group goes: else the others see its connections close before they know why.
    (State.ACTIVE, CloseAsked): (
        State.CLOSED,
        (Action.SAY_GOODBYE, Action.ABORT_GROUP, Action.RELEASE, Action.TELL_CLOSED),
    ),
    # The group was aborted when the world broke.
    (State.BROKEN, CloseAsked): (State.CLOSED, (Action.RELEASE, Action.TELL_CLOSED)),
    (State.BROKEN, Broke): (State.BROKEN, _NOTHING),
    (State.CLOSED, Joined): (State.CLOSED, _NOTHING),
    (State.CLOSED, JoinFailed): (State.CLOSED, _NOTHING),
    (State.CLOSED, Broke): (State.CLOSED, _NOTHING),
    (State.CLOSED, CloseAsked): (State.CLOSED, _NOTHING),
}


def step(state: State, event: Happening) -> tuple[State, tuple[Action, ...]]:
    """Return the state after `event`, and what is to be done about it, in order.

    Raises:
        IllegalStepError: `event` cannot happen in `state`.
    """
    try:
        return _TABLE[state, type(event)]
    except KeyError:
        raise IllegalStepError(state, event) from None
