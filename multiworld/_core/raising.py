"""Raising one exception in the place of another, without leaving anything behind."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["not_a_tensor", "raise_instead"]


def raise_instead(error: BaseException, instead: BaseException | None) -> NoReturn:
    """Raise `instead`, with `error` as its cause; `error` itself where `instead` is None or the same.

    To be called where `error` is being handled, with `instead` as it is made: a variable for it in the caller, or
    in here, would make frame and exception hold each other, and with them torch's work and gloo's device, until the
    garbage collector comes by.
    """
    try:
        if instead is None or instead is error:
            raise error
        raise instead from error
    finally:
        del error, instead


def not_a_tensor(error: Exception) -> TypeError | None:
    """Return what is to be raised where `error` shows that an operation was given something that is no tensor."""
    if not isinstance(error, AttributeError) or error.name != "device":
        return None
    return TypeError(
        f"{error.obj!r:.80} is a {type(error.obj).__name__}, and an operation takes a torch.Tensor"
    )
