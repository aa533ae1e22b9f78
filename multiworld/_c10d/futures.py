"""torch's futures that fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from multiworld._core.reraise import as_new

if TYPE_CHECKING:
    import torch

__all__ = ["fail"]


def fail(future: torch.futures.Future[Any], error: BaseException) -> None:
    """Complete a future with an exception, which each `wait` and `value` raises as a new one.

    `set_exception` raises the instance that the future keeps in C++. That has then the frame of `wait`, which
    holds the future: a cycle through C++, which no collection frees.
    """

    def raise_new(kept: BaseException) -> NoReturn:
        raise as_new(kept)

    future._set_unwrap_func(raise_new)
    future.set_result(as_new(error))
