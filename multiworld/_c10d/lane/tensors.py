"""The bytes of a tensor that is sent over the lane, or received into.

Bytes are bytes: complex numbers and quantized ones travel as they lie in memory, and gradients are of no
interest. What has no bytes of its own that are its elements in order (a view that only says that it is
conjugated, every second element, a tensor that is still being computed) goes through a copy.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

__all__ = ["carried", "copied_back", "landing", "memory_view", "nowhere", "require_memory", "sendable"]

_Tensor = torch.Tensor
_STRIDED = torch.strided
_PACKED = {torch.quint4x2, torch.quint2x4}
_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor  # type: ignore[attr-defined, unused-ignore]
_plain_dispatch = _Tensor.__torch_dispatch__

memory_view: Callable[[int, int, int], memoryview] = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)(("PyMemoryView_FromMemory", ctypes.pythonapi))
"""``(address, size, PyBUF_WRITE) -> view`` of that memory; the view keeps nothing."""


def carried(tensor: object) -> bool:
    """Whether messages of `tensor` go over the lane: it has memory of its own that the CPU can reach.

    All others (on a GPU, fake, sparse, nested, of functorch's transforms, a subclass that sends itself) mean
    what torch's own functions say that they mean; most are refused there.

    Raises:
        TypeError: several elements of `tensor` share a byte, and torch says that each has one.
    """
    if type(tensor) is not _Tensor and not (
        isinstance(tensor, _Tensor) and type(tensor).__torch_dispatch__ is _plain_dispatch
    ):
        return False
    if tensor.is_quantized and tensor.dtype in _PACKED:
        raise TypeError(
            f"a tensor of {tensor.dtype}. A message has its elements' bytes, and several of these share one. "
            "Send `tensor.dequantize()`, or quantize to 8 bits."
        )
    return tensor.is_cpu and tensor.layout is _STRIDED and not _wrapped(tensor) and not tensor.is_nested


def sendable(tensor: Tensor) -> Tensor:
    """Return a copy whose bytes are its elements, in order."""
    with torch.no_grad():
        return tensor.resolve_conj().resolve_neg().contiguous()


def landing(tensor: Tensor) -> Tensor:
    """Return what receives a message in the place of `tensor`, which gets it with `copied_back`.

    Raises:
        RuntimeError: elements of `tensor` share memory: it cannot have the values of a message.
    """
    if any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} to receive into. "
            "Its elements have to lie apart in memory. Receive into a clone of it."
        )
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def copied_back(received: Tensor, tensor: Tensor) -> None:
    """Put what came in a copy, of the same shape and dtype, into the tensor that was given."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(received)


def nowhere(tensor: Tensor) -> int:
    """Return an address for a tensor that has none, because it has no bytes.

    Raises:
        RuntimeError: it has, but its memory was released (as FSDP does).
    """
    if tensor.nbytes:
        raise RuntimeError(
            f"a tensor of {tensor.nbytes} bytes without memory: its storage was resized to "
            f"{tensor.untyped_storage().nbytes()}. Messages need the memory. Resize it back before."
        )
    return 1


def require_memory(given: Iterable[Tensor]) -> None:
    """Raise RuntimeError if one of these has bytes, but its memory was released."""
    for tensor in given:
        # Not the tensor's own address: in a view that of released memory is not 0.
        if not tensor.untyped_storage().nbytes() and tensor.nbytes:
            nowhere(tensor)
