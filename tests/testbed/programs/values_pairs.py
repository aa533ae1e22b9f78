"""Sends and receives, one by one and in batches; coalesced operations; whole Python objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from programs.checks import FLOAT8, NUMBERS, Checks, N, short

__all__ = ["coalesced", "objects", "pairs"]


def pairs(c: Checks) -> None:
    """Check sends and receives, with every dtype."""
    for dtype in (*NUMBERS, torch.bool, *FLOAT8):
        c.run(f"send and recv {short(dtype)}", send_recv, dtype)
        c.run(f"batch_isend_irecv {short(dtype)}", batch, dtype)
    c.run("isend and irecv", isend_irecv)
    c.run("batch to all", batch_to_all)
    c.run("batch of two to one", batch_of_two)
    c.run("send to oneself", to_oneself)


def _around(c: Checks) -> tuple[int, int, int]:
    """Return the next rank and the one before, by torch's count, and the latter's place in the group."""
    before = (c.rank - 1) % c.size
    return c.ranks[(c.rank + 1) % c.size], c.ranks[before], before


def send_recv(c: Checks, dtype: torch.dtype) -> None:
    """Every pair, both ways, one after the other: no two wait for each other."""
    for low in range(c.size):
        for high in range(low + 1, c.size):
            for source, target in ((low, high), (high, low)):
                if c.rank == source:
                    dist.send(c.mine(dtype), c.ranks[target], group=c.group)
                elif c.rank == target:
                    out = c.room(N, dtype=dtype)
                    dist.recv(out, c.ranks[source], group=c.group)
                    c.equal(out, c.given(source, dtype))


def isend_irecv(c: Checks) -> None:
    """Along a line: rank 0 sends first, each passes on what it has."""
    out = c.mine()
    if c.rank > 0:
        dist.irecv(out, c.ranks[c.rank - 1], group=c.group).wait()
    if c.rank < c.size - 1:
        dist.isend(out, c.ranks[c.rank + 1], group=c.group).wait()
    c.equal(out, c.given(0))


def batch(c: Checks, dtype: torch.dtype) -> None:
    """Around a ring."""
    to, source, place = _around(c)
    out = c.room(N, dtype=dtype)
    operations = [
        dist.P2POp(dist.isend, c.mine(dtype), to, c.group),
        dist.P2POp(dist.irecv, out, source, c.group),
    ]
    for handle in dist.batch_isend_irecv(operations):
        handle.wait()
    c.equal(out, c.given(place, dtype))


def batch_to_all(c: Checks) -> None:
    """Everybody to everybody else, at once."""
    outs = {place: c.room(N) for place in range(c.size) if place != c.rank}
    operations = [dist.P2POp(dist.isend, c.mine(salt=to), c.ranks[to], c.group) for to in outs]
    operations += [dist.P2POp(dist.irecv, out, c.ranks[place], c.group) for place, out in outs.items()]
    for handle in dist.batch_isend_irecv(operations):
        handle.wait()
    for place, out in outs.items():
        c.equal(out, c.given(place, salt=c.rank))


def batch_of_two(c: Checks) -> None:
    """Two messages to one rank arrive in their order."""
    to, source, place = _around(c)
    outs = [c.room(N), c.room(N)]
    operations = [dist.P2POp(dist.isend, c.mine(salt=n), to, c.group) for n in (0, 1)]
    operations += [dist.P2POp(dist.irecv, out, source, c.group) for out in outs]
    for handle in dist.batch_isend_irecv(operations):
        handle.wait()
    for n, out in enumerate(outs):
        c.equal(out, c.given(place, salt=n))


def to_oneself(c: Checks) -> None:
    """torch refuses it one by one, and takes it in a batch."""
    out, me = c.room(N), c.ranks[c.rank]
    operations = [
        dist.P2POp(dist.isend, c.mine(), me, c.group),
        dist.P2POp(dist.irecv, out, me, c.group),
    ]
    for handle in dist.batch_isend_irecv(operations):
        handle.wait()
    c.equal(out, c.given(c.rank))


def coalesced(c: Checks) -> None:
    """Check what is queued as one: the manager, for each kind of operation, and the coalesced collectives."""
    for device in (None, c.device):
        for async_ops in (False, True):
            more = f"{' with device' if device else ''}{' async' if async_ops else ''}"
            for kind, make in {
                "all_reduce": _reduces,
                "all_gather_into_tensor": _gathers,
                "reduce_scatter_tensor": _scatters,
                "all_to_all_single": _exchanges,
                "isend and irecv": _ring,
            }.items():
                if device is not None or kind not in {"all_to_all_single", "isend and irecv"}:
                    c.run(f"coalesced {kind}{more}", _managed, make, device, async_ops)
    c.run("all_reduce_coalesced", all_reduce_coalesced)
    c.run("all_gather_coalesced", all_gather_coalesced)
    c.run("allgather_into_tensor_coalesced", into_tensor_coalesced)
    c.run("reduce_scatter_tensor_coalesced", scatter_tensor_coalesced)


def _managed(
    c: Checks,
    make: Callable[[Checks], tuple[Callable[[], Any], Callable[[], None]]],
    device: Any,
    async_ops: bool,
) -> None:
    queue, look = make(c)
    with _coalescing_manager(c.group, device, async_ops) as manager:
        queue()
    if async_ops:
        manager.wait()
    look()


def _reduces(c: Checks) -> tuple[Callable[[], Any], Callable[[], None]]:
    tensors = [c.mine(n=n) for n in (3, 5)]

    def look() -> None:
        for n, tensor in zip((3, 5), tensors, strict=True):
            c.equal(tensor, torch.stack(c.all_given(n=n)).sum(0))

    return lambda: [dist.all_reduce(tensor, group=c.group) for tensor in tensors], look


def _gathers(c: Checks) -> tuple[Callable[[], Any], Callable[[], None]]:
    outs = [c.room(c.size * N) for _ in range(2)]
    inputs = [c.mine(salt=n) for n in range(2)]

    def queue() -> None:
        for n in range(2):
            dist.all_gather_into_tensor(outs[n], inputs[n], group=c.group)

    def look() -> None:
        for n in range(2):
            c.equal(outs[n], torch.cat(c.all_given(salt=n)))

    return queue, look


def _scatters(c: Checks) -> tuple[Callable[[], Any], Callable[[], None]]:
    outs = [c.room(2) for _ in range(2)]
    inputs = [c.mine(n=2 * c.size, salt=n) for n in range(2)]

    def queue() -> None:
        for n in range(2):
            dist.reduce_scatter_tensor(outs[n], inputs[n], group=c.group)

    def look() -> None:
        for n in range(2):
            summed = torch.stack(c.all_given(n=2 * c.size, salt=n)).sum(0)
            c.equal(outs[n], summed.split(2)[c.rank])

    return queue, look


def _exchanges(c: Checks) -> tuple[Callable[[], Any], Callable[[], None]]:
    outs = [c.room(c.size) for _ in range(2)]
    inputs = [c.mine(n=c.size, salt=n) for n in range(2)]

    def queue() -> None:
        for n in range(2):
            dist.all_to_all_single(outs[n], inputs[n], group=c.group)

    def look() -> None:
        for n in range(2):
            c.equal(outs[n], torch.stack(c.all_given(n=c.size, salt=n))[:, c.rank].clone())

    return queue, look


def _ring(c: Checks) -> tuple[Callable[[], Any], Callable[[], None]]:
    to, source, place = _around(c)
    out, mine = c.room(N), c.mine()

    def queue() -> None:
        dist.isend(mine, to, group=c.group)
        dist.irecv(out, source, group=c.group)

    return queue, lambda: c.equal(out, c.given(place))


def all_reduce_coalesced(c: Checks) -> None:
    tensors = [c.mine(n=n) for n in (2, 6)]
    dist.all_reduce_coalesced(tensors, group=c.group)
    for n, tensor in zip((2, 6), tensors, strict=True):
        c.equal(tensor, torch.stack(c.all_given(n=n)).sum(0))


def all_gather_coalesced(c: Checks) -> None:
    """The list form over the group's own method, as dist's waits for backends that have their own."""
    outs = [c.room(c.size * n) for n in (2, 6)]
    group = c.group or dist.group.WORLD
    group.allgather_into_tensor_coalesced(outs, [c.mine(n=n) for n in (2, 6)]).wait()
    for n, out in zip((2, 6), outs, strict=True):
        c.equal(out, torch.cat(c.all_given(n=n)))


def into_tensor_coalesced(c: Checks) -> None:
    outs = [c.room(c.size, n) for n in (1, 4)]
    group = c.group or dist.group.WORLD
    group.allgather_into_tensor_coalesced(outs, [c.mine(n=n) for n in (1, 4)]).wait()
    for n, out in zip((1, 4), outs, strict=True):
        c.equal(out, torch.stack(c.all_given(n=n)))


def scatter_tensor_coalesced(c: Checks) -> None:
    outs = [c.room(n) for n in (1, 4)]
    group = c.group or dist.group.WORLD
    group.reduce_scatter_tensor_coalesced(outs, [c.mine(n=n * c.size) for n in (1, 4)]).wait()
    for n, out in zip((1, 4), outs, strict=True):
        c.equal(out, torch.stack(c.all_given(n=n * c.size)).sum(0).split(n)[c.rank])


def objects(c: Checks) -> None:
    """Check the collectives of Python objects."""
    for check in (all_gather_object, gather_object, broadcast_objects, scatter_objects):
        c.run(check.__name__, check)
    if c.me.config.get("unbatched", True):
        c.run("send_objects", send_objects)


def _thing(place: int, to: int = 0) -> dict[str, Any]:
    return {"from": place, "to": to, "long": "x" * (10 + 40 * place)}


def all_gather_object(c: Checks) -> None:
    got: list[Any] = [None] * c.size
    dist.all_gather_object(got, _thing(c.rank), group=c.group)
    assert got == [_thing(place) for place in range(c.size)], got


def gather_object(c: Checks) -> None:
    got: list[Any] = [None] * c.size
    last = c.size - 1
    dist.gather_object(_thing(c.rank), got if c.rank == last else None, c.ranks[last], group=c.group)
    if c.rank == last:
        assert got == [_thing(place) for place in range(c.size)], got


def broadcast_objects(c: Checks) -> None:
    expected = [_thing(1), "and", 2]
    got = [*expected] if c.rank == 1 else [None] * 3
    dist.broadcast_object_list(got, c.ranks[1], group=c.group)
    assert got == expected, got


def scatter_objects(c: Checks) -> None:
    got: list[Any] = [None]
    things = [_thing(0, to) for to in range(c.size)]
    dist.scatter_object_list(got, things if c.rank == 0 else None, c.ranks[0], group=c.group)
    assert got == [_thing(0, c.rank)], got


def send_objects(c: Checks) -> None:
    if c.rank == 0:
        dist.send_object_list([_thing(0), 3], c.ranks[1], group=c.group)
    elif c.rank == 1:
        got: list[Any] = [None, None]
        dist.recv_object_list(got, c.ranks[0], group=c.group)
        assert got == [_thing(0), 3], got
