"""Weights as buckets of bytes: filled from a model, and loaded into one."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from multiworld._c10d.lane.state_tensors import lies_apart, span
from multiworld._c10d.lane.tensors import copied_back
from multiworld._core.state_pieces import TOGETHER, pieces
from multiworld._core.weights import ALIGNED, Entry, encode, layout
from multiworld.errors import StateError
from multiworld.weights import wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from multiworld._core.weights import Head, Placed

__all__ = ["BUCKET", "Source", "Target", "buckets", "digest", "gather", "load", "sizes", "summed", "whole"]

BUCKET = 64 << 20
"""Bytes of a bucket, by default."""

Source = torch.nn.Module | Mapping[str, Any] | Callable[[], Iterable[tuple[str, Any]]]
"""What has weights: a module, tensors by name, or a function that returns names and tensors, in one order."""

Target = torch.nn.Module | Mapping[str, Any] | Callable[[Iterable[tuple[str, Any]]], object]
"""What gets weights: a module, tensors by name, or a function that takes names and tensors, as vLLM's
``load_weights``."""


def named(source: Source) -> Iterator[tuple[str, Any]]:
    """Yield the names and tensors of a model.

    Raises:
        StateError: something in it is no tensor, or none that is dense.
    """
    found: Iterable[tuple[str, Any]]
    if isinstance(source, torch.nn.Module):
        found = source.state_dict().items()
    else:
        found = source.items() if isinstance(source, Mapping) else source()
    for name, tensor in found:
        if not isinstance(tensor, torch.Tensor):
            raise StateError(
                f"weight {name!r} is of type {type(tensor).__name__}",
                rule="Weights are tensors by name",
                next_step="Give a mapping, or a function, that leaves it out",
            )
        if tensor.is_quantized or tensor.is_nested or tensor.layout is not torch.strided:
            kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else tensor.layout
            raise StateError(
                f"weight {name!r} is {kind}",
                rule="Weights are dense tensors, whose elements are their values",
                next_step="Give a function that yields its to_dense(), or int_repr(), scales, zero points",
            )
        yield str(name), tensor.detach()


def gather(source: Source) -> Iterator[tuple[str, Tensor]]:
    """`named`, with each sharded tensor (DTensor) put together: all ranks of its mesh call this together."""
    for name, tensor in named(source):
        yield name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def buckets(source: Source, most: int, rooms: Iterable[Tensor] = ()) -> Iterator[tuple[list[Entry], Tensor]]:
    """Yield the buckets of a model, each with the entries seen so far; the last list has all.

    A tensor is copied before the next one is asked for: one at a time is put together, and a source may use
    its memory again. After an error in between the others are asked for: the other ranks are at that, too.

    Args:
        source: of the weights; all ranks of its mesh call this together.
        most: bytes of a bucket's tensors.
        rooms: where to put them, one after the other; what is too small, or is missing, is made.
    """
    gathered = gather(source)
    entries: list[Entry] = []
    now: list[Tensor] = []
    try:
        yield from _filled(gathered, most, iter(rooms), entries, now)
    except Exception:
        now.clear()
        # A loop's variable would keep the one before while the next is put together.
        deque(gathered, maxlen=0)
        raise


def _filled(
    gathered: Iterator[tuple[str, Tensor]],
    most: int,
    unused: Iterator[Tensor],
    entries: list[Entry],
    now: list[Tensor],
) -> Iterator[tuple[list[Entry], Tensor]]:
    """Fill the buckets; `entries` gets those seen so far, and `now` has the tensor that is copied."""

    def numbered() -> Iterator[tuple[int, Sequence[int], int]]:
        for name, tensor in gathered:  # no enumerate: it would keep the tensor
            entries.append(Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
            now[:] = [tensor]
            del tensor
            yield len(entries) - 1, now[0].shape, now[0].dtype.itemsize
            now.clear()

    room: Tensor | None = None
    end = 0
    for begins, piece in pieces(numbered(), most):
        if begins:
            if room is not None:
                yield entries, room[:end]
            room, end = next(unused, None), 0
        size = -(-piece.size // ALIGNED) * ALIGNED
        room = _reaching(room, end + size, most)
        part = now[0][piece.at]
        _seen(room, end, piece.size, part, part.dtype).copy_(part)
        del part
        room[end + piece.size : end + size].zero_()
        end += size
    if entries:
        yield entries, wire.room(0) if room is None else room[:end]


def _reaching(room: Tensor | None, size: int, most: int) -> Tensor:
    """Return a room of at least `size` bytes that begins with what is in this one.

    How large its bucket will be is not known yet. What is not written to takes no memory.
    """
    if room is not None and room.nbytes >= size:
        return room
    before = 0 if room is None else room.nbytes
    made = wire.room(max(size, min(max(2 * before, BUCKET), most) + TOGETHER * ALIGNED))
    if room is not None:
        made[:before] = room
    return made


def _seen(room: Tensor, at: int, size: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A part of a bucket as the piece of a tensor that it is."""
    return room[at : at + size].view(dtype).view(like.shape)


