"""The router in one process: what a bare call means, what is kept apart, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import types
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from kits.contract.routerkit import routed
from kits.contract.torchstate import differences, everything

from multiworld._c10d.routing import router
from multiworld._c10d.routing import state as state_module
from multiworld.errors import RouterError, WorldClosedError

resolve = torch._C._distributed_c10d._resolve_process_group
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True, scope="module")
def _plain_torch():
    """A test of another file may have joined a world in this process."""
    router.uninstall()


@pytest.fixture
def kit():
    with routed() as made:
        yield made


def is_registered(name: str) -> bool:
    try:
        resolve(name)
    except RuntimeError:
        return False
    return True


# -- putting it there, and taking it away ---------------------------------------------------------------------------


def test_import_changes_nothing():
    program = """
import sys; sys.path[:0] = [sys.argv[1], sys.argv[2]]
from kits.contract import torchstate
before = torchstate.everything()
from multiworld._c10d import groups
from multiworld._c10d.routing import default_groups, error_hooks, mesh, router, selection, state
assert not router.installed()
found = torchstate.differences(before, torchstate.everything())
assert not found, found
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(ROOT), str(ROOT / "tests")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_uninstall_restores_torch_exactly():
    before = everything()
    with routed() as kit:
        assert router.installed()
        assert differences(before, everything())
        a, b = kit.world("a"), kit.world("b")
        for state in (a, b):
            with router.selected(state):
                dist.all_reduce(torch.ones(1))
                dist.destroy_process_group(kit.keep(dist.new_group([0])))
    assert not router.installed()
    found = differences(before, everything())
    # _group_count and the maps are torch's own state, not the router's: no world may have touched them.
    assert not found, found


def test_uninstall_restores_torch_with_a_default_group_of_its_own():
    before = everything()
    with routed() as kit:
        own = kit.own()
        kit.world("a")
        router.uninstall()
        assert dist.group.WORLD is own
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
    found = differences(before, everything())
    changed_by_torch = {
        "c10d._backend",
        "c10d._default_pg_init_method",
        "sys.excepthook",
        "c10d._group_count",
        "_world._default_pg",
    }
    assert set(found) <= changed_by_torch, found


def test_uninstall_leaves_the_finders_of_others():
    class Finder:
        def find_spec(self, *_):
            return None

    router.uninstall()
    goes, stays = Finder(), Finder()
    sys.meta_path.insert(0, goes)
    try:
        with routed():
            sys.meta_path.remove(goes)
            sys.meta_path.insert(0, stays)
        assert goes not in sys.meta_path
        assert stays in sys.meta_path
    finally:
        sys.meta_path[:] = [each for each in sys.meta_path if each not in {goes, stays}]


def test_who_asks_for_a_default_group_keeps_no_variable_for_it(kit):
    kit.world("a")
    thing = WorldClosedError("a", "x")
    gone = weakref.ref(thing)
    assert not dist.is_initialized()
    del thing
    assert gone() is None


def test_installing_is_idempotent_in_many_threads():
    before = everything()
    threads = [threading.Thread(target=router.install) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    world = c10d._world
    router.install()
    assert c10d._world is world
    assert isinstance(world, c10d._World)
    router.uninstall()
    router.uninstall()
    assert not differences(before, everything())


def test_a_torch_without_what_the_router_replaces_is_left_alone(monkeypatch):
    monkeypatch.delattr(c10d, "_update_default_pg")
    before = everything()
    with pytest.raises(RouterError, match="_update_default_pg"):
        router.install()
    assert not router.installed()
    assert not differences(before, everything())


def test_somebody_elses_world_object_is_refused(monkeypatch):
    monkeypatch.setattr(c10d, "_world", object())
    with pytest.raises(RouterError, match="replaced by other code"):
        router.install()
    assert not router.installed()


def test_the_properties_that_live_in_module_globals_are_found():
    assert state_module.derive() == {
        "pg_map": "_pg_map",
        "pg_names": "_pg_names",
        "pg_group_ranks": "_pg_group_ranks",
        "pg_backend_config": "_pg_backend_config",
        "group_count": "_group_count",
        "tags_to_pg": "_tags_to_pg",
        "pg_to_tag": "_pg_to_tag",
    }


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("_news = {}\nclass _World:\n    @property\n    def news(self):\n        return _news", "_news"),
        ("_n = 0\nclass _World:\n    def bump(self):\n        global _n\n        _n += 1", "_n"),
        ("_l = []\nclass _World:\n    def __init__(self):\n        self.x = [each for each in _l]", "_l"),
        ("class _World:\n    shared = {}", "shared"),
    ],
)
def test_a_world_class_that_brings_something_unknown_is_refused_by_name(source, named):
    module = types.ModuleType("future_c10d")
    exec(source, vars(module))  # noqa: S102  (a made-up future version)
    with pytest.raises(RouterError, match=named):
        state_module.derive(module._World, module)


