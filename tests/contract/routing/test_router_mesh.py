"""Device meshes of different worlds are different meshes, and otherwise what they are in torch."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from kits.contract.routerkit import routed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from multiworld._c10d.routing import mesh as mesh_module
from multiworld._c10d.routing import router, selection
from multiworld._c10d.routing.mesh import world_of
from multiworld.errors import RouterError

pytestmark = [
    # Torch's own, about itself, in old versions.
    pytest.mark.filterwarnings("ignore:DTensor random operators may not have"),
    pytest.mark.filterwarnings("ignore:You are using `torch.load` with `weights_only=False`"),
]


@pytest.fixture
def kit():
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    with routed() as made:
        yield made


def fake(kit, name, generation=1):
    return kit.world(name, generation=generation, backend="fake", rank=1, size=4)


def made_in(state, *shape):
    names = ("x", "y")[: len(shape)]
    with router.selected(state):
        return init_device_mesh("cpu", shape, mesh_dim_names=names)


def test_meshes_of_two_worlds_and_generations_differ(kit):
    states = [fake(kit, "a"), fake(kit, "b"), fake(kit, "a", generation=2)]
    meshes = [made_in(state, 4) for state in states]
    assert len(set(meshes)) == 3
    assert len({hash(mesh) for mesh in meshes}) == 3
    for mesh, state in zip(meshes, states, strict=True):
        assert mesh == made_in(state, 4)
        assert hash(mesh) == hash(made_in(state, 4))
        assert world_of(mesh) is state


def test_meshes_outside_worlds_compare_as_in_torch(kit):
    kit.own(backend="fake", rank=1, size=4)
    a = fake(kit, "a")
    one, two = (init_device_mesh("cpu", (4,), mesh_dim_names=("x",)) for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert one != made_in(a, 4)
    assert world_of(one) is None


def test_a_mesh_means_its_world_wherever_it_is_used(kit):
    a, b = fake(kit, "a"), kit.world("b", backend="fake", rank=0, size=4)
    mesh = made_in(a, 2, 2)
    with router.selected(a):
        wanted = mesh["y"]
    for selected in (None, b):
        with router.selected(selected):
            assert mesh.get_rank() == 1
            assert mesh.get_local_rank("y") == 1
            assert mesh.get_coordinate() == type(mesh.get_coordinate())((0, 1))
            assert mesh["y"] == wanted
            assert hash(mesh["y"]) == hash(wanted)
            assert world_of(mesh["y"]) is a
            assert mesh["y"].get_group() is wanted.get_group()
            assert wanted.mesh.tolist() == [0, 1]
            assert mesh["x"].mesh.tolist() == [1, 3]
    assert len(dict.keys(b.pg_map)) == 1


def facts_of(mesh, group):
    """What a mesh of torch's own default group says of this process and its groups."""
    return [
        mesh.get_rank(),
        mesh.get_local_rank("x"),
        mesh["y"].mesh.tolist(),
        list(mesh["y"].get_coordinate()),
        dist.get_process_group_ranks(mesh["y"].get_group()),
        world_of(mesh["y"]),
        list(DeviceMesh.from_group(group, "cpu").get_coordinate()),
        world_of(DeviceMesh.from_group(group, "cpu")),
    ]


def test_a_mesh_of_torchs_own_group_means_that_inside_a_world(kit):
    kit.own(backend="fake", rank=1, size=4)
    mesh = made_in(None, 2, 2)
    group = mesh.get_group("y")
    a = kit.world("a", backend="fake", rank=2, size=4)
    wanted = [1, 0, [0, 1], [1], [0, 1], None, [1], None]
    assert facts_of(mesh, group) == wanted
    seen = []
    with router.selected(a):
        seen.append(facts_of(mesh, group))
        with selection.Tracing():  # as where torch's compiler asks a mesh
            seen.append(facts_of(mesh, group))
        x = torch.ones(1, requires_grad=True)
        x.register_hook(lambda _: seen.append(facts_of(mesh, group)))
        x.sum().backward()
        seen.append(dist.get_rank())
    assert seen == [wanted, wanted, wanted, 2]
    if hasattr(DeviceMesh, "_flatten"):
        with router.selected(a):
            flat = mesh._flatten("all")
        assert world_of(flat) is None
        assert flat.get_group() is dist.group.WORLD


