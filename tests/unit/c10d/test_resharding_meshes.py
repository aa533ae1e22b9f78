"""What becomes of sharded tensors whose mesh has some of the members only; mesh and world are played."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from multiworld._c10d.elastic.resharding import reshard  # noqa: E402  (torch may be missing)
from multiworld.errors import StateError  # noqa: E402  (torch may be missing)


class Elsewhere(torch.Tensor):
    """A DTensor as a member outside of its mesh has it."""

    device_mesh = SimpleNamespace(get_coordinate=lambda: None, shape=(1,))
    placements = (SimpleNamespace(dim=0),)

    def __create_chunk_list__(self):
        return [SimpleNamespace(offsets=torch.Size([]), sizes=torch.Size([0]))]

    def to_local(self):
        return torch.empty(0)


class World:
    """Rank 0 of two members; the other one says `theirs`."""

    rank = 0

    def __init__(self, theirs):
        self.theirs = theirs
        self.given = []

    def _pinned(self):
        return self

    def _in_turn(self, _ways, steps):
        return steps()

    def steps(self, _name, *, begun):
        assert begun
        return contextlib.nullcontext()

    def gather_bytes(self, mine):
        everyones = (mine, json.dumps(self.theirs).encode())
        return [torch.tensor(list(each), dtype=torch.uint8) for each in everyones]

    def isend(self, tensor, rank):
        self.given.append((tensor, rank))
        return SimpleNamespace(wait=lambda: None)

    def irecv(self, tensor, rank):
        assert rank == 1
        tensor.fill_(7.0)
        return SimpleNamespace(wait=lambda: None)


def elsewhere(*shape):
    return torch.zeros(shape).as_subclass(Elsewhere)


def known(path, *shape):
    return json.dumps([[path], "torch.float32", list(shape)])


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_a_member_gets_from_the_others_what_has_a_mesh_without_it(shape):
    whole = [[0] * len(shape), list(shape)]
    name = known("a", *shape)
    want = torch.zeros(shape)
    world = World([1, {name: whole}, {}])
    assert reshard(world, {"a": elsewhere(*shape)}, {"a": want}, 1) == []
    assert (want == 7.0).all()


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_a_member_gives_what_only_others_want(shape):
    whole = [[0] * len(shape), list(shape)]
    have = torch.ones(shape)
    world = World([None, {}, {known("a", *shape): whole}])
    assert reshard(world, {"a": have}, {"a": elsewhere(*shape)}, 1) == []
    ((given, rank),) = world.given
    assert (given.shape, rank) == (have.shape, 1)


def test_what_is_nowhere_but_outside_of_its_mesh_is_missing():
    assert reshard(World([None, {}, {}]), {"a": elsewhere(4)}, {"a": torch.zeros(4)}, 1) == ["a"]


def test_partial_values_are_refused_also_outside_of_their_mesh():
    """All members refuse them alike; otherwise one waits for the others."""

    class Partial(Elsewhere):
        def __create_chunk_list__(self):
            raise RuntimeError("partial placements, as torch says of them")

    with pytest.raises(RuntimeError, match="partial placements"):
        reshard(alone(), {"w": torch.zeros(2).as_subclass(Partial)}, {"w": torch.zeros(2)}, 1)


def alone():
    world = World([])
    world.gather_bytes = lambda _: pytest.fail("asks the others")
    return world


def placed(length, shape, blocks):
    """A tensor of `length`, on a mesh of this shape without this member.

    By dimension of the mesh: 0 for a replica, 1 for a Shard, more for a _StridedShard of so many blocks.
    """

    class Placed(Elsewhere):
        device_mesh = SimpleNamespace(get_coordinate=lambda: None, shape=shape)
        placements = tuple(
            SimpleNamespace(**({"dim": 0} if each else {}), **({"split_factor": each} if each > 1 else {}))
            for each in blocks
        )

    return torch.zeros(length).as_subclass(Placed)


@pytest.mark.parametrize(
    ("length", "shape", "blocks"),
    [
        (8, (2,), (2,)),  # no tensor parallelism on that dimension
        (8, (2, 2), (2, 0)),
        (8, (2, 2), (1, 2)),  # it comes first
        (8, (2, 2), (4, 1)),  # it splits into fewer
        (8, (2, 1), (2, 1)),
        (9, (2, 2, 2), (4, 1, 1)),  # 3, 2, 2, 2: not what _StridedShard takes
    ],
)
def test_a_tensor_whose_shards_are_not_contiguous_is_refused_on_all_members(length, shape, blocks):
    strange = placed(length, shape, blocks)
    for have, want in ((strange, torch.zeros(length)), (torch.zeros(length), strange)):
        with pytest.raises(StateError, match="w has the placements"):
            reshard(alone(), {"w": have}, {"w": want}, 1)


@pytest.mark.parametrize(
    ("length", "shape", "blocks"),
    [
        (8, (2, 2), (2, 1)),  # FSDP2 over tensor parallelism
        (7, (2, 2), (2, 1)),
        (8, (2, 2, 2), (0, 2, 1)),  # HSDP
        (8, (2, 2, 2), (4, 2, 1)),
        (8, (1,), (2,)),
        (9, (2, 2, 2), (1, 1, 1)),
    ],
)
def test_contiguous_shards_are_taken(length, shape, blocks):
    want = torch.zeros(length)
    world = World([1, {known("a", length): [[0], [length]]}, {}])
    assert reshard(world, {"a": placed(length, shape, blocks)}, {"a": want}, 1) == []
    assert (want == 7.0).all()
