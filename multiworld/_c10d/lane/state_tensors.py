"""The tensors of a state: which can be sent to another member, and the bytes of a piece of one."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, NamedTuple

import torch

from multiworld._c10d.lane import tensors
from multiworld._core import state_pieces
from multiworld._core.state_tree import dotted
from multiworld.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from multiworld._core.state_pieces import Index, Piece
    from multiworld._core.state_tree import Path

__all__ = [
    "Form",
    "bytes_of",
    "form",
    "in_memory",
    "is_tensor",
    "lies_apart",
    "part_of",
    "parts_of",
    "sendable_form",
    "targets",
]

_DIMENSIONS = 64  # torch's own limit
_LARGEST = 1 << 56  # bytes: no memory has so many
_OF_MALLOC = 128 << 10  # bytes of a copy, and less
_plain_dispatch = torch.Tensor.__torch_dispatch__


class Form(NamedTuple):
    """The dtype and the shape of a tensor.

    Attributes:
        dtype: its name, "bfloat16".
        shape: sizes.
    """

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def read(cls, dtype: object, shape: object) -> Form:
        """Return the form that another process says.

        Raises:
            StateError: there is none like that here.
        """
        known = getattr(torch, dtype, None) if isinstance(dtype, str) else None
        good = isinstance(known, torch.dtype) and not str(dtype).startswith("q")
        if good and isinstance(shape, tuple) and len(shape) <= _DIMENSIONS:
            size = 1
            for each in shape:
                good = good and type(each) is int and 0 <= each < _LARGEST
                size = min(size * each, _LARGEST) if good else 0
            if good and size < _LARGEST:
                return cls(str(dtype), shape)
        raise StateError(
            f"a tensor of dtype {dtype!r:.80} and shape {shape!r:.200}",
            rule="Both ends have the same dtypes, and shapes of whole numbers",
            next_step="Compare the versions of torch",
        )

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return int(getattr(torch, self.dtype).itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        size = self.itemsize
        for each in self.shape:
            size *= each
        return size

    def room(self) -> Tensor:
        """Return a new tensor, on the CPU, whatever the default device and mode are.

        Raises:
            StateError: there is not so much memory.
        """
        try:
            with torch.inference_mode(mode=False):
                return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device="cpu")
        except RuntimeError as error:
            raise StateError(
                f"a tensor of shape {self.shape} and {self.nbytes} bytes",
                rule="The state fits into the memory of the member that receives it",
                next_step="Compare the memory of both hosts",
            ) from error

    def staging(self) -> Tensor:
        """Return a tensor for a copy of a piece, whose memory goes back to the system with it.

        What malloc frees of pieces that several threads copy, it keeps: memory would grow with the state.
        """
        if self.nbytes < _OF_MALLOC:
            return self.room()
        pages = torch.frombuffer(mmap.mmap(-1, self.nbytes), dtype=torch.uint8)
        return pages.view(getattr(torch, self.dtype)).view(self.shape)


def is_tensor(value: object) -> bool:
    """Whether `value` is torch's to describe."""
    return isinstance(value, torch.Tensor)


def sendable_form(path: Path, tensor: Tensor) -> Form:
    """Return the form of a tensor that is to be sent.

    Raises:
        StateError: it cannot be; the message says what to do.
    """
    kind = type(tensor).__name__
    what, step = "", "Leave it out of the state, or make a plain tensor of it"
    if kind == "DTensor":
        what = "a DTensor: sharded state is not carried"
        step = "Give its full_tensor(), or save and load shards with torch.distributed.checkpoint"
    elif type(tensor).__torch_dispatch__ is not _plain_dispatch:
        what = f"a {kind}, which is no plain tensor"
    elif tensor.is_meta:
        what, step = "a tensor on the meta device, without values", "Put values in it first (to_empty, load)"
    elif tensor.is_quantized:
        what, step = (
            "a quantized tensor",
            "Give its int_repr() with scales and zero points, or dequantize() it",
        )
    elif tensor.is_nested or tensor.layout is not torch.strided:
        layout = "nested" if tensor.is_nested else str(tensor.layout)
        what, step = f"a tensor of layout {layout}", "Give its to_dense(), or its indices and values"
    elif tensor.is_cpu and not tensors.carried(tensor):
        what = "a tensor of one of functorch's transforms"
    elif tensor.is_cpu and tensor.nbytes and not tensor.data_ptr():
        what, step = "a tensor whose memory was released", "Resize its storage back before (FSDP: unshard)"
    if what:
        raise StateError(
            f"{dotted(path)} is {what}",
            rule="Tensors of a state that is sent to another member are dense, plain and have values",
            next_step=step,
        )
    return form(tensor)


def form(tensor: Tensor) -> Form:
    """Return the form of a tensor."""
    return Form(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def parts_of(forms: Sequence[Form], which: Iterable[int]) -> Iterator[list[Piece]]:
    """Yield the parts that some of the tensors of these forms travel in."""
    shapes = ((at, forms[at].shape, forms[at].itemsize) for at in which)
    return state_pieces.parts(shapes, state_pieces.CHUNK)


def part_of(tensor: Tensor, index: Index) -> Tensor:
    """Return a piece of a tensor, as a view of it that autograd does not know."""
    return tensor.detach()[index] if index else tensor.detach()


def in_memory(tensor: Tensor) -> bool:
    """Whether the elements of a tensor lie on the CPU in order, and nothing else there."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor, or a copy, whose bytes are in memory."""
    if in_memory(tensor):
        return tensor
    room = form(tensor).staging()
    tensors.copied_back(tensor, room)
    return room


def targets(leaves: Iterable[tuple[Path, Tensor]]) -> dict[Path, Tensor]:
    """Return the tensors that can be received into: each has memory that it shares with none before it."""
    spans = []
    for order, (path, tensor) in enumerate(leaves):
        if type(tensor).__torch_dispatch__ is not _plain_dispatch or not lies_apart(tensor):
            continue
        start, end = span(tensor)
        spans.append((str(tensor.device), start, order, end, path, tensor))
    found: dict[Path, Tensor] = {}
    device, reached = "", 0
    for where, start, _, end, path, tensor in sorted(spans, key=lambda each: each[:3]):
        if where != device:
            device, reached = where, 0
        if start >= reached or end == start:
            found[path] = tensor
            reached = max(reached, end)
    return found


def span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a dense tensor's first byte, and behind its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * step for size, step in steps)
    start = tensor.data_ptr()
    return start, start + (extent * tensor.element_size() if tensor.numel() else 0)


def lies_apart(tensor: Tensor) -> bool:
    """Whether a tensor has values, and no two elements of it share memory."""
    if tensor.is_meta or tensor.is_quantized or tensor.is_nested or tensor.layout is not torch.strided:
        return False
    reached = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step <= reached:
                return False
            reached += step * (size - 1)
    return bool(tensor.data_ptr()) or not tensor.nbytes
