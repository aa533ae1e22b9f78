"""Programs as they are written for pymultiworld 0.2.x, unchanged: its names, signatures and habits."""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
import time
from pathlib import Path
from queue import Queue

import pytest
import torch
import torch.distributed as dist

from multiworld import worlds
from multiworld.communicator import BrokenWorldException, WorldCommunicator
from multiworld.errors import JoinAbandonedError, UnknownWorldError
from multiworld.manager import WorldManager
from multiworld.registry import registry
from multiworld.watchdog import WatchDog

PATIENCE = 60
DOCS = Path(__file__).parents[3] / "docs"


def port_of(me):
    return int(me.store.rpartition(":")[2])


# -- a leader in two worlds, with a worker each ---------------------------------------------------------------------


async def worker(me, world_name):
    world_manager = WorldManager()
    await world_manager.initialize_world(
        world_name, 1, 2, backend="gloo", addr="127.0.0.1", port=port_of(me), timeout=PATIENCE
    )
    world_communicator = world_manager.communicator
    step = 0
    while True:
        tensor = torch.full((3,), float(step))
        try:
            await world_communicator.send(tensor, 0, world_name)
        except BrokenWorldException as e:
            me.emit("broken", text=str(e))
            break
        me.emit("sent", step=step)
        step += 1
        await asyncio.sleep(0.02)
    world_manager.cleanup()


async def leader(me):
    world_manager = WorldManager(enable_monitor=True)
    for world_name in ("world1", "world2"):
        await world_manager.initialize_world(
            world_name, 0, 2, "gloo", "127.0.0.1", port_of(me), PATIENCE, torch.device("cpu")
        )
    world_communicator = world_manager.communicator
    received = {"world1": 0, "world2": 0}

    async def receive(world_name, limit):
        tensor = torch.zeros(3)
        try:
            while received[world_name] < limit:
                await world_communicator.recv(tensor, 1, world_name)
                assert tensor.tolist() == [float(received[world_name])] * 3
                received[world_name] += 1
                if received[world_name] == 5:
                    me.emit("five", world=world_name)
        except BrokenWorldException as e:
            me.emit("broken", world=world_name, text=str(e), now=world_communicator.is_broken(world_name))
            world_manager.remove_world(world_name)

    second = asyncio.create_task(receive("world2", 10**9))
    first = asyncio.create_task(receive("world1", 10**9))
    await second
    before = received["world1"]
    while received["world1"] < before + 20:  # noqa: ASYNC110  (the other one goes on)
        await asyncio.sleep(0.01)
    assert not world_communicator.is_broken("world1")

    # The task that sent to it notices, too, and removes it again: pymultiworld does not mind.
    try:
        await world_communicator.send(torch.zeros(3), 1, "world2")
    except BrokenWorldException:
        world_manager.remove_world("world2")

    # The name of a broken world is used again.
    me.emit("again")
    received["world2"] = 0
    await world_manager.initialize_world("world2", 0, 2, addr="127.0.0.1", port=port_of(me))
    assert not world_communicator.is_broken("world2")
    await receive("world2", 10)
    world_manager.cleanup()
    me.emit("cleaned")
    await first
    assert world_communicator.is_broken("world1")
    with pytest.raises(BrokenWorldException):
        await world_communicator.recv(torch.zeros(3), 1, "world1")


def run_leader(me):
    asyncio.run(leader(me))


def run_worker(me, world_name):
    asyncio.run(worker(me, world_name))


def test_a_leader_goes_on_without_a_worker_and_takes_another(cast):
    hub = cast.start(run_leader)
    one = cast.start(run_worker, 1, world_name="world1")
    two = cast.start(run_worker, 1, world_name="world2")
    hub.expect("five")
    hub.expect("five")
    two.kill()
    broken = hub.expect("broken")
    assert (broken.world, broken.now) == ("world2", True)
    assert broken.text.startswith("world2 broken: ")
    hub.expect("again")
    again = cast.start(run_worker, 1, world_name="world2")
    hub.expect("cleaned")
    assert one.expect("broken").text.startswith("world1 broken: ")
    assert again.expect("broken").text.startswith("world2 broken: ")
    assert [hub.finish(), one.finish(), again.finish()] == [0, 0, 0]


# -- all operations -------------------------------------------------------------------------------------------------


