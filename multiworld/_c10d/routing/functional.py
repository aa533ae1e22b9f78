"""torch's functional all-to-all, with gradients."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

__all__ = ["all_to_all_single"]


def all_to_all_single(
    tensor: Tensor, outputs: list[int], inputs: list[int], group: Any, world: Any
) -> Tensor:
    """Exchange rows with the ranks of `group`; complete when it returns, differentiable any number of times.

    Args:
        tensor: rows to send.
        outputs: rows that come from each rank.
        inputs: rows that go to each rank.
        group: a ProcessGroup.
        world: selected for the backward pass, so that its errors are the world's; None: the selected one.
    """
    result: Tensor = _Exchange.apply(tensor, outputs, inputs, group, world)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    """Replaces torch's own gradient, whose result in 2.6 cannot be waited for without losing it."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, outputs: list[int], inputs: list[int], group: Any, world: Any
    ) -> Tensor:
        ctx.way = (inputs, outputs, group, world)
        door: Any = funcol
        waited: Tensor = door.wait_tensor(door.all_to_all_single(tensor.contiguous(), outputs, inputs, group))
        return waited

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        outputs, inputs, group, world = ctx.way
        with world if world is not None else contextlib.nullcontext():
            back = _Exchange.apply(grads[0], outputs, inputs, group, world)  # type: ignore[no-untyped-call]
        return back, None, None, None, None
