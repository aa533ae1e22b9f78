"""Reductions: every collective that has one, every dtype and operation that torch's NCCL backends take."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from programs.checks import FLOAT8, FLOATS, NUMBERS, Checks, short

__all__ = ["reductions", "refusals"]

OPERATIONS = {
    "sum": ReduceOp.SUM,
    "product": ReduceOp.PRODUCT,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "avg": ReduceOp.AVG,
}
BITWISE = {"band": ReduceOp.BAND, "bor": ReduceOp.BOR, "bxor": ReduceOp.BXOR}
FACTOR = 2.0


def reduced(name: str, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Return what an operation makes of everybody's inputs, computed on the CPU."""
    dtype = inputs[0].dtype
    wide = torch.stack(inputs).to(torch.float64 if dtype.is_floating_point else torch.int64)
    if name == "sum" and dtype == torch.bool:
        return wide.amax(0).to(dtype)  # a sum of booleans is whether there is one
    made = {
        "sum": lambda: wide.sum(0),
        "product": lambda: wide.prod(0),
        "min": lambda: wide.amin(0),
        "max": lambda: wide.amax(0),
        "avg": lambda: wide.sum(0) // len(inputs),
        "premul": lambda: (wide * FACTOR).sum(0),
    }[name]
    return made().to(dtype)


def _error(c: Checks, name: str, inputs: list[torch.Tensor]) -> torch.Tensor | None:
    """How far off a result may be; None: not at all, as with the double, which divides at the end.

    A sum of these small integers is exact. For an average NCCL multiplies by 1/n, rounded, before it adds, so that each
    product and each sum are off by up to half a unit in the last place.
    """
    dtype = inputs[0].dtype
    if c.me.bed is not None or name != "avg" or not dtype.is_floating_point:
        return None
    sizes: torch.Tensor = torch.stack(inputs).to(torch.float64).abs().sum(0)
    return sizes * torch.finfo(dtype).eps


def _inputs(c: Checks, name: str, dtype: torch.dtype, n: int) -> list[torch.Tensor]:
    """Return everybody's inputs; an average gets multiples of the number of ranks, so that it is exact."""
    given = c.all_given(dtype, n)
    return [each * c.size for each in given] if name == "avg" else given


def reductions(c: Checks) -> None:
    """Check every collective with a reduction."""
    for dtype in (*NUMBERS, torch.bool):
        for name, op in OPERATIONS.items():
            if dtype != torch.bool or name != "avg":
                _each(c, name, op, dtype)
    for dtype in FLOATS:
        _each(c, "premul", dist._make_nccl_premul_sum(FACTOR), dtype)
    factor = c.there(torch.tensor([FACTOR]))
    _each(c, "premul", dist._make_nccl_premul_sum(factor), torch.float32, " by tensor")
    c.run("all_reduce complex64", _complex)
    for n in (1, 1 << 17):
        c.run(f"all_reduce of {n}", _all_reduce, "sum", ReduceOp.SUM, torch.float32, n)


def _each(c: Checks, name: str, op: Any, dtype: torch.dtype, more: str = "") -> None:
    what = f"{short(dtype)} {name}{more}"
    c.run(f"all_reduce {what}", _all_reduce, name, op, dtype)
    c.run(f"reduce {what}", _reduce, name, op, dtype)
    c.run(f"reduce_scatter {what}", _reduce_scatter, name, op, dtype)
    c.run(f"reduce_scatter_tensor {what}", _reduce_scatter_tensor, name, op, dtype)


def _all_reduce(c: Checks, name: str, op: Any, dtype: torch.dtype, n: int = 7) -> None:
    inputs = _inputs(c, name, dtype, n)
    tensor = c.there(inputs[c.rank])
    dist.all_reduce(tensor, op, group=c.group)
    c.equal(tensor, reduced(name, inputs), within=_error(c, name, inputs))


def _reduce(c: Checks, name: str, op: Any, dtype: torch.dtype) -> None:
    inputs = _inputs(c, name, dtype, 5)
    for place, dst in enumerate(c.ranks):
        tensor = c.there(inputs[c.rank])
        dist.reduce(tensor, dst, op, group=c.group)
        if c.rank == place:
            c.equal(tensor, reduced(name, inputs), within=_error(c, name, inputs))


def _reduce_scatter(c: Checks, name: str, op: Any, dtype: torch.dtype) -> None:
    inputs = _inputs(c, name, dtype, 3 * c.size)
    out = c.room(3, dtype=dtype)
    dist.reduce_scatter(out, [c.there(part) for part in inputs[c.rank].split(3)], op, group=c.group)
    _part(c, out, name, inputs)


def _reduce_scatter_tensor(c: Checks, name: str, op: Any, dtype: torch.dtype) -> None:
    inputs = _inputs(c, name, dtype, 3 * c.size)
    out = c.room(3, dtype=dtype)
    dist.reduce_scatter_tensor(out, c.there(inputs[c.rank]), op, group=c.group)
    _part(c, out, name, inputs)


def _part(c: Checks, out: torch.Tensor, name: str, inputs: list[torch.Tensor]) -> None:
    off = _error(c, name, inputs)
    c.equal(out, reduced(name, inputs).split(3)[c.rank], within=None if off is None else off.split(3)[c.rank])


def _complex(c: Checks) -> None:
    inputs = [torch.complex(each, -2 * each) for each in c.all_given(torch.float32)]
    tensor = c.there(inputs[c.rank])
    dist.all_reduce(tensor, group=c.group)
    c.equal(tensor, torch.stack(inputs).sum(0))


def refusals(c: Checks) -> None:
    """Check that what NCCL has not is refused, and that nothing of it stays behind."""
    for name, op in BITWISE.items():
        c.refuses(f"all_reduce {name}", lambda op=op: dist.all_reduce(c.mine(torch.int32), op, group=c.group))
    c.refuses("avg of bool", lambda: dist.all_reduce(c.mine(torch.bool), ReduceOp.AVG, group=c.group))
    c.refuses("a tensor of the CPU", lambda: dist.all_reduce(c.given(c.rank), group=c.group))
    c.refuses("float8", lambda: [_float8(c, dtype) for dtype in FLOAT8])
    c.run("all_reduce after refusals", _all_reduce, "sum", ReduceOp.SUM, torch.float32)
    c.run("no group is left open", lambda c: _depth(c, 0))


def _depth(c: Checks, expected: int) -> None:
    if c.me.bed is not None:
        depth = c.me.bed.count("group_depth")
        assert depth == expected, depth


def _float8(c: Checks, dtype: torch.dtype) -> None:
    dist.all_reduce(c.mine(dtype), group=c.group)
