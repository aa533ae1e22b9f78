"""Differentiable all_to_all: exchanges pieces of a tensor between all ranks, and their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from multiworld.errors import UnknownWorldError
from multiworld.launch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from multiworld.world import World

__all__ = ["all_to_all"]


def all_to_all(
    tensor: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    world: World | str | None = None,
) -> Tensor:
    """Send a piece of `tensor` to every rank, and get one of each; gradients go the way back.

    Pieces are rows (dimension 0), in the order of the ranks. It can be differentiated more than once.

    Args:
        tensor: of shape (rows, ...), of any dtype the backend moves; all other dimensions are the same
            everywhere.
        output_split_sizes: rows that come from each rank. None, with `input_split_sizes` too: equal pieces.
        input_split_sizes: rows that go to each rank.
        group: a ``ProcessGroup``; None: the default group, or that of the world.
        world: a world or its name, where it is not selected by ``with`` already.

    Returns:
        A tensor of shape (sum of `output_split_sizes`, ...), complete.

    Raises:
        ConfigError: sizes do not fit the tensor or the group.
        BrokenWorldException: the world broke, with `world` given; in its backward pass too.
        UnknownWorldError: no world of that name here.
    """
    from multiworld._c10d.routing import functional

    made = _world(world)
    if made is None:
        return _exchanged(functional, tensor, output_split_sizes, input_split_sizes, group, None)
    with made:
        return _exchanged(functional, tensor, output_split_sizes, input_split_sizes, group, made)


def _exchanged(
    functional: Any,
    tensor: Tensor,
    outputs: Sequence[int] | None,
    inputs: Sequence[int] | None,
    group: Any,
    world: World | None,
) -> Tensor:
    import torch.distributed as dist

    group = dist.group.WORLD if group is None else group
    size = dist.get_world_size(group)
    given, taken = _sizes(tensor, outputs, inputs, size)
    result: Tensor = functional.all_to_all_single(tensor, given, taken, group, world)
    return result


def _sizes(
    tensor: Tensor, outputs: Sequence[int] | None, inputs: Sequence[int] | None, size: int
) -> tuple[list[int], list[int]]:
    shown = f"tensor of shape {tuple(tensor.shape)}, output_split_sizes={outputs}, input_split_sizes={inputs}"
    if tensor.dim() == 0:
        raise ConfigError(
            shown, rule="Rows are exchanged: the tensor has a dimension", next_step="Unsqueeze it"
        )
    rows = tensor.shape[0]
    if (outputs is None) != (inputs is None):
        raise ConfigError(shown, rule="Both sizes are given, or none", next_step="Give the other one too")
    if outputs is None or inputs is None:
        if rows % size:
            raise ConfigError(
                f"{shown}, {size} ranks",
                rule="Without sizes, the rows are divided equally",
                next_step="Give output_split_sizes and input_split_sizes, or another number of rows",
            )
        return [rows // size] * size, [rows // size] * size
    outputs, inputs = [int(each) for each in outputs], [int(each) for each in inputs]
    if len(outputs) != size or len(inputs) != size or min(*outputs, *inputs, 0) < 0 or sum(inputs) != rows:
        raise ConfigError(
            f"{shown}, {size} ranks",
            rule="There is one size for each rank, at least 0, and those of the input add up to its rows",
            next_step="Correct them",
        )
    return outputs, inputs


def _world(world: World | str | None) -> World | None:
    if not isinstance(world, str):
        return world
    from multiworld.world import worlds

    found = worlds().get(world)
    if found is None:
        raise UnknownWorldError(
            world,
            f"No world {world!r} in this process",
            rule=f"It has {sorted(worlds()) or 'none'}",
            next_step="Join it first",
        )
    return found
