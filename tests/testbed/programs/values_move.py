"""Collectives that move data: every one, for every dtype torch's NCCL backends take."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from programs.checks import FLOAT8, NUMBERS, Checks, N, short

__all__ = ["movements", "odds_and_ends"]

DTYPES = (*NUMBERS, torch.bool, *FLOAT8)


def movements(c: Checks) -> None:
    """Check every collective that moves data, with every dtype."""
    for dtype in DTYPES:
        for check in (
            broadcast, all_gather, all_gather_into_tensor, gather, scatter, all_to_all, all_to_all_single,
        ):  # fmt: skip
            c.run(f"{check.__name__} {short(dtype)}", check, dtype)


def odds_and_ends(c: Checks) -> None:
    """Check the unusual forms: uneven parts, barriers, and what a work object says."""
    for check in (
        all_gather_uneven,
        reduce_scatter_uneven,
        all_to_all_uneven,
        all_to_all_single_uneven,
        stacked,
    ):
        c.run(check.__name__, check)
    c.run("barrier", lambda c: dist.barrier(group=c.group))
    c.run("barrier async", lambda c: dist.barrier(group=c.group, async_op=True).wait())
    c.run("work", work)
    c.run("future", future)


def broadcast(c: Checks, dtype: torch.dtype) -> None:
    for place, src in enumerate(c.ranks):
        tensor = c.mine(dtype) if c.rank == place else c.room(N, dtype=dtype)
        dist.broadcast(tensor, src, group=c.group)
        c.equal(tensor, c.given(place, dtype))


def all_gather(c: Checks, dtype: torch.dtype) -> None:
    outs = [c.room(N, dtype=dtype) for _ in c.ranks]
    dist.all_gather(outs, c.mine(dtype), group=c.group)
    for place, out in enumerate(outs):
        c.equal(out, c.given(place, dtype))


def all_gather_into_tensor(c: Checks, dtype: torch.dtype) -> None:
    out = c.room(N * c.size, dtype=dtype)
    dist.all_gather_into_tensor(out, c.mine(dtype), group=c.group)
    for place in range(c.size):
        c.equal(out[place * N : (place + 1) * N], c.given(place, dtype))


def gather(c: Checks, dtype: torch.dtype) -> None:
    for place, dst in enumerate(c.ranks):
        outs = [c.room(N, dtype=dtype) for _ in c.ranks] if c.rank == place else None
        dist.gather(c.mine(dtype), outs, dst, group=c.group)
        for other, out in enumerate(outs or []):
            c.equal(out, c.given(other, dtype))


def scatter(c: Checks, dtype: torch.dtype) -> None:
    for place, src in enumerate(c.ranks):
        out = c.room(N, dtype=dtype)
        parts = [c.mine(dtype, salt=to) for to in range(c.size)] if c.rank == place else None
        dist.scatter(out, parts, src, group=c.group)
        c.equal(out, c.given(place, dtype, salt=c.rank))


def all_to_all(c: Checks, dtype: torch.dtype) -> None:
    outs = [c.room(N, dtype=dtype) for _ in c.ranks]
    dist.all_to_all(outs, [c.mine(dtype, salt=to) for to in range(c.size)], group=c.group)
    for place, out in enumerate(outs):
        c.equal(out, c.given(place, dtype, salt=c.rank))


def all_to_all_single(c: Checks, dtype: torch.dtype) -> None:
    out = c.room(2 * c.size, dtype=dtype)
    dist.all_to_all_single(out, c.mine(dtype, 2 * c.size), group=c.group)
    for place in range(c.size):
        part = slice(2 * c.rank, 2 * c.rank + 2)
        c.equal(out[2 * place : 2 * place + 2], c.given(place, dtype, 2 * c.size)[part])


def all_gather_uneven(c: Checks) -> None:
    """Rank r gives r+1 elements."""
    outs = [c.room(place + 1) for place in range(c.size)]
    dist.all_gather(outs, c.mine(n=c.rank + 1), group=c.group)
    for place, out in enumerate(outs):
        c.equal(out, c.given(place, n=place + 1))


def reduce_scatter_uneven(c: Checks) -> None:
    """Rank r gets r+1 elements."""
    parts = [c.mine(n=to + 1, salt=to) for to in range(c.size)]
    out = c.room(c.rank + 1)
    dist.reduce_scatter(out, parts, group=c.group)
    c.equal(out, torch.stack(c.all_given(n=c.rank + 1, salt=c.rank)).sum(0))


def all_to_all_uneven(c: Checks) -> None:
    """Rank r sends 1 + (r + to) % 3 elements."""
    outs = [c.room(1 + (place + c.rank) % 3) for place in range(c.size)]
    parts = [c.mine(n=1 + (c.rank + to) % 3, salt=to) for to in range(c.size)]
    dist.all_to_all(outs, parts, group=c.group)
    for place, out in enumerate(outs):
        c.equal(out, c.given(place, n=1 + (place + c.rank) % 3, salt=c.rank))


def all_to_all_single_uneven(c: Checks) -> None:
    """Rank r sends r + to elements; 0 to itself, if it is rank 0."""
    sends = [c.rank + to for to in range(c.size)]
    takes = [place + c.rank for place in range(c.size)]
    out = c.room(sum(takes))
    parts = [c.given(c.rank, n=n, salt=to) for to, n in enumerate(sends)]
    dist.all_to_all_single(out, c.there(torch.cat(parts)), takes, sends, group=c.group)
    expected = [c.given(place, n=n, salt=c.rank) for place, n in enumerate(takes)]
    c.equal(out, torch.cat(expected))


def stacked(c: Checks) -> None:
    """The outputs of one tensor, stacked instead of one after the other."""
    out = c.room(c.size, N)
    dist.all_gather_into_tensor(out, c.mine(), group=c.group)
    c.equal(out, torch.stack(c.all_given()))
    part = c.room(N)
    dist.reduce_scatter_tensor(part, c.there(torch.stack(c.all_given(salt=c.rank))), group=c.group)
    c.equal(part, torch.stack([c.given(c.rank, salt=other) for other in range(c.size)]).sum(0))


def work(c: Checks) -> None:
    """What a work object says, before and after."""
    tensor = c.mine()
    handle = dist.all_reduce(tensor, group=c.group, async_op=True)
    assert handle.wait(timedelta(seconds=60)) is True
    torch.cuda.current_stream().synchronize()
    assert handle.is_completed()
    try:
        assert handle.exception() is None
    except TypeError as exc:  # torch 2.6 has the method, but cannot hand its result to Python
        assert "Unable to convert function return value" in str(exc)  # noqa: PT017 -- it need not raise
    c.equal(tensor, torch.stack(c.all_given()).sum(0))


def future(c: Checks) -> None:
    """The same through its future."""
    tensor = c.mine()
    handle = dist.all_reduce(tensor, group=c.group, async_op=True)
    (value,) = handle.get_future().wait()
    c.equal(value, torch.stack(c.all_given()).sum(0))
    handle.wait()