def test_a_flattened_mesh_belongs_to_its_world(kit):
    if not hasattr(DeviceMesh, "_flatten"):
        pytest.skip("this torch cannot flatten meshes")
    a, b = fake(kit, "a"), fake(kit, "b")
    mesh = made_in(a, 2, 2)
    with router.selected(b):
        flat = mesh["x", "y"]._flatten("all")
    assert world_of(flat) is a
    assert a.owns(flat.get_group())
    assert flat != made_in(b, 4)


def test_a_mesh_from_a_group_belongs_to_the_groups_world(kit):
    a, b = fake(kit, "a"), fake(kit, "b")
    for selected in (None, a, b):
        with router.selected(selected):
            assert world_of(DeviceMesh.from_group(a.group, "cpu")) is a


def test_copies_are_equal(kit):
    a = fake(kit, "a")
    mesh = made_in(a, 2, 2)
    with router.selected(a):
        loaded = pickle.loads(pickle.dumps(mesh))  # noqa: S301  (our own bytes)
        for other in (copy.copy(mesh), loaded):
            assert other == mesh
            assert hash(other) == hash(mesh)
            assert world_of(other) is a
            assert other.get_group("x") is mesh.get_group("x")


def test_a_mesh_of_a_world_that_is_gone_is_still_a_mesh(kit):
    a = fake(kit, "a")
    mesh = made_in(a, 4)
    a.forget()
    assert world_of(mesh) is None
    assert mesh == mesh  # noqa: PLR0124  (it must not raise)
    assert hash(mesh) == hash(mesh)
    assert mesh.size() == 4


def test_a_mesh_of_a_world_that_is_gone_knows_its_rank_inside_of_another(kit):
    a, b = fake(kit, "a"), kit.world("a", generation=2, backend="fake", rank=2, size=4)
    mesh = made_in(a, 2, 2)
    with router.selected(a):
        parts = [mesh["x"], mesh["y"]]

    def told():
        return [(each.get_rank(), each.mesh.tolist(), each.get_coordinate()) for each in (mesh, *parts)]

    before = told()
    a.forget()
    for selected in (None, b):
        with router.selected(selected):
            assert told() == before
    assert [rank for rank, _, _ in before] == [1, 1, 1]


def test_a_mesh_that_is_kept_holds_no_group_of_a_world_that_is_gone(kit):
    """The caches of DTensor keep meshes for good, and copies of them."""
    a = fake(kit, "a")
    mesh, equal = made_in(a, 2, 2), made_in(a, 2, 2)
    with router.selected(a):
        kept = [mesh, equal, mesh["y"], copy.copy(mesh)]
        from_group = DeviceMesh.from_group(mesh.get_group("y"), "cpu")
    groups = [weakref.ref(each.get_group(name)) for each in (mesh, equal) for name in ("x", "y")]
    a.forget()
    assert [each() for each in groups] == [None] * 4
    assert [world_of(each) for each in (*kept, from_group)] == [None] * 5


def test_the_sharding_cache_does_not_mix_worlds(kit):
    try:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    except ImportError:
        from torch.distributed._tensor import Replicate, Shard, distribute_tensor
    used = []
    for state in (fake(kit, "a"), fake(kit, "b")):
        mesh = made_in(state, 4)
        with router.selected(state):
            whole = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
            product = (whole @ whole).redistribute(placements=[Replicate()])
        used.append(world_of(product.device_mesh))
        assert used[-1] is state


def test_a_mesh_class_that_compares_otherwise_is_refused(monkeypatch):
    monkeypatch.setattr(DeviceMesh, "__eq__", lambda self, other: self is other)
    with pytest.raises(RouterError, match="__eq__"):
        router.install()
    assert not router.installed()


def test_uninstalled_meshes_are_torchs(kit):
    a = fake(kit, "a")
    mesh = made_in(a, 4)
    router.uninstall()
    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=4)
    own = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("x",))
    assert own != mesh
    assert own == DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("x",))
    assert not vars(own).get(mesh_module._MINE)
