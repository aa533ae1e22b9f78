"""The table of a world's operations: one row for the blocking, the awaitable and the communicator's form.

A collective's method, of `World` or `World.aio`, is a signature, a docstring and one call with the name of
its row. Messages (`send`, `recv`, ...) and object collectives have methods of their own, whose rows say what
their forms have in common. `tests/contract/operations/test_operations.py` holds every form to the table:
signatures, docstrings, values and errors.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from multiworld._c10d.routing.stack import put, top
from multiworld._core.reraise import no_tensor, not_a_tensor, raise_instead
from multiworld.errors import WrongDeviceError
from multiworld.events import State
from multiworld.work import WorldWork

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.distributed import ReduceOp, Work

    from multiworld._c10d.lane.collective import Collective
    from multiworld._generation.generation import Generation

    ReduceOperation: TypeAlias = ReduceOp | ReduceOp.RedOpType

__all__ = [
    "TABLE",
    "Operation",
    "better",
    "call",
    "check_device",
    "flat",
    "inside",
    "peer",
    "require_others",
    "reraise",
]

_RENAMED = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}
"""torch 2.13 renamed these and warns of the old name; an older torch has only the old one."""


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        name: of the methods, and of torch.distributed's function.
        parameters: in torch's names and order, without ``group`` and ``async_op``; `src` and `dst` are ranks
            of the world.
        post: ``(generation, *arguments) -> work or None``, the direct way: posts to the backend itself
            (`multiworld._c10d.gloo.fast_path`), or returns None where only torch's function means the same.
            None where there is no such way.
        by_name: whether torch's function takes them at other places.
    """

    name: str
    parameters: str
    post: Callable[..., Work | None] | None = None
    by_name: bool = False

    @functools.cached_property
    def over_lane(self) -> Callable[..., Collective | None]:
        """``(group, *arguments) -> collective or None``: the collective over the lane."""
        from multiworld._c10d.lane.collective_dispatch import GroupCollectives  # noqa: PLC0415  (torch is loaded)

        method: Callable[..., Collective | None] = getattr(GroupCollectives, self.name)
        return method

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The parameters' names."""
        return tuple(each.partition("=")[0] for each in self.parameters.split(", "))

    @functools.cached_property
    def required(self) -> int:
        """How many parameters have no default. None for one that has means torch's own default."""
        return sum("=" not in each for each in self.parameters.split(", "))


# -- the direct way ------------------------------------------------------------------------------------------
# `gen.direct` is kept in no variable: a traceback would keep it, and with it the backend's sockets.


def _broadcast(gen: Generation, tensor: Tensor, src: int) -> Work | None:
    if not gen.direct.takes(tensor):
        return None
    options = gen.direct.broadcast_options()
    options.rootRank = src
    return gen.direct.broadcast([tensor], options)


def _reduce(gen: Generation, tensor: Tensor, dst: int, op: ReduceOp | None = None) -> Work | None:
    if not gen.direct.takes(tensor):
        return None
    options = gen.direct.reduce_options()
    options.rootRank = dst
    if op is not None:
        options.reduceOp = op
    return gen.direct.reduce([tensor], options)


def _all_reduce(gen: Generation, tensor: Tensor, op: ReduceOp | None = None) -> Work | None:
    if not gen.direct.takes(tensor):
        return None
    return gen.direct.allreduce([tensor], gen.direct.summing if op is None else gen.direct.reducing(op))


def _all_gather(gen: Generation, tensor_list: list[Tensor], tensor: Tensor) -> Work | None:
    if type(tensor_list) is not list or not gen.direct.takes(tensor, *tensor_list):
        return None
    for each in tensor_list:
        if each.dtype is not tensor.dtype:
            return None
    return gen.direct.allgather([tensor_list], [tensor], gen.direct.gathering)


def _all_gather_into_tensor(gen: Generation, output_tensor: Tensor, input_tensor: Tensor) -> Work | None:
    if not gen.direct.takes(output_tensor, input_tensor):
        return None
    return gen.direct.gather_into(output_tensor, input_tensor, gen.direct.gathering)


def _reduce_scatter_tensor(
    gen: Generation, output: Tensor, given: Tensor, op: ReduceOp | None = None
) -> Work | None:
    if not gen.direct.takes(output, given):
        return None
    return gen.direct.scatter_from(
        output, given, gen.direct.summing_parts if op is None else gen.direct.reducing_parts(op)
    )


def _barrier(gen: Generation, device_ids: Sequence[int] | None = None) -> Work | None:
    if device_ids is not None or not gen.direct.calm():
        return None
    return gen.direct.barrier(gen.direct.waiting)


# -- the table -----------------------------------------------------------------------------------------------

_SIZES = "output_split_sizes=None, input_split_sizes=None"
_SCATTERED = "scatter_object_output_list, scatter_object_input_list=None, src=0"

