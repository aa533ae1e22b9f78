"""Weights that are put into buckets, and into a model again."""

from __future__ import annotations

import weakref

import pytest

pytest.importorskip("torch")

import torch

from multiworld._core.weights import Head
from multiworld.errors import StateError
from multiworld.weights import Publisher, tensors, wire


def filled(source, most=tensors.BUCKET, rooms=()):
    """A version of weights: its head and its rooms."""
    entries, made = [], []
    for entries, room in tensors.buckets(source, most, rooms):  # noqa: B007  (the last one counts)
        made.append(room)
    return Head("s", 1, most, tuple(entries), tuple(map(tensors.summed, made))), made


def loaded(head, rooms, like):
    into = {name: torch.full_like(tensor, -1) for name, tensor in like.items()}
    tensors.load(into, head, rooms)
    return into


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def model(first=0.0):
    return {f"layer{at}": torch.full((250, 2), first + at) for at in range(5)} | {"step": torch.tensor(3)}


@pytest.mark.parametrize("most", [tensors.BUCKET, 5000, 1024])
def test_a_source_may_use_its_memory_again(most):
    """As a staging buffer that each layer is gathered into."""
    weights = model()

    def source():
        staging = torch.empty(250, 2)
        for name, tensor in weights.items():
            if tensor.dim():
                yield name, staging.copy_(tensor)
            else:
                yield name, tensor

    head, rooms = filled(source, most)
    assert same(loaded(head, rooms, weights), weights)
    assert head.digests == filled(weights, most)[0].digests


@pytest.mark.parametrize("most", [tensors.BUCKET, 1024])
def test_weights_that_share_memory_get_values_that_differ_nowhere(most):
    memory = torch.zeros(1000)
    into = {
        "whole": memory.view(10, 100),
        "tied": memory.view(10, 100),
        "part": memory[300:700],
        "even": memory[::2],
        "odd": memory[1::2],
        "bits": memory.view(torch.int32),
        "one": memory[5],
        "apart": torch.zeros(1000),
    }
    values = torch.randn(1000)
    values[7] = float("nan")
    came = {
        "whole": values.view(10, 100),
        "tied": values.view(10, 100),
        "part": values[300:700],
        "even": values[::2],
        "odd": values[1::2],
        "bits": values.view(torch.int32),
        "one": values[5],
        "apart": torch.ones(1000),
    }
    tensors.load(into, *filled(came, most))
    assert torch.equal(memory.view(torch.int32), values.view(torch.int32))
    for name in came.keys() - {"apart"}:
        head, rooms = filled(came | {name: came[name] + 1}, most)
        with pytest.raises(StateError, match=r"shares memory with .* here, and the trainer's differ"):
            tensors.load(into, head, rooms)
        assert torch.equal(memory.view(torch.int32), values.view(torch.int32)), "nothing is changed"


def test_weights_that_lie_between_each_other_share_nothing():
    memory = torch.zeros(100)
    into = {"even": memory[::2], "odd": memory[1::2]}
    tensors.load(into, *filled({"even": torch.ones(50), "odd": torch.full((50,), 2.0)}))
    assert memory.tolist() == [1.0, 2.0] * 50


class Sharded(torch.Tensor):
    """Stands in for a sharded tensor that is put together."""

    alive = ()

    def detach(self):
        return self

    def full_tensor(self):
        assert not any(each() is not None for each in self.alive), "the one before is not released"
        whole = torch.full((1000,), self.number)
        self.alive.append(weakref.ref(whole))
        return whole


def sharded():
    """Four of them by name, and the list that tells which of the whole ones there are."""
    shards, alive = {f"w{at}": torch.zeros(1).as_subclass(Sharded) for at in range(4)}, []
    for number, shard in enumerate(shards.values()):
        shard.number, shard.alive = float(number), alive
    return shards, alive


@pytest.mark.parametrize("most", [1 << 20, 1024])
def test_sharded_tensors_are_put_together_and_released_one_after_the_other(most):
    shards, alive = sharded()
    head, rooms = filled(shards, most)
    assert len(alive) == 4
    weights = {f"w{at}": torch.full((1000,), float(at)) for at in range(4)}
    assert same(loaded(head, rooms, weights), weights)


def test_a_rank_that_sends_nothing_releases_them_one_after_the_other_too():
    shards, alive = sharded()
    Publisher("w", shards, "file:///nowhere", rank=1).publish(0)
    assert len(alive) == 4


def test_those_after_an_error_are_released_one_after_the_other_too(monkeypatch):
    def no_memory(*_):
        raise MemoryError("no room")

    shards, alive = sharded()
    monkeypatch.setattr(tensors, "_reaching", no_memory)
    with pytest.raises(MemoryError, match="no room"):
        filled(shards)
    assert len(alive) == 4


def test_the_shards_after_an_error_are_put_together_all_the_same(monkeypatch):
    """Or the other ranks would wait in that for this one."""
    asked, reaching = [], tensors._reaching

    def source():
        for name, tensor in model().items():
            asked.append(name)
            yield name, tensor

    def no_memory(*arguments):
        if len(asked) == 2:
            raise MemoryError("no room")
        return reaching(*arguments)

    monkeypatch.setattr(tensors, "_reaching", no_memory)
    with pytest.raises(MemoryError, match="no room"):
        filled(source)
    assert asked == list(model())


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor.*deprecated")
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (torch.Tensor.to_sparse, "sparse_coo"),
        (lambda plain: torch.quantize_per_tensor(plain, 0.5, 0, torch.qint8), "quantized"),
    ],
)
def test_weights_that_are_not_dense_are_refused_on_all_ranks(make, kind):
    for takes in (lambda source: list(tensors.gather(source)), filled):
        with pytest.raises(StateError, match=f"'w' is .*{kind}"):
            takes({"w": make(torch.eye(3))})


