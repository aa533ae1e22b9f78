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

__all__ = ["copied_back", "is_plain", "refused", "sendable", "view_of"]

_Tensor = torch.Tensor
_STRIDED = torch.strided
_wrapped: Callable[[Any], bool] = torch._C._functorch.is_functorch_wrapped_tensor  # type: ignore[attr-defined, unused-ignore]
_plain_dispatch = _Tensor.__torch_dispatch__

_READ_WRITE = 0x200  # PyBUF_WRITE
_memory_view: Callable[[int, int, int], memoryview] = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)(("PyMemoryView_FromMemory", ctypes.pythonapi))


def view_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a plain tensor (see `is_plain`). The view keeps nothing: keep the tensor."""
    # A tensor without elements may have no address.
    return _memory_view(tensor.data_ptr() or 1, tensor.nbytes, _READ_WRITE)


def is_plain(tensor: Tensor) -> bool:
    """Whether the bytes at the tensor's address are its elements, in order."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def refused(tensor: Any) -> bool:
    """Whether torch's own function is to decide: what is no tensor of the CPU, or one without memory.

    A tensor of another kind (fake, sparse, of functorch's transforms, a subclass that sends itself) means
    there what torch says that it means; most are refused.
    """
    if type(tensor) is not _Tensor and not (
        isinstance(tensor, _Tensor) and type(tensor).__torch_dispatch__ is _plain_dispatch
    ):
        return True
    return not tensor.is_cpu or tensor.layout is not _STRIDED or _wrapped(tensor)


def sendable(tensor: Tensor) -> Tensor:
    """Return a plain tensor with the same elements: itself, or a copy."""
    if is_plain(tensor):
        return tensor
    with torch.no_grad():
        return tensor.resolve_conj().resolve_neg().contiguous()


def copied_back(received: Tensor, tensor: Tensor) -> None:
    """Put what came in a copy, of the same shape and dtype, into the tensor that was given."""
    with torch.no_grad():
        tensor.copy_(received)
