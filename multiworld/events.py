"""Events of worlds, as frozen records, and the bus that publishes them.

`State`, `Cause` and `Breakage` are defined here because every layer uses them. Times are ``time.monotonic()``
seconds of the process that made the record.
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld.pending import PendingOperation

__all__ = [
    "Breakage", "Bus", "Cause", "Event", "MemberBusy", "State", "WorldActive", "WorldBroken", "WorldClosed",
    "WorldJoinFailed", "WorldJoining", "WorldReady", "WorldStateReceived", "WorldStuck", "WorldUnblocked",
    "bus", "subscribe",
]  # fmt: skip


E = TypeVar("E")
"""Base of the events of one bus: `Event` for worlds; the launcher has its own."""


class State(str, enum.Enum):
    """State of a world in this process."""

    JOINING = "joining"
    ACTIVE = "active"
    BROKEN = "broken"
    CLOSED = "closed"

    __str__ = str.__str__


class Cause(str, enum.Enum):
    """Why a world broke.

    Attributes:
        CRASHED: a member's connections were closed by its kernel.
        HUNG: its host answers, the process gave no sign of life for ``hang_timeout``.
        UNREACHABLE: its host acknowledges nothing.
        LEFT: it closed the world in good order.
        FAILED: an operation failed with a transport error before any other sign, or an exception ended its
            program.
    """

    CRASHED = "crashed"
    HUNG = "hung"
    UNREACHABLE = "unreachable"
    LEFT = "left"
    FAILED = "failed"

    __str__ = str.__str__


@dataclass(frozen=True)
class Breakage:
    """Why and when a generation of a world ended.

    Attributes:
        cause: the verdict.
        ranks: of the members that are the cause, ascending; empty where unknown.
        detail: the observation, in one sentence.
        at: ``time.monotonic()`` seconds of this process.
    """

    cause: Cause
    ranks: tuple[int, ...]
    detail: str
    at: float


@dataclass(frozen=True)
class Event:
    """Base of the events.

    Attributes:
        world: name.
        generation: 0 as long as it is not known.
        rank: this process's rank in the world.
        at: ``time.monotonic()`` seconds.
    """

    world: str
    generation: int
    rank: int
    at: float


@dataclass(frozen=True)
class WorldJoining(Event):
    """This process began to join."""


@dataclass(frozen=True)
class WorldActive(Event):
    """All `world_size` members have joined."""

    world_size: int


@dataclass(frozen=True)
class WorldJoinFailed(Event):
    """The join failed with `error`, which its caller got; an interrupt is told as `JoinAbandonedError`."""

    error: Exception


@dataclass(frozen=True)
class WorldBroken(Event):
    """The world broke."""

    breakage: Breakage


@dataclass(frozen=True)
class WorldUnblocked(Event):
    """All calls of this member have raised that were blocked when the world broke; only if there were some.

    `at` is when the last one did. It is published up to a second later, when the world may have been joined
    again.

    Attributes:
        calls: how many.
        seconds: that the last one took since the breakage.
    """

    calls: int
    seconds: float


@dataclass(frozen=True)
class WorldClosed(Event):
    """This process closed the world; its resources are free. Where it broke, that was told before.

    Not published for the handle of an old generation whose name was joined anew and is in use.
    """


@dataclass(frozen=True)
class WorldStateReceived(Event):
    """A part of the world's state has come; at most ten times a second, and at the end.

    Attributes:
        provider: rank of the member that sends it.
        received, total: bytes of tensors.
    """

    provider: int
    received: int
    total: int


@dataclass(frozen=True)
class WorldReady(Event):
    """This member of a world with a state has the latest one: what it serves from now on is right.

    Attributes:
        provider: rank of the member that it got the state from; -1 where it had it.
        seconds: that this took since the generation began.
    """

    provider: int
    seconds: float


@dataclass(frozen=True)
class MemberBusy(Event):
    """Members run, but gave no sign of life for ``hang_timeout``: most likely they hold the GIL.

    Attributes:
        ranks: of the members.
        busy: False when they answer again.
    """

    ranks: tuple[int, ...]
    busy: bool


@dataclass(frozen=True)
class WorldStuck(Event):
    """An operation of this member has waited for ``M8D_STUCK_AFTER`` seconds; published once for each.

    Not for what only waits to be given something to do (`PendingOperation.idle`).

    Attributes:
        operation: who waits in it, and what each missing member does instead, with the stacks of its threads.
    """

    operation: PendingOperation


class Bus(Generic[E]):
    """Calls subscribers with events, in the thread that publishes them.

    Publishing without subscribers costs very little. An exception of a subscriber (SystemExit and
    ``asyncio.CancelledError`` too: neither the thread nor a task is its own) is reported to ``on_error``; the
    other subscribers are still called.

    Args:
        on_error: called with the event and the exception; logs them by default.
        signals: exceptions, beside KeyboardInterrupt, that a signal handler may raise anywhere, inside a
            subscriber too. They are not an error of the subscriber: `publish` raises them.
    """

    def __init__(
        self,
        on_error: Callable[[E, BaseException], None] | None = None,
        *,
        signals: tuple[type[BaseException], ...] = (),
    ) -> None:
        self._subscribers: dict[_Entry[E], None] = {}
        self._on_error: Callable[[E, BaseException], None] = _logged if on_error is None else on_error
        self._signals: tuple[type[BaseException], ...] = (KeyboardInterrupt, *signals)

    def subscribe(self, fn: Callable[[E], None]) -> Callable[[], None]:
        """Call ``fn(event)`` for every event from now on.

        ``fn`` runs in the thread that observed the event (often the watchdog's): it must be quick and must
        not block.

        Returns:
            A function that ends the subscription; idempotent.
        """
        require_callable("subscribe", fn)
        # Changes of the dictionary are atomic, and publish() iterates over a snapshot: no lock is needed.
        entry = _Entry(fn)
        self._subscribers[entry] = None

        def unsubscribe() -> None:
            self._subscribers.pop(entry, None)

        return unsubscribe

    def publish(self, event: E) -> None:
        """Call every subscriber with `event`.

        Raises:
            BaseException: KeyboardInterrupt, or one of `signals`, once all subscribers were called.
        """
        signalled: BaseException | None = None
        # Not a tuple: that is allocated after the iteration has begun, and may begin a collection, in which a
        # destructor ends its subscription.
        for subscriber in list(self._subscribers):
            try:
                subscriber(event)
            except self._signals as came:  # noqa: PERF203  (one subscriber must not stop the others)
                signalled = came
            except BaseException as error:  # noqa: BLE001  (reported)
                self._on_error(event, error)
        if signalled is not None:
            raise signalled


def _logged(event: object, error: BaseException) -> None:
    logging.getLogger(__name__).error("a subscriber failed on %r", event, exc_info=error)


class _Entry(Generic[E]):
    """One subscription; two of the same function are two entries."""

    def __init__(self, fn: Callable[[E], None]) -> None:
        self._fn = fn

    def __call__(self, event: E) -> None:
        self._fn(event)


bus: Bus[Event] = Bus()
"""The process's bus: ``multiworld.events.bus.subscribe(print)``."""


def require_callable(name: str, fn: object) -> None:
    """Raise a TypeError where `fn`, given to the function `name`, cannot be called."""
    if not callable(fn):
        raise TypeError(f"{name}({fn!r}): it takes a function, which is called with what happens")


def subscribe(fn: Callable[[Event], None]) -> Callable[[], None]:
    """Call ``fn(event)`` for every event of this process's worlds; see `Bus.subscribe`."""
    return bus.subscribe(fn)
