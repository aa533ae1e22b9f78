"""Endings of a join's try: by which errors, and whether another try follows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiworld.errors import (
    BrokenWorldException,
    JoinAbandonedError,
    JoinTimeoutError,
    StaleGenerationError,
    StoreUnreachableError,
)

if TYPE_CHECKING:
    from multiworld._join.arguments import JoinPlan

__all__ = ["TRY_ENDS", "is_tried_again", "told_to_others"]

TRY_ENDS = (
    BrokenWorldException, JoinAbandonedError, JoinTimeoutError, StaleGenerationError, StoreUnreachableError,
)  # fmt: skip
"""Errors that end a try of a join whose rank is assigned: a member was lost, or late; the others go on."""


def is_tried_again(plan: JoinPlan, error: BaseException | None, *, agreed: bool) -> bool:
    """Whether a join whose rank is assigned begins again after an error; `agreed`: the try had a roster.

    A member that served the store is lost with it, and another process serves that address then. A store
    object is the caller's, and a store that was not reached at all has been waited for.
    """
    if isinstance(error, StoreUnreachableError):
        return agreed and isinstance(plan.store, str)
    return isinstance(error, TRY_ENDS)


def told_to_others(plan: JoinPlan, error: BaseException) -> Exception:
    """Return what members and subscribers are told: the error, or that the join was interrupted."""
    if isinstance(error, Exception):
        return error
    return JoinAbandonedError(
        plan.name, f"the join of {plan.who} of world {plan.name!r} was interrupted ({type(error).__name__})"
    )
