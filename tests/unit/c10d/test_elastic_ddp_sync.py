"""What a DDP model of an elastic group has when rank 0 is lost while it sends its parameters; torch's sending is played."""

from __future__ import annotations

import gc
import types
import weakref

import pytest

torch = pytest.importorskip("torch")

from multiworld._c10d.elastic import ddp, ddp_follower  # noqa: E402  (torch may be missing)
from multiworld._c10d.elastic.group import ElasticGroup  # noqa: E402
from multiworld._c10d.routing.selection import selected  # noqa: E402
from multiworld.errors import WorldClosedError  # noqa: E402


class Net(torch.nn.Module):
    """A parameter, a buffer, and one that DDP is to leave alone; all are `value`."""

    def __init__(self, value):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2, 3), value))
        self.register_buffer("scale", torch.full((2,), value))
        self.register_buffer("mine", torch.full((2,), value))

    def values(self):
        return {name: set(each.flatten().tolist()) for name, each in self.state_dict().items()}


class Model:
    """What is asked of a `DistributedDataParallel`."""

    broadcast_bucket_size = 1
    parameters_to_ignore = frozenset({"mine"})

    def _build_params_for_reducer(self):
        return list(self.module.parameters()), []


@pytest.fixture
def sending(monkeypatch):
    """Rank 0 sends ones, and is lost after `whole` tensors, or never."""
    it = types.SimpleNamespace(whole=None, into=weakref.WeakSet())

    def broadcast(_group, tensors, _size, source):
        assert source == 0
        it.into.update(tensors)
        for number, each in enumerate(tensors):
            if number == it.whole:
                raise RuntimeError("connection closed by peer")
            each.fill_(1.0)

    monkeypatch.setattr(torch.distributed, "_broadcast_coalesced", broadcast)
    monkeypatch.setattr(ddp_follower, "_verify_param_shape_across_processes", lambda *_: None)
    return it


def follow(net, traffic=None):
    """Begin a forward pass in a new generation, on rank 1."""
    model = Model()
    model.module = net
    c10d = types.SimpleNamespace(traffic=traffic)
    generation = types.SimpleNamespace(number=1, rank=1, pg=None, c10d=c10d)
    group = types.SimpleNamespace(generation=lambda: generation)
    ddp_follower.Follower(model, group, bound=1, buffers=True)._follow(model, generation)


def test_a_member_has_all_of_its_own_parameters_or_all_of_rank_0s(sending):
    net = Net(0.0)
    for sending.whole in (0, 1):
        with pytest.raises(RuntimeError, match="by peer"):
            follow(net)
        assert net.values() == {"weight": {0.0}, "scale": {0.0}, "mine": {0.0}}
    sending.whole = None
    follow(net)
    assert net.values() == {"weight": {1.0}, "scale": {1.0}, "mine": {0.0}}
    gc.collect()
    assert not sending.into, "the second copy is there while rank 0 sends"


def test_on_nccl_a_member_has_its_own_until_the_sending_has_ended(sending):
    def settle():
        assert net.values()["weight"] == {0.0}
        raise RuntimeError("the groups of this world were aborted")

    net = Net(0.0)
    with pytest.raises(RuntimeError, match="aborted"):
        follow(net, types.SimpleNamespace(settle=settle))
    assert net.values() == {"weight": {0.0}, "scale": {0.0}, "mine": {0.0}}


class Counted(Model):
    """Counts its forward passes."""

    passes = 0

    def forward(self):
        self.passes += 1


class Broken:
    """The state of a generation that broke."""

    name, generation = "w", 1

    @property
    def default_pg(self):
        raise ConnectionError("rank 1 was lost")


def test_a_block_of_an_older_generation_raises_that_ones_error():
    present = types.SimpleNamespace(name="w", generation=2, default_pg=None)
    generation = types.SimpleNamespace(number=2, rank=0, world="w", pg=None, c10d=present)
    model = Counted()
    follower = ddp_follower.Follower(
        model, types.SimpleNamespace(generation=lambda: generation), bound=2, buffers=True
    )
    follower._alike = 2
    closed = types.SimpleNamespace(name="w", generation=1, default_pg=None)
    with selected(closed), pytest.raises(WorldClosedError, match="this block's generation, 1, was closed"):
        follower()
    with selected(Broken()), pytest.raises(ConnectionError, match="rank 1 was lost"):
        follower()
    assert (model.passes, follower.state) == (0, None)
    # Blocks of the present generation, and of other worlds.
    for state in (present, types.SimpleNamespace(name="other", generation=1, default_pg=None)):
        with selected(state):
            follower()
    assert model.passes == 2


def test_a_model_is_bound_to_the_generation_whose_group_it_got(monkeypatch):
    """Another thread may enter the next generation in the middle."""
    generations = iter([types.SimpleNamespace(number=number, pg=f"group {number}") for number in (1, 2)])
    group = ElasticGroup.__new__(ElasticGroup)
    monkeypatch.setattr(group, "generation", lambda: next(generations), raising=False)
    for name in ("_require_supported", "_require_connections"):
        monkeypatch.setattr(ddp, name, lambda _: None)
    module = torch.nn.Linear(1, 1)
    model = Model()
    model.module, model.process_group, model.broadcast_buffers = module, group, True
    ddp._following(lambda _: None)(model)
    assert (model.process_group, model.forward._bound) == ("group 1", 1)