def summed(bucket: Tensor) -> str:
    """Return the digest of a bucket: SHA-256, as hexadecimal digits."""
    return hashlib.sha256(wire.view(bucket)).hexdigest()


def whole(entries: Iterable[Entry], digests: Iterable[str]) -> str:
    """Return the digest of a version, of its tensors' names, dtypes and shapes, and its buckets' digests."""
    return hashlib.sha256(encode({"tensors": list(entries), "digests": list(digests)})).hexdigest()


def digest(source: Source, bucket_bytes: int = BUCKET) -> str:
    """Return the digest of a model's weights: that of a version (`Subscriber.digest`) if they are that one.

    It is of buckets, so the names have to be in the same order, too; for what an engine loads they need not.

    Args:
        source: a module, tensors by name, or a function, as for `Publisher`, in the order of the publisher's.
            All ranks of its mesh call this together.
        bucket_bytes: as of the publisher.

    Raises:
        StateError: something in it is no tensor.
    """
    entries: list[Entry] = []
    digests = []
    with torch.no_grad():
        for entries, bucket in buckets(source, bucket_bytes):  # noqa: B007  (the last one counts)
            digests.append(summed(bucket))
    return whole(entries, digests)


def sizes(head: Head) -> list[tuple[list[Placed], int]]:
    """Return the buckets of a version that comes.

    Raises:
        StateError: this torch has no dtype of that name.
    """
    itemsizes = {each.dtype: _dtype(each).itemsize for each in head.entries}
    return layout(head.entries, itemsizes, head.bucket)


def _dtype(entry: Entry) -> torch.dtype:
    found = getattr(torch, entry.dtype, None)
    if not isinstance(found, torch.dtype):
        raise StateError(
            f"weight {entry.name!r} has dtype {entry.dtype!r:.40}",
            rule="This torch has the dtypes of the trainer's",
            next_step="Use the same version of torch on both",
        )
    return found


def load(target: Target, head: Head, rooms: Sequence[Tensor]) -> None:
    """Put a version into a model. Nothing is changed if it does not fit.

    Args:
        target: of the weights.
        head: of the version.
        rooms: its buckets.

    Raises:
        StateError: names, dtypes or shapes differ, a tensor of the model cannot be filled, or two share
            memory and the trainer's differ.
        RuntimeError: the function did not take all weights.
    """
    placed = sizes(head)
    if not isinstance(target, (torch.nn.Module, Mapping)):
        weights = _assembled(head, placed, rooms)
        with torch.no_grad():
            target(weights)
        left = next(weights, None)
        if left is not None:
            raise RuntimeError(
                f"the target function returned before it took weight {left[0]!r}: the model may have weights"
                " of two versions. It must take each pair; an `async def` or a generator function takes none."
            )
        return
    into = dict(named(target))
    _require_same(head, into)
    _require_filled(into, dict(named(target)))
    for group in _overlapping(into):
        _require_agreeing(group, head, rooms)
    for _, values, place in _paired(into, head, rooms):
        copied_back(values, place)


