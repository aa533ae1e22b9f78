"""Opening and calling stores within a deadline, even those whose calls block.

torch, a file system and a resolver may block without a limit. They run in a thread that is abandoned at the
deadline and closes a store that it opens later.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

from multiworld._net.patience import NoAnswerError, NoThreadError, in_time
from multiworld.errors import JoinAbandonedError, StoreUnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store

    from multiworld._net.stores.store import StoreHandle

__all__ = ["in_time_for", "open_in_time"]

_SLACK = 0.25
"""Seconds after the deadline in which the store may report its own error."""

_PARTING = 0.05
"""Seconds for that report where the join is cancelled."""

_ANSWER = 1.0
"""Seconds that a call may take when the deadline of the join is over, or near."""


def open_in_time(
    store: str | Store,
    *,
    world: str,
    serve: bool,
    only: bool = True,
    known: bool = False,
    process: str = "",
    deadline: float,
    cancelled: Callable[[], bool],
) -> StoreHandle:
    """Open a store as `multiworld._net.stores.store.open_store`, within `deadline` in any case.

    Raises:
        JoinError: of `open_store`'s kinds.
        JoinAbandonedError: cancelled, or the host has no thread left.
    """
    from multiworld._net.stores.store import open_store  # noqa: PLC0415  (loads torch)

    given_up = threading.Event()
    opened: list[StoreHandle] = []  # taken by the caller or, after the deadline, by the thread

    def work() -> None:
        opened.append(
            open_store(
                store,
                world=world,
                serve=serve,
                only=only,
                known=known,
                process=process,
                deadline=deadline,
                cancelled=lambda: cancelled() or given_up.is_set(),
            )
        )
        if given_up.is_set():
            _close(opened)

    try:
        _bounded(work, world, _until(deadline), cancelled, given_up.set)
    except BaseException:
        given_up.set()
        _close(opened)
        raise
    return opened.pop()


def in_time_for(
    store: StoreHandle, *, world: str, deadline: float, cancelled: Callable[[], bool]
) -> Callable[..., Any] | None:
    """Return a caller that bounds a store's calls by `deadline`; None where they keep it themselves."""
    if store.keeps_deadlines:
        return None

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        return _bounded(lambda: function(*arguments), world, _until(deadline), cancelled, _nothing)

    return call


def _until(deadline: float) -> float:
    return max(deadline + _SLACK, time.monotonic() + _ANSWER)


def _bounded(
    function: Callable[[], Any],
    world: str,
    deadline: float,
    cancelled: Callable[[], bool],
    give_up: Callable[[], None],
) -> Any:
    try:
        return in_time(
            function,
            deadline=deadline,
            clock=time.monotonic,
            hurry=cancelled,
            give_up=give_up,
            parting=_PARTING,
            last_words=0.0,
        )
    except NoThreadError as error:
        raise error.abandoned(world) from error
    except NoAnswerError as error:
        if cancelled():
            raise JoinAbandonedError(world, f"The join of world {world!r} was given up") from error
        raise StoreUnreachableError(
            world,
            f"The store of world {world!r} gave {error}: torch, a file system or a name server blocks there",
            rule="The store has to answer as long as a world is joined",
            next_step="See that its host, its name server or its file system answers; then join again",
        ) from error


def _close(opened: list[StoreHandle]) -> None:
    with contextlib.suppress(IndexError):  # the other thread took it
        opened.pop().close()


def _nothing() -> None:
    """No report is needed."""
