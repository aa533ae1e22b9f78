"""One rank, no NCCL: what torch does with the double's devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from bed.rank import Rank

DTYPES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64",
    "complex128", "float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64",
)  # fmt: skip


def everyday(me: Rank) -> None:
    """Devices, fills, copies, streams, events, pinned memory, the caching allocator."""
    import torch

    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 8
    assert torch.cuda.get_device_name() == "m8d test bed (no hardware)"
    assert torch.cuda.get_device_capability() == (9, 0)
    assert torch.ones(4).cuda().device == torch.device("cuda", 0)

    for name in DTYPES:
        for size in (0, 1, 3, 1000):
            filled = torch.ones(size, dtype=getattr(torch, name), device="cuda").cpu()
            assert filled.to(torch.complex128).eq(1).all(), (name, size, filled)
    assert torch.full((5,), 2.5, device="cuda:3").tolist() == [2.5] * 5
    part = torch.zeros(7, device="cuda")
    part[2:5].fill_(9)
    assert part.tolist() == [0, 0, 9, 9, 9, 0, 0]
    there = torch.arange(6.0).view(2, 3)
    assert there.to("cuda:0").to("cuda:1").cpu().equal(there)

    side = torch.cuda.Stream(priority=-1)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(side):
        begin.record()
        filled = torch.ones(1 << 20, device="cuda")
        end.record()
    torch.cuda.current_stream().wait_stream(side)
    filled.record_stream(torch.cuda.current_stream())
    end.synchronize()
    assert side.query()
    assert begin.elapsed_time(end) >= 0
    assert filled.cpu().eq(1).all()

    pinned = torch.arange(100.0).pin_memory()
    assert pinned.is_pinned()
    back = torch.empty(100).pin_memory()
    back.copy_(pinned.to("cuda", non_blocking=True), non_blocking=True)
    torch.cuda.synchronize()
    assert back.equal(pinned)

    try:
        torch.empty(9 << 30, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        pass
    else:
        raise AssertionError("9 GB fitted into 8")
    del filled, part
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[1] == 8192 << 20
    me.event("done")


def integers(me: Rank) -> None:
    """What the object collectives calculate on the device."""
    import torch

    def there(*values: int) -> torch.Tensor:
        return torch.tensor(values).cuda()

    left, right = there(3, 4, 5), there(4, 4, 4)
    assert (left < right).tolist() == [True, False, False]
    assert (left <= right).tolist() == [True, True, False]
    assert (left > right).tolist() == [False, False, True]
    assert (left >= right).tolist() == [False, True, True]
    assert max([there(3), there(9), there(4)]).item() == 9
    assert (left + right).tolist() == [7, 8, 9]
    assert (left + 7).tolist() == (7 + left).tolist() == [10, 11, 12]
    for size in (1, 2, 3, 31, 1000, 5000):
        values = torch.arange(size)
        assert values.cuda().sum().item() == values.sum().item(), size
        assert values.neg().cuda().max().item() == 0, size
        assert values.flip(0).cuda().max().item() == size - 1, size
    for sizes in ((5, 7), (16, 32), (1, 16, 3), (128,) * 3, (1,) * 300):
        for dtype in (torch.uint8, torch.int64, torch.float32):
            parts = [torch.arange(size).to(dtype) + index % 50 for index, size in enumerate(sizes)]
            assert torch.cat([part.cuda() for part in parts]).cpu().equal(torch.cat(parts)), (sizes, dtype)
    assert torch.cat([there(1), there(2)]).tolist() == [1, 2]
    me.event("done")


def refusals(me: Rank) -> None:
    """Kernels that are not modelled: none may seem to work."""
    import torch

    there = torch.ones(2, 3).cuda()
    attempts = {
        "multiply": lambda: there * 2,
        "negative": lambda: -there,
        "absolute": there.abs,
        "cast": lambda: there.to(torch.float16),
        "transpose": lambda: there.t().contiguous(),
        "sum of floats": there.sum,
        "sum of rows": lambda: there.long().sum(0),
        "cat in the second dimension": lambda: torch.cat([there, there], 1),
        "fill with a stride": lambda: there[:, 0].fill_(1),
        "range": lambda: torch.arange(3, device="cuda"),
        "random": lambda: torch.rand(3, device="cuda"),
    }
    for name, attempt in attempts.items():
        said = _refused(attempt)
        assert "operation not supported" in said, (name, said)
    assert there.cpu().eq(1).all()
    assert me.bed is not None
    me.event("done", refused=me.bed.count("kernels_refused"), stubs=me.bed.stubs())


def _refused(attempt: Callable[[], object]) -> str:
    """Return what the error says, or what came out without one."""
    try:
        return f"no error, but {attempt()}"
    except RuntimeError as exc:
        return str(exc)
