"""The stack of selected worlds: one context variable, so one stack per thread and per asyncio task.

The stack is a tuple of `multiworld._c10d.routing.state.WorldState`, whose bottom is None (torch's own default
state). Its users are `multiworld._c10d.routing.selection` and each `WorldState`, which prepares its own
entry.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["EMPTY", "entering", "put", "top"]

EMPTY: tuple[Any, ...] = (None,)
"""The stack where no world is selected."""

_stack: ContextVar[tuple[Any, ...]] = ContextVar("multiworld_selection", default=EMPTY)

top = _stack.get
"""Return the whole stack; for code where every call counts: ``top()[-1]``."""

put = _stack.set
"""Replace the whole stack."""


def entering(state: object) -> Callable[[], None]:
    """Return a function that selects `state`, for a state that is entered again and again."""
    alone = (None, state)  # the stack of one block, the usual

    def enter_again() -> None:
        stack = top()
        put(alone if len(stack) == 1 else (*stack, state))

    return enter_again