# -- which world ----------------------------------------------------------------------------------------------------


def test_a_bare_call_means_the_selected_world(kit):
    own = kit.own(backend="gloo")
    a, b = kit.world("a"), kit.world("b")
    assert dist.group.WORLD is own
    with router.selected(a):
        assert dist.group.WORLD is a.group
        with router.selected(b):
            assert dist.group.WORLD is b.group
            with router.selected(a):
                assert dist.group.WORLD is a.group
            with router.selected(None):
                assert dist.group.WORLD is own
        assert dist.group.WORLD is a.group
    assert dist.group.WORLD is own
    assert router.current() is None


def test_leaving_what_was_not_entered_is_an_error():
    with pytest.raises(RouterError, match="not entered"):
        router.leave()


def test_selection_is_per_thread(kit):
    a, b = kit.world("a"), kit.world("b")
    seen: list[object] = []

    def other():
        seen.append(router.current())
        with router.selected(b):
            seen.append(dist.group.WORLD)

    with router.selected(a):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(timeout=30)
        assert dist.group.WORLD is a.group
    assert seen == [None, b.group]


def test_selection_is_per_task(kit):
    states = [kit.world("a"), kit.world("b")]

    async def run(state):
        with router.selected(state):
            for _ in range(5):
                assert dist.group.WORLD is state.group
                await asyncio.sleep(0)

    async def main():
        await asyncio.gather(*(run(state) for state in states * 2))
        assert router.current() is None

    asyncio.run(main())


def test_a_backward_pass_belongs_to_its_world_in_the_threads_of_autograd(kit):
    # Autograd goes on in another C++ thread when backward passes nest deeper than 60: a stand-in for the threads it
    # has per GPU, which this test cannot have.
    a, b = kit.world("a"), kit.world("b")
    seen: list[tuple[int, object]] = []

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, depth):
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append((threading.get_ident(), dist.group.WORLD))
            if ctx.depth:
                with torch.enable_grad():
                    x = torch.ones(1, requires_grad=True)
                    Nested.apply(x, ctx.depth - 1).sum().backward()
            return grad, None

    for state in (a, b):
        seen.clear()
        with router.selected(state):
            Nested.apply(torch.ones(1, requires_grad=True), 70).sum().backward()
        assert len({ident for ident, _ in seen}) > 1, "autograd did not change threads: this tests nothing"
        assert {id(group) for _, group in seen} == {id(state.group)}
        assert not dist.is_initialized()


def test_backward_passes_do_not_wear_out_the_state(kit):
    a = kit.world("a")

    def passes(count: int) -> int:
        with router.selected(a):
            for _ in range(count):
                torch.ones(1, requires_grad=True).sum().backward()
        return sys.getrefcount(a)

    assert passes(3) == passes(300)


# -- what is kept apart ----------------------------------------------------------------------------------------------


def test_names_carry_world_and_generation(kit):
    first, second = kit.world("a", generation=1), kit.world("a", generation=2)
    assert first.names() == ("m8d:a:1:0",)
    assert second.names() == ("m8d:a:2:0",)
    with router.selected(second):
        kit.keep(dist.new_group([0]))
        kit.keep(dist.new_group([0], use_local_synchronization=True))
        kit.keep(dist.new_group([0], use_local_synchronization=True))
    assert len(second.names()) == 4
    assert all(resolve(name) is not None for name in second.names())
    assert resolve("m8d:a:1:0") is first.group


