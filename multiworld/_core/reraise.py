"""Raise one exception in place of another without reference cycles."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["no_tensor", "not_a_tensor", "raise_instead"]


def raise_instead(error: BaseException, instead: BaseException | None) -> NoReturn:
    """Raise `instead`, with `error` as its cause; `error` itself where `instead` is None or the same.

    Call it in the handler of `error` and create `instead` in the argument: a variable for it, in the caller
    or here, would make frame and exception refer to each other and keep torch's work and gloo's device alive
    until the next GC cycle.
    """
    try:
        if instead is None or instead is error:
            raise error
        raise instead from error
    finally:
        del error, instead


def not_a_tensor(error: Exception) -> TypeError | None:
    """Return a TypeError if `error` shows that an operation was given no tensor; None otherwise."""
    if not isinstance(error, AttributeError) or error.name != "device":
        return None
    return no_tensor(error.obj)


def no_tensor(given: object) -> TypeError:
    """Return what an operation raises that was given this instead of a tensor."""
    return TypeError(f"{given!r:.80} is a {type(given).__name__}, and an operation takes a torch.Tensor")
