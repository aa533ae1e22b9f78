"""Tensors of all kinds: what is sent, and what it is received into."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch


class Kind(NamedTuple):
    sent: Callable[[], torch.Tensor]
    room: Callable[[], torch.Tensor]


class Subclass(torch.Tensor):
    """One without a dispatch of its own."""


def given(*shape, dtype=torch.float32):
    count = torch.Size(shape).numel()
    return torch.arange(1, count + 1).to(dtype).reshape(shape)


def empty(*shape, dtype=torch.float32):
    return torch.full(shape, -7, dtype=dtype)


def imaginary(make, *shape):
    made = make(*shape, dtype=torch.complex64)
    return made + 1j * torch.arange(made.numel()).reshape(shape)


def inference(make):
    with torch.inference_mode():
        return make()


def value(tensor):
    """A plain, contiguous copy."""
    with torch.no_grad():
        plain = torch.empty(tensor.shape, dtype=tensor.dtype)
        return plain.copy_(tensor.detach()).as_subclass(torch.Tensor)


KINDS = {
    "plain": Kind(lambda: given(2, 3), lambda: empty(2, 3)),
    "0-dim": Kind(lambda: torch.tensor(5.0), lambda: torch.tensor(0.0)),
    "zero-size": Kind(lambda: given(0), lambda: empty(0)),
    "zero-size of three": Kind(lambda: given(3, 0, 2), lambda: empty(3, 0, 2)),
    "zero-size, transposed": Kind(lambda: given(3, 0).t(), lambda: empty(3, 0).t()),
    "sent transposed": Kind(lambda: given(3, 2).t(), lambda: empty(2, 3)),
    "received transposed": Kind(lambda: given(2, 3), lambda: empty(3, 2).t()),
    "both transposed": Kind(lambda: given(3, 2).t(), lambda: empty(3, 2).t()),
    "sent slice": Kind(lambda: given(8, 6)[::2, 1::3], lambda: empty(4, 2)),
    "received slice": Kind(lambda: given(4, 2), lambda: empty(8, 6)[::2, 1::3]),
    "sent part": Kind(lambda: given(9)[2:5], lambda: empty(3)),
    "received part": Kind(lambda: given(3), lambda: empty(9)[2:5]),
    "sent expanded": Kind(lambda: given(3).expand(2, 3), lambda: empty(2, 3)),
    "large, sent transposed": Kind(lambda: given(700, 800).t(), lambda: empty(800, 700)),
    "large, received transposed": Kind(lambda: given(800, 700), lambda: empty(700, 800).t()),
    "sent channels_last": Kind(
        lambda: given(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), lambda: empty(2, 3, 4, 5)
    ),
    "received channels_last": Kind(
        lambda: given(2, 3, 4, 5), lambda: empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    ),
    "sent conjugated": Kind(lambda: imaginary(given, 2, 3).conj(), lambda: imaginary(empty, 2, 3)),
    "received conjugated": Kind(lambda: imaginary(given, 2, 3), lambda: imaginary(empty, 2, 3).conj()),
    "both conjugated": Kind(lambda: imaginary(given, 2, 3).conj(), lambda: imaginary(empty, 2, 3).conj()),
    "sent negative": Kind(lambda: torch._neg_view(given(4)), lambda: empty(4)),
    "received negative": Kind(lambda: given(4), lambda: torch._neg_view(empty(4))),
    "sent imaginary part": Kind(lambda: imaginary(given, 4).conj().imag, lambda: empty(4)),
    "received imaginary part": Kind(lambda: given(4), lambda: imaginary(empty, 4).conj().imag),
    "leaf": Kind(lambda: given(4).requires_grad_(), lambda: empty(4).requires_grad_()),
    "view of a leaf": Kind(
        lambda: given(3, 2).requires_grad_().t(), lambda: empty(3, 2).requires_grad_().t()
    ),
    "computed": Kind(lambda: given(4).requires_grad_() * 2, lambda: empty(4).requires_grad_() * 2),
    "parameter": Kind(lambda: torch.nn.Parameter(given(4)), lambda: torch.nn.Parameter(empty(4))),
    "parameter, transposed": Kind(
        lambda: torch.nn.Parameter(given(3, 2).t()), lambda: torch.nn.Parameter(empty(3, 2).t())
    ),
    **(
        {"buffer": Kind(lambda: torch.nn.Buffer(given(4)), lambda: torch.nn.Buffer(empty(4)))}
        if hasattr(torch.nn, "Buffer")  # from torch 2.5 on
        else {}
    ),
    "subclass": Kind(lambda: given(4).as_subclass(Subclass), lambda: empty(4).as_subclass(Subclass)),
    "inference": Kind(lambda: inference(lambda: given(4)), lambda: inference(lambda: empty(4))),
    "inference, transposed": Kind(
        lambda: inference(lambda: given(3, 2).t()), lambda: inference(lambda: empty(3, 2).t())
    ),
    "of numpy": Kind(
        lambda: torch.from_numpy(given(4).numpy().copy()), lambda: torch.from_numpy(empty(4).numpy().copy())
    ),
    "shared": Kind(lambda: given(4).share_memory_(), lambda: empty(4).share_memory_()),
}


# -- dtypes -----------------------------------------------------------------------------------------------------------

_QUANTIZED = {"qint8": torch.qint8, "quint8": torch.quint8, "qint32": torch.qint32}
_NUMBERS = sorted(
    {str(each).removeprefix("torch.") for each in vars(torch).values() if isinstance(each, torch.dtype)}
    - {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
)


def filled(name, seed):
    """A tensor of that dtype; with another seed it has other bytes."""
    if name in _QUANTIZED:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch 2.13 deprecates them
            return torch.quantize_per_tensor(given(12) + seed, 1.0, 0, _QUANTIZED[name])
    dtype = getattr(torch, name)
    if dtype is torch.bool:
        return (given(12).int() + seed) % 3 == 0
    return (torch.arange(96) + seed).to(torch.uint8).view(dtype)


def bytes_of(tensor):
    return bytes(tensor.untyped_storage())


def _can(name):
    try:
        return bytes_of(filled(name, 1)) != bytes_of(filled(name, 2))
    except RuntimeError:  # torch knows the name, and no tensors
        return False


DTYPES = [each for each in [*_NUMBERS, *_QUANTIZED] if _can(each)]
