"""Sharded tensors of members that are left, put together for the members that are there now."""

from __future__ import annotations

import json
import math
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from multiworld._core.resharding import Box, plan
from multiworld._core.state_tree import dotted, flatten
from multiworld.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from multiworld._core.resharding import ShardPart

__all__ = ["reshard"]

_ALL = ((None, None, None),)
"""The ways (`multiworld.turns`) of what takes collectives and messages, on any device."""


def reshard(world: Any, have: Mapping[str, Any] | None, want: Mapping[str, Any], step: int) -> list[str]:
    """Fill the tensors of `want` with the values that the members together have, over their connections.

    For models and optimizers of FSDP2 and HSDP, when their world has changed: `have` is their state as the
    generation before left it, `want` that of those that were made anew on a mesh of this generation. Each
    member gets what it wants from itself or from others; the whole tensors are nowhere needed. Where a shard
    was lost, and no other member has a replica of it, load a checkpoint.

    All members call this together, outside of other operations. What is not a tensor stays as it is in
    `want`. It takes the memory of the largest tensor beside both states.

    Args:
        world: a `multiworld.World`, active.
        have: nested dicts and lists with DTensors, whole tensors and other values, as ``state_dict()`` has
            them; None if this member has nothing.
        want: the same, with tensors of any sharding. Their values are replaced.
        step: after which `have` is. If it is not the same on all members that have something, nothing of it
            fits together: all tensors are missing then.

    Returns:
        The tensors of which some part is nowhere, by name; all members get the same. If there are any,
        nothing was changed.

    Raises:
        BrokenWorldException: a member was lost, or had an error of its own, as for want of memory. `want` is
            undefined; `have` is as it was.
        StateError: a state has something else than dicts, lists, tuples, numbers, text and tensors, or a
            tensor whose shards are not contiguous: ``_StridedShard`` without the ``Shard`` that completes it.
        RuntimeError: a tensor has partial values (placement ``Partial``).
    """
    here = world._pinned()  # all steps are of one generation
    with torch.no_grad():
        mine, wanted = _shards({} if have is None else have), _shards(want)
    told = [{name: box for name, (_, box) in each.items()} for each in (mine, wanted)]
    text = json.dumps([None if have is None else step, *told]).encode()

    @torch.no_grad()  # of the thread that runs it
    def steps() -> list[str]:
        datas = here.gather_bytes(text)
        with here.steps("reshard", begun=True):
            everyones = [json.loads(bytes(each.tolist())) for each in datas]
            theirs, wants = ([_boxes(each[at]) for each in everyones] for at in (1, 2))
            if len({each[0] for each in everyones} - {None}) > 1:
                theirs = [{} for _ in everyones]
            pieces, missing = plan(theirs, wants)
            if missing:
                return [dotted(json.loads(name)[0]) for name in missing]
            for _, some in groupby(pieces, key=attrgetter("name")):
                _exchange(here, list(some), mine, wanted)
        return []

    found: list[str] = world._in_turn(_ALL, steps)
    return found


def _exchange(
    world: Any,
    pieces: list[ShardPart],
    mine: Mapping[str, tuple[Tensor, Box]],
    wanted: Mapping[str, tuple[Tensor, Box]],
) -> None:
    """Give and get the pieces of one tensor."""
    works, came = [], []
    for piece in pieces:
        if piece.source == world.rank:
            given = _view(mine[piece.name], piece.box)
            if piece.target == world.rank:
                came.append((wanted[piece.name], piece.box, given))
            else:
                works.append(world.isend(given.contiguous(), piece.target))
        elif piece.target == world.rank:
            room = torch.empty_like(
                _view(wanted[piece.name], piece.box), memory_format=torch.contiguous_format
            )
            works.append(world.irecv(room, piece.source))
            came.append((wanted[piece.name], piece.box, room))
    for work in works:
        work.wait()
    for shard, box, values in came:
        _view(shard, box).copy_(values)


def _shards(state: Mapping[str, Any]) -> dict[str, tuple[Tensor, Box]]:
    """Return what is here of each tensor of a state: its name, dtype and shape; the values, and where."""
    found = {}
    for path, tensor in flatten(_plain(state), _is_tensor)[1]:
        local, box = tensor.detach(), Box((0,) * tensor.dim(), tuple(tensor.shape))
        if hasattr(tensor, "__create_chunk_list__"):  # a DTensor: what distributed checkpoints ask it
            chunks = tensor.__create_chunk_list__()  # raises where a placement is partial, on all members
            if not _is_contiguous(tensor):  # on all members alike
                raise StateError(
                    f"{dotted(path)} has the placements {tuple(tensor.placements)}: a shard is in pieces",
                    rule="A shard is one block: of Shard, or of FSDP2 over a Shard of the same dimension",
                    next_step="Redistribute it to Shard or Replicate before, or load a checkpoint",
                )
            if tensor.device_mesh.get_coordinate() is None:
                continue  # this member is not in its mesh: it has none of it, not even a number of dimensions
            local = tensor.to_local()
            box = Box(*(tuple(map(int, each)) for each in (chunks[0].offsets, chunks[0].sizes)))
        found[json.dumps([path, str(tensor.dtype), list(tensor.shape)])] = (local, box)
    return found


def _is_contiguous(tensor: Any) -> bool:
    """Whether the shards of a DTensor are contiguous blocks.

    A ``_StridedShard`` takes a part of each of `split_factor` blocks of the tensor. Of FSDP2's, the later
    placements of that dimension, its tensor parallelism, leave a shard just one of these blocks.
    """
    later: dict[int, list[int]] = {}  # by dimension: into how many the placements after this one split it
    for at, placement in reversed(tuple(enumerate(tensor.placements))):
        splits = tensor.device_mesh.shape[at]
        dim, blocks = getattr(placement, "dim", None), getattr(placement, "split_factor", 1)
        if dim is None or splits == 1:
            continue
        after = later.setdefault(dim, [])
        # Several after each other make blocks of the same size only of what they split evenly.
        if blocks > 1 and (blocks != math.prod(after) or (len(after) > 1 and tensor.shape[dim] % blocks)):
            return False
        after.append(splits)
    return True


def _plain(value: Any) -> Any:
    """Return a nested value without what is neither a container nor a tensor: it is not moved."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if _is_tensor(value) else None


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _boxes(told: Mapping[str, list[list[int]]]) -> dict[str, Box]:
    return {name: Box(tuple(start), tuple(size)) for name, (start, size) in told.items()}


def _view(shard: tuple[Tensor, Box], box: Box) -> Tensor:
    """Return a part of a tensor of which `shard` is here."""
    local, own = shard
    for at, (start, size) in enumerate(zip(*box, strict=True)):
        local = local.narrow(at, start - own.start[at], size)
    return local
