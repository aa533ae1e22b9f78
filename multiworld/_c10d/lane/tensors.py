"""The bytes of a tensor that is sent over the lane, or received into.

Bytes are bytes: complex numbers and quantized ones travel as they lie in memory, and gradients are of no
interest. What has no bytes of its own that are its elements in order (a view that only says that it is
conjugated, every second element, a tensor that is still being computed) goes through a copy.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["carried", "copied_back", "memory_view", "sendable"]

_Tensor = torch.Tensor
_STRIDED = torch.strided
_wrapped: Callable[[Any], bool] = torch._C._functorch.is_functorch_wrapped_tensor  # type: ignore[attr-defined, unused-ignore]
_plain_dispatch = _Tensor.__torch_dispatch__

memory_view: Callable[[int, int, int], memoryview] = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)(("PyMemoryView_FromMemory", ctypes.pythonapi))
"""``(address, size, PyBUF_WRITE) -> view`` of that memory; the view keeps nothing."""


def carried(tensor: object) -> bool:
    """Whether messages of `tensor` go over the lane: it has memory of its own that the CPU can reach.

    All others (on a GPU, fake, sparse, of functorch's transforms, a subclass that sends itself) mean what
    torch's own functions say that they mean; most are refused there.
    """
    if type(tensor) is not _Tensor and not (
        isinstance(tensor, _Tensor) and type(tensor).__torch_dispatch__ is _plain_dispatch
    ):
        return False
    return tensor.is_cpu and tensor.layout is _STRIDED and not _wrapped(tensor)


def sendable(tensor: Tensor) -> Tensor:
    """Return a copy whose bytes are its elements, in order."""
    with torch.no_grad():
        return tensor.resolve_conj().resolve_neg().contiguous()


def copied_back(received: Tensor, tensor: Tensor) -> None:
    """Put what came in a copy, of the same shape and dtype, into the tensor that was given."""
    with torch.no_grad():
        tensor.copy_(received)