def test_members_of_a_group_name_it_alike_and_never_as_one_before(kit):
    """A name stands in the store's keys. Members alone call `new_group` with `use_local_synchronization`."""
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    named = []
    for rank, before in ((0, [[0, 2], [0, 3]]), (1, [])):
        state = kit.world(f"w{rank}", backend="fake", rank=rank, size=4)
        with router.selected(state):
            for ranks in before:
                dist.new_group(ranks, use_local_synchronization=True)
            for _ in range(3):
                made = dist.new_group([0, 1], use_local_synchronization=True)
                named.append(state.pg_names[made].removeprefix(state.prefix))
                dist.destroy_process_group(made)
    assert named[:3] == named[3:]
    assert len({*named}) == 3


def test_destroying_one_worlds_default_group_leaves_the_others(kit):
    own = kit.own()
    a, b = kit.world("a"), kit.world("b")
    told: list[str] = []
    a.on_destroyed = lambda: told.append("a")
    b.on_destroyed = lambda: told.append("b")
    with router.selected(a):
        name = a.names()[0]
        dist.destroy_process_group()
        assert not dist.is_initialized()
    assert told == ["a"]
    assert not is_registered(name)
    assert is_registered(b.names()[0])
    assert is_registered(own.group_name)
    with router.selected(b):
        dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1))


def test_destroying_torchs_own_default_group_leaves_worlds(kit):
    own = kit.own()
    a = kit.world("a")
    name = own.group_name
    assert is_registered(name)
    dist.destroy_process_group()
    assert not is_registered(name)
    assert is_registered(a.names()[0])
    with router.selected(a):
        dist.all_reduce(torch.ones(1))
    again = kit.own()
    assert dist.group.WORLD is again


def test_a_default_group_made_before_the_router_is_swept_as_well():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    name = dist.group.WORLD.group_name
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    with routed() as kit:
        kit.world("a")
        dist.destroy_process_group()
        assert not is_registered(name)
    del backend


def test_a_world_leaves_torchs_process_wide_settings(kit):
    hook, backend = sys.excepthook, c10d._backend
    a = kit.world("a")
    with router.selected(a):
        kit.keep(dist.new_group([0]))
    assert sys.excepthook is hook
    assert c10d._backend is backend


def test_a_world_does_not_change_the_global_rank_in_cpp(kit, monkeypatch):
    told: list[int] = []
    monkeypatch.setattr(torch._C._distributed_c10d, "_set_global_rank", told.append)
    a = kit.world("a")
    with router.selected(a):
        dist.destroy_process_group()
    assert told == []
    kit.own()
    assert told == [0]