@pytest.mark.parametrize("most", [1024, 1 << 30])
def test_rooms_are_filled_anew_and_others_are_made_where_they_do_not_fit(most):
    head, rooms = filled(model(), most)
    again, filled_anew = filled(model(9.0), most, rooms)
    assert [each.data_ptr() for each in filled_anew] == [each.data_ptr() for each in rooms]
    assert same(loaded(again, filled_anew, model()), model(9.0))
    small = [torch.empty(16, dtype=torch.uint8), torch.empty(1 << 20, dtype=torch.uint8)]
    other, made = filled(model(), most, small)
    assert other == head
    assert [each.nbytes for each in made] == [size for _, size in tensors.sizes(other)]
    assert same(loaded(other, made, model()), model())


def test_buckets_are_in_the_hosts_memory_whatever_the_default_device_is():
    """Their bytes are read by their address."""
    weights = model()
    head, rooms = filled(weights)
    with torch.device("meta"):
        elsewhere, others = filled(weights)
        assert elsewhere == head
        got = {}
        tensors.load(got.update, head, rooms)
        with pytest.raises(ValueError, match="of 0 bytes"):
            wire.receive(Answers(0))
        world = Answers(9)
        wire.send_number(world, 5)
        assert wire.receive_number(world) == 9
    assert {each.device.type for each in (*others, *got.values(), *world.sent)} == {"cpu"}
    assert same(got, weights)


class Answers:
    """Stands in for a world whose other member sends this number."""

    rank = 0

    def __init__(self, number):
        self.number, self.sent = number, []

    def send(self, tensor, _rank):
        self.sent.append(tensor)

    def recv(self, tensor, _rank):
        tensor.fill_(self.number)


def test_rooms_that_are_made_in_inference_mode_are_filled_anew_outside():
    with torch.inference_mode():
        _, rooms = filled(model())
    head, again = filled(model(4.0), rooms=rooms)
    assert same(loaded(head, again, model()), model(4.0))


class DTensor(torch.Tensor):
    """Stands in for one: what it is told by."""

    def full_tensor(self):
        raise AssertionError("it is not put together")


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(4).as_subclass(DTensor), "'w' is a DTensor"),
        (torch.zeros(4, device="meta"), "'w' is on meta"),
        (torch.zeros(1).expand(4), "'w' is on cpu, without memory"),
    ],
)
def test_nothing_is_changed_where_one_tensor_cannot_be_filled(tensor, words):
    head, rooms = filled({"first": torch.ones(3), "w": torch.ones(4)})
    into = {"first": torch.zeros(3), "w": tensor}
    with pytest.raises(StateError, match=words):
        tensors.load(into, head, rooms)
    assert into["first"].sum() == 0


class Copies(torch.nn.Linear):
    def state_dict(self, *arguments, **options):
        return {name: tensor.clone() for name, tensor in super().state_dict(*arguments, **options).items()}


def test_a_module_whose_state_is_a_copy_is_refused():
    """It would have what it had, and be taken for filled."""
    head, rooms = filled(torch.nn.Linear(3, 2))
    engine = Copies(3, 2)
    before = engine.weight.clone()
    with pytest.raises(StateError, match="'weight' is a copy that state_dict"):
        tensors.load(engine, head, rooms)
    assert torch.equal(engine.weight, before)
    assert filled(engine)[0] != head


def test_a_module_is_filled():
    source, engine = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    source(torch.randn(5, 3))
    head, rooms = filled(source)
    tensors.load(engine, head, rooms)
    assert same(engine.state_dict(), source.state_dict())


def test_tensors_that_share_memory_are_filled():
    """As tied weights, which the trainer has under both names, too."""
    tied = torch.ones(4)
    head, rooms = filled({"in": tied, "out": tied})
    shared = torch.zeros(4)
    tensors.load({"in": shared, "out": shared}, head, rooms)
    assert shared.sum() == 4


def test_weights_without_elements_are_loaded():
    weights = {"w": torch.zeros(0, 3), "v": torch.zeros(2, 0)}
    head, rooms = filled(weights)
    assert [each.nbytes for each in rooms] == [size for _, size in tensors.sizes(head)] == [0]
    assert same(loaded(head, rooms, weights), weights)
    got = {}
    tensors.load(got.update, head, rooms)
    assert same(got, weights)


def test_a_large_bucket_grows(monkeypatch):
    monkeypatch.setattr(tensors, "BUCKET", 512)
    weights = {f"w{at}": torch.full((300,), float(at)) for at in range(40)}
    head, rooms = filled(weights, 1 << 40)
    assert len(rooms) == 1
    assert same(loaded(head, rooms, weights), weights)


def test_names_in_another_order_are_filled_and_have_another_digest():
    it = {"a": torch.rand(3), "b": torch.rand(2)}
    head, rooms = filled(it)
    other = {name: torch.zeros_like(it[name]) for name in reversed(it)}
    tensors.load(other, head, rooms)
    assert same(it, other)
    told = tensors.whole(head.entries, head.digests)
    assert tensors.digest({name: other[name] for name in it}) == told
    assert tensors.digest(other) != told


async def never_awaited(_weights):
    """As an asynchronous engine's `load_weights`."""


def never_begun(weights):
    yield from weights


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
@pytest.mark.parametrize(("target", "left"), [(never_awaited, "a"), (never_begun, "a"), (next, "b")])
def test_a_function_that_does_not_take_all_weights_has_not_loaded_them(target, left):
    head, rooms = filled({"a": torch.ones(3), "b": torch.ones(2)})
    with pytest.raises(RuntimeError, match=f"before it took weight '{left}'"):
        tensors.load(target, head, rooms)
