"""A DDP model that is made once trains on after its world has shrunk and grown (`World.elastic_group`)."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from kits.contract.elastickit import claimed
from kits.contract.stopkit import die
from kits.contract.worldkit import PATIENCE, SOON, left_over, outcome, threads_ended
from kits.meetkit import until
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import multiworld as mw

LONG = 10 * PATIENCE
"""Seconds, of each operation and join: what ends before was ended by the verdict."""
PAUSES = {1: 4, 2: 8}
"""By generation, the step before which each member asks the test what to do."""
STEPS = 12
KINDS = {
    "unused parameters": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "plain": {},  # whose backward pass is cut off; those before have had theirs, those after have not
    "bucket views": {"gradient_as_bucket_view": True},
    "hook": {},
}

# -- programs ---------------------------------------------------------------------------------------------------------


def enter(me, size, **options):
    options = {"timeout": LONG, "last_call": LONG} | options
    return mw.join("w", None, size, store=me.store, seat=f"s{me.rank}", **options)


class Net(torch.nn.Module):
    """`sometimes` is used in odd steps only, where parameters may be unused."""

    def __init__(self, seed, kind):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))
        self.sometimes = torch.nn.Linear(16, 16) if kind == "unused parameters" else None
        self.register_buffer("scale", torch.rand(16))

    def forward(self, x, step):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return self.sometimes(x) if self.sometimes is not None and step % 2 else x


def loss(model, step, rank):
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x, step).square().sum()


def optimizer_of(nets):
    return torch.optim.SGD([p for net in nets for p in net.parameters()], lr=0.05, momentum=0.9)


def models_of(me, group):
    made = {}
    for kind, options in KINDS.items():
        # After a model's first step each layer has a bucket of its own.
        net, more = Net(me.rank, kind), options | {"bucket_cap_mb": 0.002}
        made[kind] = DistributedDataParallel(net, process_group=group, **more)
    made["hook"].register_comm_hook(group, twice)
    return made


def twice(group, bucket):
    """Of `register_comm_hook`: twice the average, so that it shows where the hook is lost."""
    return allreduce_hook(group, bucket).then(lambda future: 2 * future.value())


def trainer(me):
    """Trains, dies in the middle of a backward pass when the test says so, and tells what it has at the end."""
    w = enter(me, "1:3")
    models = models_of(me, w.elastic_group)
    optimizer = optimizer_of(models.values())
    step = generation = 0
    while step < STEPS:
        try:
            with w:
                if generation != w.generation:
                    # The parameters come with the first forward pass.
                    told = [step, optimizer.state_dict()]
                    w.broadcast_object_list(told)
                    step, generation = told[0], w.generation
                    optimizer.load_state_dict(told[1])
                    me.emit("in", seats=w.seats, generation=generation, step=step)
                if PAUSES.get(generation) == step and ask(me, step) == "die":
                    models["plain"].module.layers[1].weight.register_hook(die)
                optimizer.zero_grad()
                for model in models.values():
                    loss(model, step, dist.get_rank()).backward()
                optimizer.step()
                step += 1
        except mw.BrokenWorldException as broken:  # noqa: PERF203  (it trains in the loop until then)
            me.emit("broken", cause=broken.cause, step=step)
            w.reform(LONG)
    me.emit("done", states={kind: state_of(model.module) for kind, model in models.items()})
    me.hear()


def state_of(net):
    return {name: tensor.tolist() for name, tensor in net.state_dict().items()}


def ask(me, step):
    me.emit("at", step=step)
    return me.hear()


def by_hand(seed, sizes):
    """What one process makes of the same batches, of `sizes` members in each step."""
    nets = {kind: Net(seed, kind) for kind in KINDS}
    optimizer = optimizer_of(nets.values())
    for step, size in enumerate(sizes):
        optimizer.zero_grad()
        for kind, net in nets.items():
            share = (2 if kind == "hook" else 1) / size
            sum(loss(net, step, rank) * share for rank in range(size)).backward()
        optimizer.step()
    return nets


# -- tests ------------------------------------------------------------------------------------------------------------


def seats_of(members):
    told = [each.expect("in") for each in members]
    assert len({(each.seats, each.generation, each.step) for each in told}) == 1, told
    return told[0]


def lose(members, seat):
    """The member of that seat dies in the middle of its backward pass; the others go on. Returns these."""
    for each in members:
        each.expect("at")
    for each in members:
        each.say("die" if f"s{each.rank}" == seat else "go")
    began = time.monotonic()
    rest = [each for each in members if f"s{each.rank}" != seat]
    for each in rest:
        assert each.expect("broken").cause == "crashed"
    assert time.monotonic() - began < SOON
    return rest


def test_models_that_are_made_once_train_in_a_world_that_shrinks_and_grows(cast):
    members = [cast.start(trainer, number) for number in range(3)]
    first = seats_of(members).seats
    rest = lose(members, first[0])
    second = seats_of(rest)
    assert (second.generation, second.step) == (2, PAUSES[1])
    newcomer = cast.start(trainer, 7)
    claimed(cast.server, "s7")
    rest = [*lose(rest, second.seats[1]), newcomer]
    third = seats_of(rest)
    assert (third.generation, third.step, third.seats) == (3, PAUSES[2], (second.seats[0], "s7"))
    ours, theirs = (each.expect("done").states for each in rest)
    assert ours == theirs
    for kind, net in by_hand(int(first[0][1:]), [3] * 4 + [2] * 8).items():
        for name, expected in net.state_dict().items():
            found = torch.tensor(ours[kind][name])
            torch.testing.assert_close(found, expected, msg=lambda text, k=kind, n=name: f"{k}, {n}: {text}")


def test_the_group_means_the_present_generation(cast):
    members = [cast.start(uses_the_group, number) for number in range(3)]
    told = [each.expect("in") for each in members]
    seats = told[0].seats
    victim = next(each for each in members if f"s{each.rank}" == seats[0])
    victim.kill()
    for each in members:
        if each is not victim:
            told = each.expect("told")
            for error in (told.over, told.late, told.old_block):
                assert error["cause"] == "crashed", error
            assert told.before == (seats.index(f"s{each.rank}"), 3)
            assert told.after == (seats.index(f"s{each.rank}") - 1, 2)
            assert told.sums == [6.0, 3.0]


def uses_the_group(me):
    w = enter(me, "2:3")
    group = w.elastic_group
    everything_of(group, w)
    sums = [sum_of(group)]
    me.emit("in", seats=w.seats)
    over = outcome(lambda: until_it_breaks(group))
    # Questions are answered, also after the end.
    before = (dist.get_rank(group), dist.get_world_size(group))
    late = outcome(group.barrier)
    with w:
        w.reform(LONG)
        old_block = outcome(lambda: dist.all_reduce(torch.ones(1), group=group))
    assert w.elastic_group is group
    everything_of(group, w)
    sums.append(sum_of(group))
    after = (dist.get_rank(group), dist.get_world_size(group))
    me.emit("told", over=over, late=late, old_block=old_block, before=before, after=after, sums=sums)


def sum_of(group):
    t = torch.ones(1) + group.rank()
    dist.all_reduce(t, group=group)
    return t.item()


def until_it_breaks(group):
    while True:
        dist.all_reduce(torch.ones(1), group=group)


def everything_of(group, w):
    """What torch can do with a group, it can do with this one: outside of any block, from Python and C++."""
    rank, size = w.rank, w.world_size
    assert (group.rank(), group.size(), group.name()) == (rank, size, "gloo")
    assert group.group_name == w.group.group_name
    assert (dist.get_rank(group), dist.get_world_size(group)) == (rank, size)
    assert dist.get_backend(group) == "gloo"
    assert dist.get_process_group_ranks(group) == list(range(size))
    mine, everyones = torch.full((2,), float(rank)), [torch.zeros(2) for _ in range(size)]
    dist.all_gather(everyones, mine, group=group)
    assert [t[0].item() for t in everyones] == list(range(size))
    part = torch.zeros(1)
    dist.reduce_scatter(part, [torch.full((1,), float(each)) for each in range(size)], group=group)
    assert part.item() == rank * size
    objects = [None] * size
    dist.all_gather_object(objects, rank, group=group)
    assert objects == list(range(size))
    t = torch.full((1,), float(rank))
    if rank == 0:
        dist.send(t, size - 1, group=group)
    elif rank == size - 1:
        dist.recv(t, 0, group=group)
        assert t.item() == 0.0
    dist.barrier(group=group)
    t = torch.full((3,), float(rank))
    dist._broadcast_coalesced(group, [t], 1 << 20, size - 1)
    assert t[0].item() == size - 1


@pytest.mark.parametrize("steps", [1, 3])
def test_a_breakage_outside_of_all_blocks(cast, steps):
    """The second forward pass communicates, for the new buckets; later ones do not."""
    members = [cast.start(trains_outside, number, steps=steps) for number in range(2)]
    for each in members:
        each.expect("in")
    members[0].kill()
    members[1].say("go")
    told = members[1].expect("told")
    assert told.first["cause"] == told.again["cause"] == "crashed"
    assert told.grads == [5.0] * 4, "of this member alone: zero_grad, and the new number of members"


def trains_outside(me, steps):
    w = enter(me, "1:2")
    model = DistributedDataParallel(torch.nn.Linear(4, 1), process_group=w.elastic_group)

    def backward():
        model.zero_grad()
        model(torch.ones(5, 4)).sum().backward()

    def until_it_breaks():
        while True:
            backward()

    for _ in range(steps):
        backward()
    me.emit("in")
    me.hear()
    first = outcome(until_it_breaks)
    again = outcome(backward)
    w.reform(LONG)
    backward()
    me.emit("told", first=first, again=again, grads=model.module.weight.grad[0].tolist())


def test_what_belongs_to_one_generation_is_refused(alone):
    net = torch.nn.Linear(2, 2)
    more = {"delay_all_reduce_named_params": [("bias", net.bias)], "param_to_hook_all_reduce": net.weight}
    with pytest.raises(ValueError, match="delay_all_reduce_params was used"):
        DistributedDataParallel(net, process_group=alone.elastic_group, **more)
    model = DistributedDataParallel(net, process_group=alone.elastic_group)
    with pytest.raises(ValueError, match="a built-in communication hook was used"):
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    net.bias._in_backward_optimizers = []
    with pytest.raises(ValueError, match="apply_optimizer_in_backward was used"):
        DistributedDataParallel(net, process_group=alone.elastic_group)


def test_uneven_inputs_in_a_new_generation(cast):
    """`model.join()` may come first in it, of a member without inputs as well; and it ends with its generation."""
    first = cast.start(has_uneven_inputs, 0)
    first.expect("in")
    newcomer = cast.start(has_uneven_inputs, 1)
    claimed(cast.server, "s1")
    first.say("go")
    told = [each.expect("has") for each in (first, newcomer)]
    assert [each.rank for each in told] == [0, 1]
    for each in told:
        assert each.weights == {"even": [[0.0, 0.0]], "uneven": [[0.0, 0.0]]}
        assert each.even == [[1.0, 1.0]]
    assert told[0].uneven == [[0.5, 0.5]], "the mean with a member that has none"


def has_uneven_inputs(me):
    w = enter(me, "1:2", last_call=0.0)
    nets = {kind: torch.nn.Linear(2, 1, bias=False) for kind in ("even", "uneven")}
    for net in nets.values():
        torch.nn.init.constant_(net.weight, me.rank)
    models = {kind: DistributedDataParallel(net, process_group=w.elastic_group) for kind, net in nets.items()}

    def step(kind):
        models[kind].zero_grad()
        models[kind](torch.ones(1, 2)).sum().backward()

    if w.world_size == 1:
        with models["even"].join():
            step("even")
        step("uneven")
        me.emit("in")
        me.hear()
    while w.world_size == 1:
        w.advance()
    step("even")
    with models["uneven"].join():
        for _ in range(3 * (w.world_size - 1 - w.rank)):
            step("uneven")
    grads = {
        kind: None if net.weight.grad is None else net.weight.grad.tolist() for kind, net in nets.items()
    }
    me.emit("has", rank=w.rank, weights={k: net.weight.tolist() for k, net in nets.items()}, **grads)


def test_buffers_that_are_each_members_own_stay_its_own(cast):
    """Those that torch would leave alone; their sizes may differ."""
    members = [cast.start(has_its_own, number) for number in range(2)]
    told = [each.expect("has") for each in members]
    for each in told:
        assert each.buffers == {"without": [each.rank] * (each.rank + 1), "with": [0.0], "ever": [0.0]}
        assert each.weights == [0.0] * 3


class Own(torch.nn.Module):
    """A parameter and a buffer whose values are the rank."""

    def __init__(self, rank, size=1):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((1,), float(rank)))
        self.register_buffer("mine", torch.full((size,), float(rank)))

    def forward(self, x):
        return self.weight * x


def has_its_own(me):
    w = enter(me, "2:2")
    nets = {"without": Own(w.rank, w.rank + 1), "with": Own(w.rank), "ever": Own(w.rank)}
    options = {"without": {"broadcast_buffers": False}, "with": {}, "ever": {}}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:  # torch 2.13
        options["ever"] = {"forward_sync_buffers": False}  # when it is made they are rank 0's all the same
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # `broadcast_buffers` is deprecated in torch 2.13
        for kind, net in nets.items():
            DistributedDataParallel(net, process_group=w.elastic_group, **options[kind])(torch.ones(1))
    weights = [net.weight.item() for net in nets.values()]
    me.emit("has", rank=w.rank, buffers={k: net.mine.tolist() for k, net in nets.items()}, weights=weights)


@pytest.mark.parametrize("take", [copy.deepcopy, lambda model: torch.save(model, io.BytesIO())])
def test_a_model_is_neither_copied_nor_saved_whole(alone, take):
    net = torch.nn.Linear(2, 2)
    model = DistributedDataParallel(net, process_group=alone.elastic_group)
    with alone, pytest.raises(TypeError, match=r"Copy or save `model\.module`"):
        take(model)
    assert torch.equal(copy.deepcopy(model.module).weight, net.weight)


def test_models_of_other_groups_are_torchs(alone):
    model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=alone.group)
    assert "forward" not in vars(model)
    assert model.process_group is alone.group


def test_a_model_keeps_nothing_of_generations_that_are_over(alone):
    model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=alone.elastic_group)

    def again():
        model(torch.ones(1, 2)).sum().backward()
        alone.close()
        alone.reform()
        model(torch.ones(1, 2)).sum().backward()
        gc.collect()
        until(lambda: not frees & set(left_over()["threads"]))
        return left_over()

    frees = {
        "m8d-last-holder",
        "m8d-release",
    }  # threads that live until the earlier generation's backend is free
    before = again()
    for _ in range(5):
        after = again()
    assert after["sockets"] <= before["sockets"]
    assert after["fds"] <= before["fds"]
    assert after["tasks"] <= before["tasks"]


@pytest.fixture
def alone(tmp_path):
    """A world of one member, whose rank was assigned."""
    w = mw.join("w", None, "1:2", store=f"file://{tmp_path}/store", last_call=0)
    yield w
    w.close()
    assert threads_ended() == []
