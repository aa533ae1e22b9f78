"""Sizes of `reduce_scatter_tensor` on gloo, compared before torch does: older torch ends the process by them.

Up to torch 2.12 gloo's operation calls ``abort()`` where output and input do not fit (seen in 2.4.0); 2.13
raises a RuntimeError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["METHODS", "NEEDED", "checked", "compare"]

_Options = TypeVar("_Options")
_W = TypeVar("_W")

NEEDED = tuple(int(each) for each in torch.__version__.split(".")[:2]) < (2, 13)
"""Whether this torch may end the process."""

METHODS = frozenset({"_reduce_scatter_base", "reduce_scatter_single"})
"""A ProcessGroup's methods for it, under their names in all versions of torch."""


def compare(output: object, given: object, members: int) -> None:
    """Raise if `given` has not one part for each member, each as `output`.

    Args:
        output: of this member; what is no tensor of the CPU is torch's to judge.
        given: of this member.
        members: of the group.

    Raises:
        ValueError: both are tensors of the CPU, and do not fit.
    """
    if not (isinstance(output, torch.Tensor) and isinstance(given, torch.Tensor)):
        return
    if not (output.is_cpu and given.is_cpu):
        return
    shapes = tuple(output.shape), tuple(given.shape)
    fits = bool(shapes[0]) and shapes[1] == (shapes[0][0] * members, *shapes[0][1:])
    if fits and output.dtype is given.dtype:
        return
    raise ValueError(
        f"reduce_scatter_tensor: an output of shape {shapes[0]} and {output.dtype} for an input "
        f"of shape {shapes[1]} and {given.dtype} among {members} members. The input has the output's dtype "
        "and one part for each member in its first dimension. Compare both."
    )


def checked(
    function: Callable[[Tensor, Tensor, _Options], _W], members: int
) -> Callable[[Tensor, Tensor, _Options], _W]:
    """Return `function`, a backend's method, with its sizes compared before, where that is needed."""
    if not NEEDED:
        return function

    def call(output: Tensor, given: Tensor, options: _Options) -> _W:
        compare(output, given, members)
        return function(output, given, options)

    return call
