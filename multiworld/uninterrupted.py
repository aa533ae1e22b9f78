"""Blocking operations of several steps, which an exception of a signal's handler does not leave half done.

If Ctrl-C came between two steps, or in one of them, the other members would wait for the next one, and take
the bytes of a later operation for it. So another thread runs the steps, and the caller, which Ctrl-C or
another handler's exception reaches, waits for it. The turn lasts until the last step: what the caller calls
after its exception is posted behind it.
"""

from __future__ import annotations

import contextvars
import threading
from typing import TYPE_CHECKING, TypeVar

from multiworld.turns import own_turn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiworld.turns import Turns, Way

__all__ = ["run"]

_T = TypeVar("_T")


def run(
    turns: Turns,
    ways: Sequence[Way],
    goes_on: Callable[[], bool],
    steps: Callable[[], _T],
    first: Callable[[], object] | None = None,
) -> _T:
    """Run the steps of an operation in its turn, to their end; return or raise what they do.

    Args:
        turns: of the world.
        ways: of the operation.
        goes_on: whether the world is active.
        steps: run in another thread if this is the main one, in which alone Python calls signals' handlers.
        first: a step before them that an exception takes back: nothing is left to be done then.

    Raises:
        RuntimeError: an operation that was called before it needs the event loop of this thread.
    """
    if threading.current_thread() is not threading.main_thread():
        turns.wait(ways, goes_on)
        if first is not None:
            first()
        return steps()
    turn, begun = turns.wait_and_take(ways, goes_on), False
    context, over = contextvars.copy_context(), threading.Event()
    results: list[_T] = []
    errors: list[BaseException] = []

    def run_steps() -> None:
        nonlocal begun
        begun = True
        try:
            with own_turn():
                results.append(context.run(steps))
        except BaseException as error:  # noqa: BLE001  (the caller raises it)
            errors.append(error)
        finally:
            turn.over()
            over.set()

    try:
        if first is not None:
            first()
        from multiworld._c10d.waiter_pool import pool  # noqa: PLC0415  (a world exists, so torch is loaded)

        try:
            pool.run(run_steps)
        except RuntimeError:  # the process gets no other thread
            run_steps()
    except BaseException:
        if not begun:
            turn.over()
        raise
    over.wait()  # the steps end by their own timeouts
    if errors:
        raise errors.pop()
    return results.pop()