def test_a_second_default_group_is_refused_as_torch_does(kit):
    a = kit.world("a")
    with router.selected(a), pytest.raises(ValueError, match="twice"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_no_default_group_is_made_in_a_world_whose_own_is_gone(kit):
    a = kit.world("a")
    with router.selected(a):
        dist.destroy_process_group()
        with pytest.raises(WorldClosedError, match="whose default group is gone"):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with pytest.raises(ValueError, match="not been initialized"):
            dist.all_reduce(torch.ones(1))
    kit.own()


def test_forget_leaves_nothing(kit):
    a = kit.world("a")
    with router.selected(a):
        kit.keep(dist.new_group([0]))
    names = a.names()
    torch._C._distributed_c10d._unregister_process_group(names[0])
    a.forget()
    a.forget()
    assert not any(is_registered(name) for name in names)
    assert a.group is None
    assert not a.pg_map
    assert not a.pg_names
    assert a not in state_module.living()


def test_forget_leaves_no_device_of_a_group_where_another_state_was_selected(kit, monkeypatch):
    """Up to torch 2.5 collectives of objects note it, in the selected state."""
    a, b = kit.world("a"), kit.world("b")
    states = (state_module.original_world(), b)
    for state in states:
        if not hasattr(state, "pg_default_device"):
            monkeypatch.setattr(state, "pg_default_device", {}, raising=False)
        state.pg_default_device.update({a.group: "cpu", b.group: "cpu"})
    a.forget()
    assert [list(state.pg_default_device) for state in states] == [[b.group]] * 2
    del states[0].pg_default_device[b.group]


@pytest.mark.parametrize("told", [True, False])
def test_a_group_that_is_made_while_its_world_ends_is_none_of_it(kit, monkeypatch, told):
    a, make = kit.world("a"), c10d.PrefixStore

    def late(*args):
        if told:
            a.break_(lambda: LookupError("a is over"))
        a.forget()
        return make(*args)

    monkeypatch.setattr(c10d, "PrefixStore", late)
    with (
        router.selected(a),
        pytest.raises(LookupError if told else WorldClosedError, match=r"a is over|gone"),
    ):
        dist.new_group([0])
    assert not a.pg_map
    assert a not in state_module._owners.values()


def test_outside_of_all_blocks_only_a_function_of_torchs_hears_of_the_group_that_it_has(kit):
    a = kit.world("a")
    source = "def asks(process_group):\n    return dist.is_initialized()\n"
    told = []
    for module in ("torch.distributed.checkpoint.state_dict_saver", "program"):
        there = {"dist": dist, "__name__": module}
        exec(source, there)  # noqa: S102  (in a module of that name)
        told.append(there["asks"](a.group))
    assert told == [True, False]


# -- broken ----------------------------------------------------------------------------------------------------------


def test_bare_calls_of_a_broken_world_raise_its_error(kit):
    a, b = kit.world("a"), kit.world("b")
    assert not a.broken
    a.break_(lambda: OSError("a is broken"))
    assert a.broken
    with router.selected(a):
        for call in (
            lambda: dist.all_reduce(torch.ones(1)),
            dist.barrier,
            dist.new_group,
            lambda: dist.all_gather_object([None], 1),
            lambda: dist.group.WORLD,
            lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(1), 0)]),
            lambda: torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1)),
        ):
            with pytest.raises(OSError, match="a is broken"):
                call()
        assert dist.is_initialized()
        with router.selected(b):
            dist.all_reduce(torch.ones(1))
    assert a.group is not None


def questions(sub, whole):
    """Ask what needs no communication."""
    found = [dist.get_rank(), dist.get_world_size(), dist.get_backend(), c10d.get_backend_config()]
    for group in (whole, sub):
        found += [
            dist.get_rank(group),
            dist.get_world_size(group),
            dist.get_backend(group),
            c10d.get_backend_config(group),
            dist.get_process_group_ranks(group),
            dist.get_group_rank(group, 1),
            dist.get_global_rank(group, 0),
        ]
    return [*found, dist.is_initialized(), dist.get_rank(dist.GroupMember.NON_GROUP_MEMBER)]


@pytest.mark.parametrize("end", ["broken", "closed", "both", "forgotten"])
def test_questions_are_answered_in_a_world_that_is_over(kit, end):
    import torch.testing._internal.distributed.fake_pg

    a = kit.world("a", backend="fake", rank=1, size=3)
    with router.selected(a):
        sub = dist.new_group([1, 2], backend="fake")
        whole = dist.group.WORLD
        before = questions(sub, whole)
        assert before[:2] == [1, 3]
        if end in {"broken", "both", "closed"}:
            a.break_(lambda: OSError("a is over"))
        if end != "broken":
            a.forget()
        assert questions(sub, whole) == before
        assert dist.is_initialized()
        with pytest.raises((OSError, ValueError), match=r"a is over|not been initialized"):
            dist.all_reduce(torch.ones(1))
        with pytest.raises((OSError, ValueError), match=r"a is over|not been initialized"):
            dist.all_gather_object([None] * 3, 1)
        assert a.group is None or end == "broken"
        # How torch's programs clean up; as in stock torch there is nothing to ask afterwards.
        dist.destroy_process_group()
        assert not dist.is_initialized()
        with pytest.raises((OSError, ValueError), match=r"a is over|not been initialized"):
            dist.get_rank()
    assert not dist.is_initialized()


def test_a_broken_worlds_default_group_can_be_destroyed(kit):
    a = kit.world("a")
    told: list[bool] = []
    a.on_destroyed = lambda: told.append(True)
    a.break_(lambda: OSError("a is broken"))
    with router.selected(a):
        dist.destroy_process_group()
        assert told == [True]
        assert not dist.is_initialized()
        with pytest.raises(OSError, match="a is broken"):
            dist.barrier()