async def operations(me, size):
    rank = me.rank
    world_manager = WorldManager()
    names = [f"world{i}" for i in range(2)]
    await asyncio.gather(
        *(
            world_manager.initialize_world(
                name, rank, size, addr="127.0.0.1", port=port_of(me), timeout=PATIENCE
            )
            for name in names
        )
    )
    comm = world_manager.communicator
    for name in names:
        t = torch.full((2,), float(rank + 1))
        await comm.all_reduce(t, dist.ReduceOp.SUM, name)
        assert t.tolist() == [6.0, 6.0]
        t = torch.full((2,), float(rank + 1))
        await comm.all_reduce(tensor=t, op=dist.ReduceOp.MAX, world_name=name)
        assert t.tolist() == [3.0, 3.0]
        await comm.all_reduce(torch.ones(1), world_name=name)
        t = torch.full((2,), float(rank + 1))
        await comm.reduce(t, 0, dist.ReduceOp.SUM, name)
        assert rank or t.tolist() == [6.0, 6.0]
        await comm.reduce(torch.ones(1), dst=1, world_name=name)
        t = torch.full((2,), float(rank))
        await comm.broadcast(t, 2, name)
        assert t.tolist() == [2.0, 2.0]
        parts = [torch.zeros(1) for _ in range(size)]
        await comm.all_gather(parts, torch.tensor([float(rank)]), name)
        assert [part.item() for part in parts] == [0.0, 1.0, 2.0]
        parts = [torch.zeros(1) for _ in range(size)] if rank == 1 else None
        await comm.gather(torch.tensor([float(rank)]), parts, 1, name)
        assert parts is None or [part.item() for part in parts] == [0.0, 1.0, 2.0]
        parts = [torch.zeros(1) for _ in range(size)] if rank == 0 else []
        await comm.gather(torch.tensor([float(rank)]), gather_list=parts, world_name=name)
        t = torch.zeros(1)
        await comm.scatter(t, [torch.tensor([float(i)]) for i in range(size)] if rank == 0 else None, 0, name)
        assert t.item() == rank
        if rank == 0:
            await comm.send(torch.tensor([4.0]), 1, name)
        elif rank == 1:
            await comm.recv(tensor=t, src=0, world_name=name)
            assert t.item() == 4.0
    assert [comm.is_broken(name) for name in (*names, "no world")] == [False, False, True]
    with pytest.raises(ValueError, match="already exists"):
        await world_manager.initialize_world(names[0], rank, size, addr="127.0.0.1", port=port_of(me))
    with pytest.raises(ValueError, match="does not exist"):
        world_manager.remove_world("no world")
    for kind in (BrokenWorldException, UnknownWorldError):
        with pytest.raises(kind, match=r"no world.*world0, world1"):
            await comm.recv(torch.zeros(1), 0, "no world")
    with pytest.raises(ValueError, match="port"):
        await world_manager.initialize_world("new", rank, size)
    for name in names:  # nobody leaves before the others have looked
        await comm.all_reduce(torch.ones(1), world_name=name)
    began = time.monotonic()
    world_manager.cleanup()
    world_manager.cleanup()
    assert time.monotonic() - began < PATIENCE / 2
    assert [comm.is_broken(name) for name in names] == [True, True]


def run_operations(me, size):
    asyncio.run(operations(me, size))


def test_all_eight_operations_in_two_worlds(cast):
    members = cast.all(run_operations, 3)
    assert [member.finish() for member in members] == [0, 0, 0]


# -- torch's own functions, which pymultiworld patches to take a world's name --------------------------------------


async def torchs_functions(me):
    world_manager = WorldManager()
    await world_manager.initialize_world(
        "world1", me.rank, 2, addr="127.0.0.1", port=port_of(me), timeout=PATIENCE
    )
    tensor = torch.full((2,), float(me.rank))
    with worlds()["world1"]:  # there: dist.broadcast(tensor, 1, None, True, "world1")
        dist.broadcast(tensor, 1)
        assert (dist.get_rank(), dist.get_world_size()) == (me.rank, 2)
    assert tensor.tolist() == [1.0, 1.0]
    await world_manager.communicator.all_reduce(tensor, world_name="world1")
    world_manager.cleanup()


def run_torchs_functions(me):
    asyncio.run(torchs_functions(me))


def test_torchs_functions_mean_a_managers_world_inside_of_with(cast):
    members = [cast.start(run_torchs_functions, rank) for rank in range(2)]
    assert [member.finish() for member in members] == [0, 0]


def test_the_pages_say_which_programs_run_unchanged():
    page = (DOCS / "from-pymultiworld.md").read_text(encoding="utf-8")
    assert '`with multiworld.worlds()["world1"]: dist.broadcast(t, src)`' in page
    assert not hasattr(dist, "DEFAULT_WORLD_NAME")
    for each in (DOCS / "index.md", DOCS.parent / "README.md", DOCS / "install.md"):
        (line,) = re.findall(r".*\brun (?:\[|unchanged).*", each.read_text(encoding="utf-8"))
        assert "`WorldManager` and `WorldCommunicator`" in line, each


# -- a world whose other member is not there yet --------------------------------------------------------------------


async def given_up(me):
    world_manager = WorldManager()
    task = asyncio.create_task(
        world_manager.initialize_world("world1", 0, 2, addr="127.0.0.1", port=port_of(me), timeout=PATIENCE)
    )
    await asyncio.sleep(0.2)
    began = time.monotonic()
    world_manager.cleanup()
    with pytest.raises(JoinAbandonedError, match="removed while it was being initialized"):
        await task
    assert time.monotonic() - began < PATIENCE / 2
    me.emit("given up")
    await world_manager.initialize_world("world1", 0, 2, addr="127.0.0.1", port=port_of(me), timeout=PATIENCE)
    await world_manager.communicator.recv(torch.zeros(1), 1, "world1")
    world_manager.cleanup()


