"""Every kind of tensor arrives as it was sent, whichever way it goes; what torch refuses is refused, and no member hangs.

gloo refuses tensors that are not contiguous; the lane takes them.
"""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from kits.contract.tensorkit import DTYPES, KINDS, bytes_of, filled, value
from kits.contract.waykit import RECEIVES, SENDS, readers, world

from multiworld._core.lane import frames

TAKEN = sorted(each for each in RECEIVES if "any" not in each)
WAYS = list(zip(sorted(SENDS), TAKEN, strict=True))  # test_lane_groups has all pairs


def of_torch(way):
    """Whether it is a function of torch.distributed that is called: those refuse conjugated tensors."""
    return "block" in way or "batch" in way


def kinds(me, size):
    with world(me, size) as w:
        assert w._gen.lane is not None
        wrong = {}
        for (send, receive), (name, kind) in itertools.product(WAYS, KINDS.items()):
            if of_torch(send) and "conjugated" in name:
                continue
            if me.rank == 0:
                SENDS[send](w, kind.sent(), 1)
                continue
            room, expected = kind.room(), kind.sent()
            RECEIVES[receive](w, room, 0)
            if not torch.equal(value(room), value(expected)):
                wrong[name, send] = f"{value(room)}, not {value(expected)}"
        w.barrier()
        me.emit("wrong", wrong=wrong)


def test_every_kind_of_tensor_arrives_in_every_way(cast):
    members = cast.all(kinds, 2)
    assert members[1].expect("wrong").wrong == {}
    assert [each.finish() for each in members] == [0, 0]


def all_dtypes(me, size):
    """Every dtype that has bytes: all of them arrive, in all ways."""
    with world(me, size) as w:
        wrong = []
        for name in DTYPES:
            for send, receive in WAYS if name in {"float32", "complex64", "bfloat16"} else WAYS[:1]:
                if me.rank == 0:
                    SENDS[send](w, filled(name, 1), 1)
                else:
                    room = filled(name, 2)
                    RECEIVES[receive](w, room, 0)
                    if bytes_of(room) != bytes_of(filled(name, 1)):
                        wrong.append((name, send, receive))
        w.barrier()
        me.emit("wrong", wrong=wrong, dtypes=DTYPES)


def test_every_dtype_arrives(cast):
    members = cast.all(all_dtypes, 2)
    seen = members[1].expect("wrong")
    assert seen.wrong == []
    assert {"complex128", "bool", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "int64"} <= {
        *seen.dtypes
    }
    assert {"qint8", "quint8", "qint32"} <= {*seen.dtypes}
    assert [each.finish() for each in members] == [0, 0]


EDGES = sorted(
    {each + more for each in (frames.READ_FROM, frames.EAGER_LIMIT, frames.CHUNK, frames.PIECE, frames.BUDGET) for more in (-1, 0, 1)}
    | {0, 1, 3968, 3969, 4000, 4001, 2 * frames.CHUNK + 1, frames.BUDGET - frames.OVERHEAD, 2 * frames.PIECE + 5}
)  # fmt: skip
LARGE = 256 << 20