# -- explicit groups --------------------------------------------------------------------------------------------------


def test_an_explicit_group_means_itself_wherever_it_is_used(kit):
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    a, b = kit.world("a", backend="fake", rank=2, size=4), kit.world("b", backend="fake", rank=1, size=2)
    with router.selected(a):
        pair = dist.new_group([1, 2])
    own = kit.own(backend="fake", rank=0, size=3)
    for selected in (None, b, a):
        with router.selected(selected):
            assert dist.get_rank(a.group) == 2
            assert dist.get_rank(b.group) == 1
            assert dist.get_rank(own) == 0
            assert dist.get_rank(pair) == 1
            assert dist.get_world_size(a.group) == 4
            assert dist.get_process_group_ranks(pair) == [1, 2]
            assert dist.get_global_rank(pair, 0) == 1
            assert dist.get_group_rank(pair, 2) == 1
            assert dist.get_backend(a.group) == "fake"
            dist.broadcast(torch.ones(1), src=1, group=pair)
    # Some functions of old versions ask for the bare rank too, whatever group they are given (send, in 2.4).
    with router.selected(a):
        dist.send(torch.ones(1), dst=1, group=pair)
    with router.selected(b):
        assert len(c10d._world.pg_map) == 1


def test_a_function_of_torchs_that_asks_for_the_bare_rank_means_that_in_its_groups_world(kit, monkeypatch):
    """As those do up to torch 2.6 that gather, scatter and send objects."""
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    monkeypatch.setattr(router, "_asks_bare", True)
    own = kit.own(backend="fake", rank=3, size=4)
    a, b = (kit.world(name, backend="fake", rank=rank, size=4) for rank, name in ((1, "a"), (2, "b")))

    def bare(group, asked=None):
        return get_rank(asked)  # noqa: F821  (of torch's module)

    asks = types.FunctionType(bare.__code__, vars(c10d), argdefs=bare.__defaults__)
    for selected, mine in ((None, 3), (a, 1), (b, 2)):
        with router.selected(selected):
            assert [asks(each) for each in (own, a.group, b.group, None)] == [3, 1, 2, mine]
            assert asks(own, a.group) == 1
            assert dist.get_rank() == mine


def test_an_explicit_group_is_found_without_any_default_group(kit):
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    a = kit.world("a", backend="fake", rank=2, size=4)
    assert not dist.is_initialized()
    assert dist.get_rank(a.group) == 2
    with pytest.raises(ValueError, match="not been initialized"):
        dist.get_rank()


def test_a_group_is_not_destroyed_from_outside_its_world(kit):
    a, b = kit.world("a"), kit.world("b")
    for selected in (None, b):
        with router.selected(selected), pytest.raises(ValueError, match="Invalid process group"):
            dist.destroy_process_group(a.group)
    with router.selected(a):
        dist.all_reduce(torch.ones(1))


def test_owner_of_a_group(kit):
    a = kit.world("a")
    own = kit.own()
    assert router.owner_of(a.group) is a
    assert router.owner_of(own) is None


# -- default arguments that torch captures at import ------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "within"])
def test_the_default_group_of_an_import_is_not_remembered(when):
    # In a fresh process: the module is imported once.
    program = f"""
import sys; sys.path[:0] = [sys.argv[1], sys.argv[2]]
import inspect, torch, torch.distributed as dist
from kits.contract.routerkit import routed
from multiworld._c10d.routing import router
when = {when!r}
if when == "before":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    import torch.distributed.nn.functional as f
    captured = f.all_reduce.__defaults__
    assert dist.group.WORLD in captured
with routed() as kit:
    a, b = kit.world("a"), kit.world("b")
    with router.selected(a):
        import torch.distributed.nn.functional as f
        assert "def all_reduce" in inspect.getsource(f)
        assert f.all_reduce.__defaults__[-1] is None
    if when == "before":
        kit.backends.append(dist.group.WORLD._get_backend(torch.device("cpu")))
        router.uninstall()
        assert f.all_reduce.__defaults__ is captured
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(ROOT), str(ROOT / "tests")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
