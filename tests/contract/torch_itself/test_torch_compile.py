"""`torch.compile`: a function compiled in one world is right in every other, and outside."""

from __future__ import annotations

import shutil
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from kits.contract.routerkit import routed
from kits.contract.worldkit import cast as casting
from torch.nn.parallel import DistributedDataParallel

import multiworld as mw
from multiworld._c10d.routing import router
from multiworld.errors import MultiworldError
from multiworld.events import Breakage, Cause

BACKENDS = [
    "eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
    ),
]
# torch's own: inductor's imports use what torch has deprecated, and import setuptools late.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Distutils was imported before Setuptools"),
    pytest.mark.filterwarnings("ignore:Setuptools is replacing distutils"),
    pytest.mark.filterwarnings("ignore:Skipping serialization of"),  # of its configuration, in torch 2.6
]
LONG = 300.0
"""Seconds: the compiler runs a C++ compiler some times, on a machine that does other things too."""


@pytest.fixture
def cast():
    with casting() as made:
        yield made


@pytest.fixture(autouse=True)
def _clean():
    yield
    torch._dynamo.reset()


def fake_world(kit, name, rank, size, **more):
    """A world without peers: its group answers what it is asked, and communicates nothing."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (it registers the backend)

    return kit.world(name, backend="fake", rank=rank, size=size, **more)


def graphs():
    return torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)


# -- with peers -------------------------------------------------------------------------------------------------


def compiled(me, size, backend):
    """One function, compiled once, in worlds where this process has another rank and other peers."""
    warnings.simplefilter("ignore")
    import torch.distributed._functional_collectives as funcol

    def step(x):
        # A branch by rank, a constant, a group by its ranks. Not `group.WORLD`: torch's own guard on that object would
        # compile again and hide what is tested.
        x = x + 100 if dist.get_rank() == 0 else x - 1
        x = x + 10 * dist.get_world_size()
        everyone = list(range(dist.get_world_size()))
        return funcol.all_reduce(x, "sum", everyone)

    def wanted(ranks):
        each = [(100 if rank == 0 else -1) + 10 * ranks for rank in range(ranks)]
        return float(sum(each))

    fast = torch.compile(step, backend=backend)
    join = {"store": me.store, "timeout": LONG, "hang_timeout": 120}
    a = mw.join("a", me.rank, size, **join)
    b = mw.join("b", size - 1 - me.rank, size, **join)
    mine = mw.join(f"mine{me.rank}", 0, 1, **join)

    def check(world, ranks):
        with world:
            got = fast(torch.zeros(2))
            assert torch.equal(torch.as_tensor(got + 0), torch.full((2,), wanted(ranks))), (world.name, got)

    def check_outside():
        # Versions say it differently, and the compiler wraps it.
        with pytest.raises(Exception, match=r"initialized|default") as caught:
            fast(torch.zeros(2))
        assert not isinstance(caught.value, MultiworldError)

    for _ in range(2):
        check(a, size)
        check(b, size)
        check(mine, 1)
        check_outside()
    a.barrier()  # nobody is in a collective of it any more
    a._gen.verdict(Breakage(Cause.FAILED, (), "a test says so", time.monotonic()))
    check(b, size)
    a.rejoin(timeout=LONG)
    check(a, size)
    check(b, size)
    a.barrier()
    a.close()
    check(b, size)
    check(mine, 1)
    check_outside()
    b.barrier()
    b.close()
    mine.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_once_and_right_in_every_world(cast, backend):
    for member in cast.all(compiled, 2, backend=backend):
        member.expect("end", LONG)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x):
        return torch.tanh(x * self.weight).sum()


def follows(me, size):
    """A compiled DDP model of the elastic group, in two generations."""
    warnings.simplefilter("ignore")
    import torch._dynamo.testing

    counter = torch._dynamo.testing.CompileCounter()
    w = mw.join("w", None, f"1:{size}", store=me.store, last_call=0, timeout=LONG)
    net, eager = Net(), Net()
    model = torch.compile(DistributedDataParallel(net, process_group=w.elastic_group), backend=counter)
    for generation in (1, 2):
        for step in (1.0, 2.0):
            for each in (model, eager):
                each.zero_grad()
                each(torch.full((2,), generation * step)).backward()
            assert torch.equal(net.weight.grad, eager.weight.grad)
        assert counter.op_count >= 3, "the model's own forward pass is compiled"
        w.close()
        if generation == 1:
            w.reform(LONG)


def test_an_elastic_ddp_model_is_compiled_whole(cast):
    assert [each.finish(LONG) for each in cast.all(follows, 1)] == [0]


def sends(me, size):
    """A function with messages in it: the compiler breaks its graph there, as in stock torch."""
    warnings.simplefilter("ignore")  # torch's, that it does not trace its own method
    world = mw.join("w", me.rank, size, store=me.store, timeout=LONG)
    peer = 1 - me.rank

    @torch.compile(backend="eager")
    def exchanged(x):
        sent, got = x + 1, torch.zeros_like(x)
        for work in (dist.isend(sent, peer), dist.irecv(got, peer)):
            work.wait()
        return got * 2

    with world:
        assert exchanged(torch.full((3,), float(me.rank))).tolist() == [2.0 * (peer + 1)] * 3
        assert exchanged(torch.full((3,), 5.0)).tolist() == [12.0] * 3
    world.barrier()
    world.close()
    me.emit("end")


def test_messages_in_a_compiled_function(cast):
    for member in cast.all(sends, 2):
        member.expect("end", LONG)


# -- without ----------------------------------------------------------------------------------------------------


def place(x):
    return x + 10 * dist.get_rank() + dist.get_world_size()


def plain(x):
    return x + 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_rank_and_size_are_the_selected_worlds(backend):
    with routed() as kit:
        fast = torch.compile(place, backend=backend)
        a, b = fake_world(kit, "a", 1, 3), fake_world(kit, "b", 2, 5)
        for _ in range(2):
            for state, answer in ((a, 13.0), (b, 25.0)):
                with router.selected(state):
                    assert fast(torch.zeros(1)).item() == answer
        again = fake_world(kit, "a", 0, 3, generation=2)
        with router.selected(again):
            assert fast(torch.zeros(1)).item() == 3.0
        # The same name and generation, in another life: of a world of another store.
        a.forget()
        other = fake_world(kit, "a", 2, 4)
        with router.selected(other):
            assert fast(torch.zeros(1)).item() == 24.0


def test_what_was_compiled_before_the_first_join_is_compiled_again():
    fast = torch.compile(place, backend="eager")
    router.uninstall()
    import torch.testing._internal.distributed.fake_pg as fake

    dist.init_process_group("fake", store=fake.FakeStore(), rank=1, world_size=2)
    try:
        assert fast(torch.zeros(1)).item() == 12.0
        with routed() as kit:
            with router.selected(fake_world(kit, "a", 2, 5)):
                assert fast(torch.zeros(1)).item() == 25.0
            assert fast(torch.zeros(1)).item() == 12.0
            dist.destroy_process_group()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_does_not_ask_is_compiled_once_for_all_worlds(backend):
    with routed() as kit:
        fast = torch.compile(plain, backend=backend)
        before = graphs()
        for state in (fake_world(kit, "a", 0, 2), fake_world(kit, "b", 1, 2), None):
            with router.selected(state):
                assert fast(torch.zeros(1)).item() == 1.0
        assert graphs() == before + 1


def test_each_world_has_the_whole_limit_of_recompilations():
    with routed() as kit:
        fast = torch.compile(place, backend="eager")
        states = [fake_world(kit, f"w{number}", number, 20) for number in range(20)]
        before = graphs()
        for _ in range(2):
            for number, state in enumerate(states):
                with router.selected(state):
                    assert fast(torch.zeros(1)).item() == 10.0 * number + 20
        assert graphs() == before + 20


def compares(me, size):
    """Ranks compare their guards at each call, through a group that torch makes once for a process."""
    warnings.simplefilter("ignore")
    torch.compiler.set_enable_guard_collectives(True)
    fast = torch.compile(lambda x: x + dist.get_rank(), backend="eager")

    def check(w):
        with w:
            assert fast(torch.zeros(1)).item() == me.rank

    worlds = [mw.join(name, me.rank, size, store=me.store, timeout=LONG) for name in "ab"]
    for w in (*worlds, *worlds):
        check(w)
    worlds[0].close()
    check(worlds[1])
    worlds[1].close()
    worlds[1].rejoin()
    check(worlds[1])
    worlds[1].close()


@pytest.mark.skipif(
    not hasattr(torch.compiler, "set_enable_guard_collectives"), reason="this torch has no such collectives"
)
def test_ranks_that_compare_their_guards_do_so_in_the_selected_world(cast):
    assert [each.finish(LONG) for each in cast.all(compares, 2)] == [0, 0]


def test_the_compiler_is_as_it_was_after_uninstall():
    import torch._dynamo.cache_size as counting
    import torch._dynamo.convert_frame as converting
    from torch._dynamo.guards import GuardBuilder

    def places():
        return (
            converting._compile,
            vars(GuardBuilder)["GRAD_MODE"],
            counting._has_same_id_matched_objs,
        )

    router.uninstall()
    before = places()
    with routed():
        assert all(one is not two for one, two in zip(before, places(), strict=True))
    assert all(one is two for one, two in zip(before, places(), strict=True))
