"""Raising one exception in the place of another, without leaving anything behind."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["raise_instead"]


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