def _paired(
    into: Mapping[str, Tensor], head: Head, rooms: Sequence[Tensor]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the pieces of these tensors: name, values and where these go."""
    for (part, _), room in zip(sizes(head), rooms, strict=True):
        for piece, at in part:
            entry = head.entries[piece.tensor]
            if entry.name in into:
                place = into[entry.name][piece.at]
                yield entry.name, _seen(room, at, piece.size, place, _dtype(entry)), place


def _assembled(
    head: Head, placed: Sequence[tuple[list[Placed], int]], rooms: Sequence[Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a version, one at a time; those without elements come last."""
    waiting: dict[int, Tensor] = {}
    for (part, _), room in zip(placed, rooms, strict=True):
        for piece, at in part:
            for number in [each for each in waiting if each < piece.tensor]:
                yield head.entries[number].name, waiting.pop(number)
            entry = head.entries[piece.tensor]
            tensor = waiting.setdefault(piece.tensor, _room(entry))
            place = tensor[piece.at]
            place.copy_(_seen(room, at, piece.size, place, tensor.dtype))
    for number, tensor in waiting.items():
        yield head.entries[number].name, tensor
    for entry in head.entries:
        if 0 in entry.shape:
            yield entry.name, _room(entry)


def _room(entry: Entry) -> Tensor:
    return torch.empty(entry.shape, dtype=_dtype(entry), device="cpu")


def _require_same(head: Head, into: Mapping[str, Tensor]) -> None:
    theirs = {each.name: (each.dtype, each.shape) for each in head.entries}
    ours = {name: (str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in into.items()}
    for name in [*theirs, *ours]:
        if theirs.get(name) != ours.get(name):
            raise StateError(
                f"weight {name!r} is {theirs.get(name)} on the trainer, and {ours.get(name)} here",
                rule="An engine's weights have the names, dtypes and shapes of the trainer's",
                next_step="Give Publisher a function that yields them as the engines have them",
            )


def _require_filled(into: Mapping[str, Tensor], again: Mapping[str, Tensor]) -> None:
    """Refuse tensors that cannot be filled, or are not the model's: asked for `again`, they lie elsewhere."""
    for name, tensor in into.items():
        if hasattr(tensor, "full_tensor"):
            what = "a DTensor"
        elif type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            continue
        elif not lies_apart(tensor):
            what = f"on {tensor.device}, without memory for each of its elements"
        elif tensor.nbytes and again[name].data_ptr() != tensor.data_ptr():
            what = "a copy that state_dict() makes"
        else:
            continue
        raise StateError(
            f"weight {name!r} is {what}",
            rule="An engine's weights are whole tensors, and each of their elements has memory of its own",
            next_step="Give Subscriber such tensors, or a function that takes names and tensors",
        )


def _overlapping(into: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield groups of tensors that may share memory, as tied weights do."""
    spans = sorted(
        (str(tensor.device), *span(tensor), name)
        for name, tensor in into.items()
        if tensor.nbytes and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )
    group: list[str] = []
    device, reached = "", 0
    for where, start, end, name in [*spans, ("", 0, 0, "")]:
        if where != device or start >= reached:
            if len(group) > 1:
                yield {each: into[each] for each in group}
            group, device, reached = [], where, 0
        group.append(name)
        reached = max(reached, end)


def _require_agreeing(group: Mapping[str, Tensor], head: Head, rooms: Sequence[Tensor]) -> None:
    """Refuse a version whose values such tensors cannot all have; tried out in a copy of their memory."""
    spans = {name: span(tensor) for name, tensor in group.items()}
    first = min(start for start, _ in spans.values()) // ALIGNED * ALIGNED
    memory = wire.room(max(end for _, end in spans.values()) - first)
    copies = {
        name: memory[spans[name][0] - first : spans[name][1] - first]
        .view(tensor.dtype)
        .as_strided(tensor.shape, tensor.stride())
        for name, tensor in group.items()
    }
    for _, values, place in _paired(copies, head, rooms):
        copied_back(values, place)
    for name, values, place in _paired(copies, head, rooms):
        if not torch.equal(_bits(values), _bits(place)):
            others = ", ".join(repr(each) for each in group if each != name)
            raise StateError(
                f"weight {name!r} shares memory with {others} here, and the trainer's differ",
                rule="Weights that share memory have the same values on the trainer",
                next_step="Untie them here, or tie them on the trainer",
            )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
