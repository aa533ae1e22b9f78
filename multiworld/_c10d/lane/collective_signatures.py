"""Calls of torch on a ProcessGroup for a collective, and what each is over the lane.

torch.distributed's functions end in one call of a method each, with tensors first and options last. Calls of
another form, which only programs make that use a ProcessGroup themselves, stay with torch if they are not
listed here.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from multiworld._c10d.lane.collective import Collective
    from multiworld._c10d.lane.collective_dispatch import GroupCollectives

    Args = tuple[Any, ...]

__all__ = ["METHODS", "awaited", "of"]


def of(group: GroupCollectives, name: str, args: Args, kwargs: Mapping[str, Any]) -> Collective | None:
    """Return the collective that a call means; None where it is torch's to do, or to refuse.

    Args:
        group: that it was called on.
        name: of the ProcessGroup's method.
        args: of it.
        kwargs: of it.
    """
    if kwargs:
        if tuple(kwargs) != ("opts",):
            return None
        args = (*args, kwargs["opts"])
    return METHODS[name](group, args)


def awaited(args: Args) -> Args | None:
    """Return arguments with results of torch's functional collectives waited for; None where there are none.

    Torch unwraps such a tensor inside of its own operation, which would then be over gloo in this member, and
    over the lane in those that pass plain tensors.

    Args:
        args: of a ProcessGroup's method: tensors, lists of them, lists of such lists, and options.
    """
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if functional is None:
        return None
    found = False

    def inside(given: Any) -> Any:
        nonlocal found
        if isinstance(given, functional.AsyncCollectiveTensor):
            found = True
            return given.trigger_wait()
        return [inside(each) for each in given] if isinstance(given, list | tuple) else given

    waited = tuple(map(inside, args))
    return waited if found else None


def _single(given: Any) -> Any:
    """Return the tensor of a list of one."""
    return given[0] if isinstance(given, list | tuple) and len(given) == 1 else None


def _lists(given: Any) -> Sequence[Any]:
    """Return the list in a list of one; nothing of an empty one, as other members than the root have it."""
    return () if isinstance(given, list | tuple) and not given else _single(given)


def _allreduce(group: GroupCollectives, args: Args) -> Collective | None:
    if len(args) not in {1, 2}:
        return None
    option: Any = args[1] if len(args) == 2 else None  # torch takes an operation as well, or nothing
    op = option.reduceOp if hasattr(option, "reduceOp") else option
    tensor = args[0] if isinstance(args[0], Tensor) else _single(args[0])
    return None if tensor is None else group.all_reduce(tensor, op)


def _reduce(group: GroupCollectives, args: Args) -> Collective | None:
    if len(args) != 2 or (tensor := _single(args[0])) is None or getattr(args[1], "rootTensor", True):
        return None
    return group.reduce(tensor, args[1].rootRank, args[1].reduceOp)


def _broadcast(group: GroupCollectives, args: Args) -> Collective | None:
    if len(args) != 2 or (tensor := _single(args[0])) is None or getattr(args[1], "rootTensor", True):
        return None
    return group.broadcast(tensor, args[1].rootRank)


def _allgather(group: GroupCollectives, args: Args) -> Collective | None:
    if len(args) not in {2, 3} or (tensor := _single(args[1])) is None:
        return None
    outputs = _single(args[0])
    return None if not outputs else group.all_gather(outputs, tensor)


def _allgather_base(group: GroupCollectives, args: Args) -> Collective | None:
    return group.all_gather_into_tensor(args[0], args[1]) if len(args) in {2, 3} else None


def _gather(group: GroupCollectives, args: Args) -> Collective | None:
    if len(args) != 3 or not hasattr(args[2], "rootRank"):
        return None
    tensor, outputs = _single(args[1]), _lists(args[0])
    if tensor is None or outputs is None:
        return None
    return group.gather(tensor, outputs, args[2].rootRank)


def _scatter(group: GroupCollectives, args: Args) -> Collective | None:
    if len(args) != 3 or not hasattr(args[2], "rootRank"):
        return None
    tensor, given = _single(args[0]), _lists(args[1])
    if tensor is None or given is None:
        return None
    return group.scatter(tensor, given, args[2].rootRank)


def _reduce_scatter(group: GroupCollectives, args: Args) -> Collective | None:
    if len(args) != 3 or not hasattr(args[2], "reduceOp"):
        return None
    tensor, given = _single(args[0]), _single(args[1])
    if tensor is None or not given:
        return None
    return group.reduce_scatter(tensor, given, args[2].reduceOp)


def _reduce_scatter_base(group: GroupCollectives, args: Args) -> Collective | None:
    if len(args) != 3 or not hasattr(args[2], "reduceOp"):
        return None
    return group.reduce_scatter_tensor(args[0], args[1], args[2].reduceOp)


def _alltoall(group: GroupCollectives, args: Args) -> Collective | None:
    return group.all_to_all(args[0], args[1]) if len(args) in {2, 3} else None


def _alltoall_base(group: GroupCollectives, args: Args) -> Collective | None:
    return group.all_to_all_single(*args[:4]) if len(args) in {4, 5} else None


def _barrier(group: GroupCollectives, args: Args) -> Collective | None:
    return group.barrier() if len(args) < 2 else None


METHODS: dict[str, Callable[[GroupCollectives, Args], Collective | None]] = {
    "allreduce": _allreduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "allgather": _allgather,
    "_allgather_base": _allgather_base,
    "all_gather_single": _allgather_base,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "_reduce_scatter_base": _reduce_scatter_base,
    "reduce_scatter_single": _reduce_scatter_base,
    "alltoall": _alltoall,
    "alltoall_base": _alltoall_base,
    "all_to_all_single": _alltoall_base,
    "barrier": _barrier,
}
"""The methods of a ProcessGroup, under their names in all versions of torch."""