async def coming_later(me):
    world_manager = WorldManager()
    await world_manager.initialize_world("world1", 1, 2, addr="127.0.0.1", port=port_of(me), timeout=PATIENCE)
    await world_manager.communicator.send(torch.zeros(1), 0, "world1")
    world_manager.cleanup()


def run_given_up(me):
    asyncio.run(given_up(me))


def run_coming_later(me):
    asyncio.run(coming_later(me))


def test_cleanup_gives_up_what_is_being_initialized(cast):
    first = cast.start(run_given_up)
    first.expect("given up")
    second = cast.start(run_coming_later, 1)
    assert [first.finish(), second.finish()] == [0, 0]


# -- the watchdog ---------------------------------------------------------------------------------------------------


async def again(me, how):
    """The world is initialized again while the join that was given up is still being undone."""
    manager, undone, settle = WorldManager(), threading.Event(), registry.settle

    def settled(name, world, *others):
        if world is None:
            undone.wait(PATIENCE)
        settle(name, world, *others)

    registry.settle = settled
    first = asyncio.create_task(manager.initialize_world("w", 0, 2, port=port_of(me), timeout=PATIENCE))
    while registry.joining() != ("w",):  # noqa: ASYNC110  (it is reserved in a thread)
        await asyncio.sleep(0.01)
    if how == "cleanup":
        manager.cleanup()
    else:
        manager.remove_world("w")
    second = asyncio.create_task(manager.initialize_world("w", 0, 1, port=port_of(me), timeout=PATIENCE))
    with pytest.raises(JoinAbandonedError, match="was removed while it was being initialized"):
        await first
    assert not second.done()
    undone.set()
    await asyncio.wait_for(second, PATIENCE)
    assert worlds()["w"].world_size == 1
    manager.cleanup()
    assert worlds() == {}


def run_again(me, how):
    asyncio.run(again(me, how))


@pytest.mark.parametrize("how", ["remove_world", "cleanup"])
def test_a_world_that_is_removed_while_it_is_initialized_may_be_initialized_again_at_once(cast, how):
    assert cast.start(run_again, how=how).finish() == 0


async def watching(me, size):
    event_q, action_q = Queue(), asyncio.Queue(1)
    watchdog = WatchDog(event_q, action_q)
    world_manager = WorldManager(enable_monitor=False)
    names = ["world1", "world2", "world3"]
    for name in names:
        await world_manager.initialize_world(name, me.rank, size, addr="127.0.0.1", port=port_of(me))
    me.emit("ready")
    if me.rank == 1:
        await asyncio.sleep(60)
    while not all(world_manager.communicator.is_broken(name) for name in names):  # noqa: ASYNC110  (as programs do)
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # the queue is full, and nobody reads it yet
    heard = {await asyncio.wait_for(action_q.get(), PATIENCE) for _ in names}
    assert heard == set(names)
    for name in names:
        world_manager.remove_world(name)
    watchdog.close()
    world_manager.cleanup()


def run_watching(me, size):
    asyncio.run(watching(me, size))


def test_its_watchdog_tells_which_worlds_broke(cast):
    one, victim = cast.all(run_watching, 2)
    one.expect("ready")
    victim.expect("ready")
    victim.kill()
    assert one.finish() == 0


# -- signatures -----------------------------------------------------------------------------------------------------

SIGNATURES = {
    WorldManager.__init__: "self enable_monitor=True",
    WorldManager.cleanup: "self",
    WorldManager.initialize_world: (
        "self world_name rank world_size backend='gloo' addr='127.0.0.1' port=-1 timeout=30 device=None"
    ),
    WorldManager.add_world: "self world_name backend",
    WorldManager.remove_world: "self world_name",
    WatchDog.__init__: "self event_q action_q",
    WorldCommunicator.is_broken: "self world_name",
    WorldCommunicator.send: "self tensor dst world_name=''",
    WorldCommunicator.recv: "self tensor src world_name=''",
    WorldCommunicator.broadcast: "self tensor src world_name=''",
    WorldCommunicator.all_reduce: "self tensor op=None world_name=''",
    WorldCommunicator.reduce: "self tensor dst op=None world_name=''",
    WorldCommunicator.all_gather: "self tensors tensor world_name=''",
    WorldCommunicator.gather: "self tensor gather_list=None dst=0 world_name=''",
    WorldCommunicator.scatter: "self tensor scatter_list=None src=0 world_name=''",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_the_signatures_are_pymultiworlds(function):
    # op=None is SUM and device=None the CPU, as there, without loading torch to say so.
    shown = [
        name if each.default is each.empty else f"{name}={each.default!r}"
        for name, each in inspect.signature(function).parameters.items()
    ]
    assert " ".join(shown) == SIGNATURES[function]


def test_the_exception_is_built_as_there():
    assert str(BrokenWorldException("world1", "gone")) == "world1 broken: gone"
    with pytest.raises(BrokenWorldException, match="world1 broken: gone"):
        raise BrokenWorldException("world1", "gone")
