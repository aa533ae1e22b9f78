"""Reductions of tensors that collectives over the lane carry out, and the memory that they need meanwhile."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

import torch
from torch.distributed import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Kernel = Callable[..., Tensor]

__all__ = ["PIECE", "Scratch", "kernel", "reduce_into"]

_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64})
_NUMBERS = _INTEGERS | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
"""What gloo reduces; of bool, int16 and others torch says what it means, or that it means nothing."""

# By what both `ReduceOp` and its members have as their hash, the operation's number in C++. AVG and
# PREMUL_SUM are not gloo's, either.
_OF_NUMBERS: dict[int, Kernel] = {
    hash(ReduceOp.SUM): torch.add,
    hash(ReduceOp.PRODUCT): torch.mul,
    hash(ReduceOp.MIN): torch.minimum,
    hash(ReduceOp.MAX): torch.maximum,
}
_OF_INTEGERS: dict[int, Kernel] = {
    hash(ReduceOp.BAND): torch.bitwise_and,
    hash(ReduceOp.BOR): torch.bitwise_or,
    hash(ReduceOp.BXOR): torch.bitwise_xor,
}
_SUM = hash(ReduceOp.SUM)
_KINDS = (ReduceOp, type(ReduceOp.SUM))

PIECE = 1 << 20
"""Bytes of a large tensor that are reduced at a time: what is read and what it is added to stay in a core's
cache."""

_SERIAL = 32704
"""Elements that torch reduces in the calling thread; of 32768 and more it wakes its OpenMP threads.

Members on one host would wake more of them than there are cores: 15 ms for 1 MB, two members on two cores,
where this takes 0.6."""

_KEPT = 4  # pieces; a collective takes one at a time


def kernel(op: object, dtype: torch.dtype) -> Kernel | None:
    """Return ``(first, second, *, out)`` of a reduction; None where it is torch's to do, or to refuse.

    Args:
        op: a ``dist.ReduceOp``, or one of its members; None: SUM.
        dtype: of the tensors.
    """
    if dtype not in _NUMBERS or not (op is None or isinstance(op, _KINDS)):
        return None
    number = _SUM if op is None else hash(op)
    found = _OF_NUMBERS.get(number)
    if found is None and dtype in _INTEGERS:
        found = _OF_INTEGERS.get(number)
    return found


def reduce_into(function: Kernel, first: Tensor, second: Tensor, into: Tensor) -> None:
    """Put the reduction of two tensors of one dimension into a third, which may be one of them."""
    if into.is_inference():
        with torch.inference_mode():
            _serially(function, first, second, into)
    else:
        _serially(function, first, second, into)


def _serially(function: Kernel, first: Tensor, second: Tensor, into: Tensor) -> None:
    if into.numel() <= _SERIAL:
        function(first, second, out=into)
        return
    for at in range(0, into.numel(), _SERIAL):
        part = slice(at, at + _SERIAL)
        function(first[part], second[part], out=into[part])


class Scratch:
    """Memory for what is received and then reduced; a process keeps some, mapped and in its caches."""

    def __init__(self) -> None:
        self._free: collections.deque[Tensor] = collections.deque(maxlen=_KEPT)

    def take(self, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return a tensor of the same size and dtype, and what `give_back` takes after its last use."""
        size = like.nbytes
        if size > PIECE or size <= 1024:
            return torch.empty_like(like, requires_grad=False), None
        try:
            memory = self._free.pop()
        except IndexError:
            memory = torch.empty(PIECE, dtype=torch.uint8, device="cpu")
        return memory[:size].view(like.dtype).view(like.shape), memory

    def give_back(self, memory: Tensor) -> None:
        """Let others have it."""
        self._free.append(memory)
