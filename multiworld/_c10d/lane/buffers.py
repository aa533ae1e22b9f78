"""Buffers of collectives, in place of the tensors they are given, and their pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiworld._c10d.lane import reducing, tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from multiworld._c10d.lane.collective import Collective

__all__ = [
    "alike",
    "copy",
    "in_place",
    "parts",
    "pieces",
    "pieces_of_parts",
    "split",
    "to_receive",
    "to_send",
]


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's bytes are its elements, in order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def to_send(tensor: Tensor, apart_from: Sequence[Tensor] = ()) -> Tensor:
    """Return what is sent in place of a tensor: itself, or a copy, which shares no memory with the others."""
    if not _is_plain(tensor):
        return tensors.sendable(tensor).data
    return tensor.data.clone() if _overlaps(tensor, apart_from) else tensor.data


def to_receive(new: Collective, tensor: Tensor, apart_from: Sequence[Tensor] = ()) -> Tensor:
    """Return what is received in place of a tensor: itself, or what is copied into it at the end.

    That shares no memory with `apart_from`. ``data``, not ``detach()``: autograd is not told, as with gloo.
    """
    if _is_plain(tensor) and not _overlaps(tensor, apart_from):
        return tensor.data
    room = tensors.landing(tensor)
    new.finally_(lambda: copy(tensor, room))
    return room


def in_place(new: Collective, tensor: Tensor) -> Tensor:
    """Return one dimension of what is sent and then received in the place of a tensor."""
    if _is_plain(tensor):
        return tensor.data.view(-1)
    room = to_receive(new, tensor)
    copy(room, tensor)
    return room.view(-1)


def _overlaps(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    """Whether a contiguous tensor shares memory with others, contiguous as well."""
    start = tensor.data_ptr()
    end = start + tensor.nbytes
    return any(other.data_ptr() < end and start < other.data_ptr() + other.nbytes for other in others)


def alike(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape and dtype."""
    return tensor.dtype is other.dtype and tensor.shape == other.shape


def copy(into: Tensor, tensor: Tensor) -> None:
    """Copy within this process; autograd is not told."""
    if into.is_inference():
        tensors.copied_back(tensor, into)
    else:
        into.data.copy_(tensor.data)


def parts(whole: Tensor, part: Tensor, size: int) -> list[Tensor]:
    """Cut a contiguous tensor into so many parts, each of the shape of `part`."""
    flat, count = whole.view(-1), part.numel()
    return [flat[at * count : (at + 1) * count].view(part.shape) for at in range(size)]


def pieces(flat: Tensor) -> list[Tensor]:
    """Cut a flat tensor into pieces that are reduced one after the other; one where it is empty."""
    count = max(1, reducing.PIECE // flat.element_size())
    return [flat[at : at + count] for at in range(0, flat.numel() or 1, count)]


def pieces_of_parts(flat: Tensor, size: int) -> list[list[Tensor]]:
    """Cut a flat tensor into parts for so many members, and each part into pieces."""
    count, rest = divmod(flat.numel(), size)
    found, at = [], 0
    for rank in range(size):
        end = at + count + (rank < rest)
        found.append(pieces(flat[at:end]))
        at = end
    return found


def split(tensor: Tensor, sizes: Sequence[int] | None, members: int) -> list[Tensor] | None:
    """Cut a tensor's first dimension; None where that is not possible."""
    if tensor.dim() == 0:
        return None
    if not sizes:
        if tensor.size(0) % members:
            return None
        sizes = [tensor.size(0) // members] * members
    if len(sizes) != members or sum(sizes) != tensor.size(0) or min(sizes) < 0:
        return None
    return list(tensor.data.split_with_sizes(list(sizes)))
