"""What the double's NCCL calculates: every operation, data type and reduction, without torch in between."""

from __future__ import annotations

import functools
from functools import partial

import numpy as np
import pytest
import rawnccl
from rawnccl import DTYPES, OPS

REDUCE = {
    "sum": functools.partial(np.sum, axis=0),
    "prod": functools.partial(np.prod, axis=0),
    "max": functools.partial(np.max, axis=0),
    "min": functools.partial(np.min, axis=0),
}


def values(rank, count, dtype):
    """Small enough that every type holds all sums and products."""
    return ((np.arange(count) + rank) % 3 + 1).astype(dtype)


def of_rank(count, dtype):
    """As `values`, for an argument that is a function of the rank."""
    return partial(values, count=count, dtype=dtype)


def expected(op, ranks, count, dtype):
    parts = np.array([values(rank, count, dtype).astype("float64") for rank in range(ranks)])
    if op != "avg":
        return REDUCE[op](parts).astype(dtype)
    total = REDUCE["sum"](parts)
    return (total // ranks if np.issubdtype(dtype, np.integer) else total.astype(dtype) / ranks).astype(dtype)


def same(got, wanted):
    np.testing.assert_allclose(
        got.astype("float64"), np.asarray(wanted).astype("float64"), rtol=2e-3 if got.itemsize == 2 else 1e-6
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_reductions(library, tmp_path, size):
    with rawnccl.crew(library, tmp_path, size) as crew:
        for dtype in DTYPES:
            for op in OPS:
                for count in (1, 2, 1000) if dtype == "float32" else (7,):
                    send = of_rank(count, dtype)
                    for got in crew.each("run", "AllReduce", send, count, dtype=dtype, op=op):
                        same(got, expected(op, size, count, dtype))
                    root = (count + 1) % size
                    got = crew.each("run", "Reduce", send, count, dtype=dtype, op=op, root=root)[root]
                    same(got, expected(op, size, count, dtype))
                    whole = of_rank(count * size, dtype)
                    for rank, got in enumerate(
                        crew.each("run", "ReduceScatter", whole, count, dtype=dtype, op=op)
                    ):
                        same(got, expected(op, size, count * size, dtype)[rank * count : (rank + 1) * count])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_movements(library, tmp_path, size):
    with rawnccl.crew(library, tmp_path, size) as crew:
        for dtype in ("uint8", "int64", "float16"):
            for count in (1, 5):
                one = of_rank(count, dtype)
                each = np.concatenate([one(rank) for rank in range(size)])
                for got in crew.each("run", "AllGather", one, count * size, dtype=dtype):
                    same(got, each)
                for root in range(size):
                    for got in crew.each("run", "Broadcast", one, count, dtype=dtype, root=root):
                        same(got, one(root))
                    same(crew.each("run", "Gather", one, count * size, dtype=dtype, root=root)[root], each)
                    whole = of_rank(count * size, dtype)
                    scattered = crew.each("run", "Scatter", whole, count, dtype=dtype, root=root)
                    same(np.concatenate(scattered), whole(root))
                for rank, got in enumerate(crew.each("run", "AlltoAll", whole, count * size, dtype=dtype)):
                    mine = slice(rank * count, (rank + 1) * count)
                    same(got, np.concatenate([whole(peer)[mine] for peer in range(size)]))


def test_types_that_numpy_has_not(library, tmp_path):
    """Sums of 1 and 2 (bits written down from the formats), and what is too large for them."""
    table = {  # number of the type: dtype of its bits, [1, 2, largest], [1 + 2, largest + largest]
        9: ("uint16", [0x3F80, 0x4000, 0x7F7F], [0x4040, 0x7F80]),
        10: ("uint8", [0x38, 0x40, 0x7E], [0x44, 0x7E]),
        11: ("uint8", [0x3C, 0x40, 0x7B], [0x42, 0x7B]),
    }
    with rawnccl.crew(library, tmp_path, 2) as crew:
        for number, (bits, (one, two, largest), (three, too_large)) in table.items():
            send = [np.array([first, largest], bits) for first in (one, two)]
            for got in crew.each("run", "AllReduce", send.__getitem__, 2, dtype=number):
                assert got.tolist() == [three, too_large]


def test_in_place(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 3) as crew:
        one = of_rank(4, "float32")
        for got in crew.each("run", "AllReduce", one, 4, dtype="float32", inplace=True):
            same(got, expected("sum", 3, 4, "float32"))
        gathered = np.concatenate([one(rank) for rank in range(3)])
        for got in crew.each("run", "AllGather", one, 12, dtype="float32", inplace="inside-receive"):
            same(got, gathered)
        whole = of_rank(12, "float32")
        scattered = crew.each("run", "ReduceScatter", whole, 4, dtype="float32", inplace="inside-send")
        same(np.concatenate(scattered), expected("sum", 3, 12, "float32"))


def test_premultiplied_sums(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 3) as crew:
        for dtype in ("float32", "float16", "float64"):
            ops = crew.each("premul", lambda rank: rank + 0.5, dtype)
            for got in crew.each("run", "AllReduce", np.array([2, 4], dtype), 2, dtype=dtype, op=ops[0]):
                same(got, [2 * 4.5, 4 * 4.5])
            assert crew.each("drop_op", ops[0]) == [0, 0, 0]
            assert crew[0].begin("AllReduce", np.ones(1, dtype), 1, dtype=dtype, op=ops[0]) == 4


def test_nothing_to_do_is_done_at_once(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 2) as crew:
        nothing = np.ones(0, "float32")
        for kind in ("AllReduce", "Broadcast", "AllGather", "ReduceScatter", "AlltoAll", "Reduce"):
            assert crew[0].begin(kind, nothing, 0, dtype="float32", count=0) == 0  # rank 1 takes no part
        assert crew[0].ready(10)


def test_point_to_point_in_a_group_goes_both_ways(library, tmp_path):
    """A ring, each rank sends before it receives; and a message to oneself."""
    size, count = 3, 3_000_000  # more than a socket holds

    def full(rank):
        return np.full(count, rank, "float64")

    with rawnccl.crew(library, tmp_path, size) as crew:
        crew.each("group", "Start")
        crew.each("begin", "Send", full, 0, dtype="float64", root=lambda rank: (rank + 1) % size)
        crew.each("begin", "Recv", [0.0], count, dtype="float64", root=lambda rank: (rank - 1) % size)
        crew.each("begin", "Send", full, 0, dtype="float64", root=lambda rank: rank)
        crew.each("begin", "Recv", [0.0], count, dtype="float64", root=lambda rank: rank)
        assert crew.each("group", "End") == [0] * size
        assert all(crew.each("ready", 30))
        for rank, (_, around, _, self) in enumerate(crew.each("received")):
            assert set(around) == {(rank - 1) % size}
            assert set(self) == {rank}


def test_operations_of_a_communicator_keep_their_order_across_streams(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 2) as crew:
        for turn in range(20):
            data = np.array([float(turn)])
            crew.each("begin", "AllReduce", data, 1, dtype="float64", stream="ab"[turn % 2])
        assert all(crew.each("ready", 30, "a"))
        assert all(crew.each("ready", 30, "b"))
        for got in crew.each("received"):
            assert [each[0] for each in got] == [2.0 * turn for turn in range(20)]


def test_64_megabytes(library, tmp_path, record_property):
    """An idle machine does 200 MiB/s and more; a bound would only say how busy it is."""
    with rawnccl.crew(library, tmp_path, 2) as crew:
        results = crew.each("big_sum", 16 << 20)
        assert all(low == high == 3.0 for low, high, _ in results)
        slowest = max(seconds for *_, seconds in results)
        record_property("MiB/s", 64 / slowest)


def test_one_process_with_several_devices(library, tmp_path):
    with rawnccl.crew(library, tmp_path, 1, connected=False) as crew:
        (rank,) = crew.members
        assert rank.init_all(3) == 0
        rank.group("Start")
        for i in range(3):
            data = np.array([i + 1.0])
            assert rank.begin("AllReduce", data, 1, dtype="float64", name=f"all{i}", stream=f"s{i}") == 0
        assert rank.group("End") == 0
        for i in range(3):
            assert rank.ready(30, f"s{i}")
        assert [each[0] for each in rank.received()] == [6.0] * 3