_ROWS = (
    Operation("send", "tensor, dst, tag=0"),
    Operation("recv", "tensor, src=None, tag=0"),
    Operation("isend", "tensor, dst, tag=0"),
    Operation("irecv", "tensor, src=None, tag=0"),
    Operation("batch_isend_irecv", "p2p_op_list"),
    Operation("broadcast", "tensor, src", _broadcast),
    Operation("reduce", "tensor, dst, op=None", _reduce),
    Operation("gather", "tensor, gather_list=None, dst=0"),
    Operation("scatter", "tensor, scatter_list=None, src=0"),
    Operation("all_reduce", "tensor, op=None", _all_reduce),
    Operation("all_gather", "tensor_list, tensor", _all_gather),
    Operation("all_gather_into_tensor", "output_tensor, input_tensor", _all_gather_into_tensor),
    Operation("reduce_scatter", "output, input_list, op=None"),
    Operation("reduce_scatter_tensor", "output, input, op=None", _reduce_scatter_tensor),
    Operation("all_to_all", "output_tensor_list, input_tensor_list"),
    Operation("all_to_all_single", f"output, input, {_SIZES}"),
    Operation("barrier", "device_ids=None", _barrier, by_name=True),
    Operation("send_object_list", "object_list, dst, device=None"),
    Operation("recv_object_list", "object_list, src=None, device=None, *, weights_only=True"),
    Operation("broadcast_object_list", "object_list, src=0, device=None, *, weights_only=True"),
    Operation("all_gather_object", "object_list, obj, *, weights_only=True"),
    Operation("gather_object", "obj, object_gather_list=None, dst=0, *, weights_only=True"),
    Operation("scatter_object_list", f"{_SCATTERED}, *, weights_only=True"),
)
TABLE: dict[str, Operation] = {each.name: each for each in _ROWS}
"""The rows, by name."""


# -- torch's own way -----------------------------------------------------------------------------------------


def call(gen: Generation, row: Operation, args: tuple[object, ...], async_op: bool) -> WorldWork | None:
    """Run torch's function of `row` in the world of `gen`; return its work, wrapped, with `async_op`.

    Args:
        gen: the generation.
        row: of the table.
        args: as in ``row.parameters``.
        async_op: as in torch.
    """
    from torch import Tensor  # noqa: PLC0415  (a world exists, so torch is loaded)

    for arg in args:
        for each in arg if isinstance(arg, list) else (arg,):
            if isinstance(each, Tensor):  # NumPy's numbers, which may be ranks and sizes, have a device, too
                check_device(gen, each)
    while len(args) > row.required and args[-1] is None:
        args = args[:-1]
    work: Work | None
    if row.by_name:
        work = inside(gen, row.name, async_op=async_op, **dict(zip(row.names, args, strict=False)))
    else:
        work = inside(gen, row.name, *args, async_op=async_op)
    return WorldWork(work, gen) if async_op and work is not None else None


def inside(gen: Generation, name: str, *args: object, **kwargs: object) -> Any:
    """Call torch.distributed's function `name` with the world of `gen` selected, errors translated."""
    import torch.distributed as dist  # noqa: PLC0415  (a world exists, so torch is loaded)

    from multiworld._c10d.nccl import coalescing  # noqa: PLC0415  (a world exists, so torch is loaded)

    state = gen.c10d
    if state is None:
        raise gen.error()
    fn = getattr(dist, _RENAMED.get(name, name), None) or getattr(dist, name)
    before = top()
    try:
        state.enter()
        return fn(*args, **kwargs)
    except BaseException as exc:
        if state.traffic is not None:
            coalescing.close_left(state.traffic)
        if isinstance(exc, Exception):
            reraise(gen, exc)
        raise
    finally:
        put(before)  # in one call of C, which no signal's handler comes in between of


# -- arguments and errors ------------------------------------------------------------------------------------


def check_device(gen: Generation, tensor: Tensor) -> None:
    """Raise if the backend cannot reach the tensor's device: gen's own error, where it is over already."""
    device = tensor.device
    kind = getattr(device, "type", None)
    if kind in gen.device_types:
        return
    if kind is None:  # a NumPy array has a device, which is a text
        raise no_tensor(tensor)
    if gen.state is not State.ACTIVE:
        raise gen.error()
    raise WrongDeviceError(
        gen.world,
        f"a tensor on device {device} in world {gen.world!r}",
        rule=f"Its backend reaches tensors on: {', '.join(sorted(gen.device_types))}",
        next_step="Move the tensor, or join with a backend for its device, as backend='cpu:gloo,cuda:nccl'",
    )


def flat(gen: Generation, tensor: Tensor) -> Tensor:
    """Return what is given to the process group to send `tensor`, or to receive into it."""
    # torch takes a meta tensor, and sends nothing.
    check_device(gen, tensor)
    # As torch's own functions do: complex numbers travel as pairs of reals.
    if tensor.is_complex():
        import torch  # noqa: PLC0415  (a tensor exists, so torch is loaded)

        return torch.view_as_real(tensor)
    return tensor


def peer(gen: Generation, rank: int) -> int:
    """Return `rank` as an int; raise TypeError if it is none, ValueError if no other member has it."""
    rank = index(rank)  # the lane finds its connection by it
    if 0 <= rank < gen.size and rank != gen.rank:
        return rank
    raise ValueError(
        f"rank {rank} is not a peer in world {gen.world!r}. Ranks are 0 to {gen.size - 1}, and this process "
        f"is rank {gen.rank}. Name another member."
    )


def require_others(gen: Generation) -> None:
    """Raise ValueError for a receive from any source in a world of one."""
    if gen.size == 1 and gen.state is State.ACTIVE:
        raise ValueError(
            f"rank {gen.rank} is alone in world {gen.world!r}: "
            "there is no other member that a message could come from"
        )


def better(gen: Generation, error: Exception) -> BaseException:
    """Return what an operation of `gen` raises for `error`; may wait for a verdict."""
    return not_a_tensor(error) or gen.explain(error)


def reraise(gen: Generation, error: Exception) -> NoReturn:
    """Raise what an operation of `gen` raises for `error`."""
    try:
        raise_instead(error, better(gen, error))
    finally:
        del error  # else this frame and the exception hold each other, and torch's frames the work
