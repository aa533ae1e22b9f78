"""M8D_CHECK=1: before a collective begins, the members of its group compare what each has called."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed import ReduceOp

from multiworld.errors import CollectiveMismatchError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

__all__ = ["described", "difference", "record"]

_SIZE = 128  # bytes of a record
_OPERATIONS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG", "PREMUL_SUM")
_NAMES = {hash(getattr(ReduceOp, name)): name for name in _OPERATIONS}

# By method: torch's name of the operation, and which argument has the tensor that is alike on all members.
_CALLS: dict[str, tuple[str, int | None]] = {
    "allreduce": ("all_reduce", 0),
    "reduce": ("reduce", 0),
    "broadcast": ("broadcast", 0),
    "allgather": ("all_gather", 1),
    "_allgather_base": ("all_gather_into_tensor", 1),
    "all_gather_single": ("all_gather_into_tensor", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "reduce_scatter": ("reduce_scatter", 0),
    "_reduce_scatter_base": ("reduce_scatter_tensor", 0),
    "reduce_scatter_single": ("reduce_scatter_tensor", 0),
    "alltoall": ("all_to_all", None),
    "alltoall_base": ("all_to_all_single", None),
    "all_to_all_single": ("all_to_all_single", None),
    "barrier": ("barrier", None),
}


def described(name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> str:
    """Say what a call of a ProcessGroup's method asks for, as far as all members have to ask for the same.

    Shapes are not said: gloo and the lane compare none.
    """
    said, at = _CALLS[name]
    tensor = _first(args[at]) if at is not None and at < len(args) else None
    if tensor is not None:
        # Of a sparse tensor, which has no nbytes, as if it were dense: members may have different elements.
        nbytes = tensor.numel() * tensor.element_size()
        said += f" of {nbytes} bytes of {str(tensor.dtype).removeprefix('torch.')}"
    options = kwargs.get("opts", args[-1] if args else None)
    if hasattr(options, "reduceOp"):
        said += f", {_NAMES.get(hash(options.reduceOp), 'another operation')}"
    if hasattr(options, "rootRank"):
        said += f", root {options.rootRank}"
    return said


def record(said: str) -> Tensor:
    """Return the bytes that the members exchange."""
    return torch.tensor(list(said.encode()[:_SIZE].ljust(_SIZE)), dtype=torch.uint8, device="cpu")


def difference(world: str, records: list[Tensor]) -> CollectiveMismatchError | None:
    """Return what is raised where not all members have called the same; None where they have."""
    calls = tuple(bytes(each.tolist()).decode(errors="replace").rstrip() for each in records)
    if len(set(calls)) == 1:
        return None
    by_call: dict[str, list[int]] = {}
    for rank, each in enumerate(calls):
        by_call.setdefault(each, []).append(rank)
    told = "; ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} called {each}"
        for each, ranks in by_call.items()
    )
    return CollectiveMismatchError(
        world,
        f"the members of a group of world {world!r} called different collectives: {told}",
        rule="All members of a group call the same collectives in the same order, with the same sizes",
        next_step="Compare the calls; no tensor has changed, and the world goes on",
        calls=calls,
    )


def _first(given: object) -> Tensor | None:
    while isinstance(given, list | tuple):
        if not given:
            return None
        given = given[0]
    return given if isinstance(given, torch.Tensor) else None