def sizes(me, size, memory):
    with world(me, size, memory=memory) as w:
        me.emit("readers", readers=readers(w))
        wrong = []
        for number, nbytes in enumerate([*EDGES, LARGE]):
            pattern = torch.arange(nbytes, dtype=torch.int32).to(torch.uint8) if nbytes < LARGE else None
            if pattern is None:
                pattern = torch.arange(251, dtype=torch.uint8).repeat(LARGE // 251 + 1)[:LARGE]
            send, receive = WAYS[number % len(WAYS)]
            if me.rank == 0:
                SENDS[send](w, pattern, 1)
            else:
                room = torch.full_like(pattern, 255)
                RECEIVES[receive](w, room, 0)
                if not torch.equal(room, pattern):
                    wrong.append((nbytes, send, receive))
        w.barrier()
        me.emit("wrong", wrong=wrong)


@pytest.mark.parametrize("memory", [True, False])
def test_every_size_arrives(cast, memory):
    members = cast.all(sizes, 2, memory=memory)
    if not memory:
        assert [each.expect("readers").readers for each in members] == [[], []]
    assert members[1].expect("wrong").wrong == []
    assert [each.finish() for each in members] == [0, 0]


# -- numbers and sequences of other kinds -----------------------------------------------------------------------------


def other_numbers(me, size):
    with world(me, size) as w, w:
        room = torch.zeros(3)
        for rank, tag in ((np.int64, int), (int, np.int32), (bool, bool), (torch.tensor, int)):
            if me.rank == 0:
                dist.send(torch.arange(3.0), rank(1), tag=tag(1))
                dist.isend(torch.arange(3.0), rank(1), tag=tag(1)).wait()
            else:
                for recv in (dist.recv, lambda *args, **more: dist.irecv(*args, **more).wait()):
                    room.zero_()
                    recv(room, 0, tag=1)
                    assert torch.equal(room, torch.arange(3.0))
        if me.rank == 0:
            dist.group.WORLD.send((torch.arange(3.0),), 1, 2).wait()
        else:
            dist.group.WORLD.recv([room], 0, 2).wait()
        w.barrier()


def test_ranks_and_tags_may_be_integers_of_other_kinds(cast):
    assert [each.finish() for each in cast.all(other_numbers, 2)] == [0, 0]


# -- what is refused --------------------------------------------------------------------------------------------------


def no_memory():
    made = torch.zeros(4)
    made.untyped_storage().resize_(0)
    return made


LOGS_TENSORS = not hasattr(torch.nn, "Buffer")
"""torch 2.4 formats the arguments of a call that failed, and ends with SIGSEGV for a tensor without memory."""

REFUSED = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "SparseCPU"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "SparseCsrCPU"),
    "mkldnn": (lambda: torch.eye(3).to_mkldnn(), "MkldnnCPU"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]), "NestedTensor"),
    "released": (no_memory, "without memory"),
}


def shared_elements():
    return torch.zeros(1, 3).expand(2, 3)


def conjugated():
    return torch.zeros(3, dtype=torch.complex64).conj()


def refusing(me, size):
    with world(me, size) as w:
        if me.rank == 0:
            for (make, text), way in itertools.product(
                REFUSED.values(), [*SENDS.values(), *RECEIVES.values()]
            ):
                if make is no_memory and LOGS_TENSORS:
                    continue
                with pytest.raises(RuntimeError, match=text):
                    way(w, make(), 1)
            for way in RECEIVES.values():
                with pytest.raises(RuntimeError, match="lie apart in memory"):
                    way(w, shared_elements(), 1)
            for way in (way for name, way in (SENDS | RECEIVES).items() if of_torch(name)):
                with pytest.raises(RuntimeError, match="view_as_real"):
                    way(w, conjugated(), 1)
        # Nothing was sent, no receive is left over: the next message is the next one's.
        w.barrier()
        room = torch.zeros(3)
        if me.rank == 0:
            w.send(torch.arange(3.0), 1)
            assert w.recv(room) == 1
        else:
            assert w.recv(room) == 0
            w.send(torch.arange(3.0), 0)
        assert torch.equal(room, torch.arange(3.0))
        assert w.state.name == "ACTIVE"
        w.barrier()


def test_what_has_no_bytes_is_refused_and_the_world_goes_on(cast):
    assert [each.finish() for each in cast.all(refusing, 2)] == [0, 0]


def in_detail(me, size):
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    with world(me, size) as w:
        for send, receive in WAYS:
            if me.rank == 0:
                SENDS[send](w, torch.arange(3.0), 1)
            else:
                room = torch.zeros(3)
                RECEIVES[receive](w, room, 0)
                assert torch.equal(room, torch.arange(3.0))
        w.barrier()
        assert w._gen.lane is not None


def test_with_torchs_debug_level_detail(cast):
    assert [each.finish() for each in cast.all(in_detail, 2)] == [0, 0]
