"""Many worlds in one process: they share gloo's devices and the store's connection, and nothing else."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kits.contract.worldkit import left_over, threads_ended

import multiworld as mw

WORLDS = 24


def links(world):
    return {link for group in world._gen.c10d.gloo.groups() for link in group.links}


def together(me, size, threads, seed):
    """Joins all worlds, one after the other or all at once; then each member begins them in an order of its own."""
    names = [f"w{i:02}" for i in range(WORLDS)]
    if threads > 1:
        random.Random(seed + me.rank).shuffle(names)  # noqa: S311  (nothing secret)
    with ThreadPoolExecutor(threads) as pool:
        joined = pool.map(lambda name: mw.join(name, me.rank, size, store=me.store, timeout=60), names)
        worlds = {world.name: world for world in joined}
    for world in sorted(worlds.values(), key=lambda each: each.name):
        assert world.group is not None  # made now
    found = [links(world) for world in worlds.values()]
    me.emit("joined", each=[len(one) for one in found], all=len(set().union(*found)))
    for name in sorted(worlds):
        t = torch.ones(2)
        worlds[name].all_reduce(t)
        assert t.tolist() == [float(size)] * 2
    # One by one: the end of one world is nobody else's.
    for name in sorted(worlds):
        if me.rank == 0:
            me.hear()
            worlds[name].close()
        else:
            with pytest.raises(mw.BrokenWorldException) as caught:
                worlds[name].recv(torch.zeros(1), 0)
            assert (caught.value.world, caught.value.cause) == (name, "left")
        active = sorted(other for other, world in worlds.items() if world.state is mw.State.ACTIVE)
        me.emit("over", world=name, active=active)
    for world in worlds.values():
        world.close()
    me.emit("closed", threads=threads_ended(), devices=pool_of_devices())


def pool_of_devices():
    from multiworld._c10d.gloo.devices import pool

    return pool.devices


@pytest.mark.parametrize(("size", "threads"), [(2, 1), (2, WORLDS), (3, WORLDS)])
def test_the_end_of_each_is_its_own_in_whatever_order_they_were_joined(cast, size, threads):
    seed = random.randrange(1000)  # noqa: S311  (nothing secret)
    members = cast.all(together, size, threads=threads, seed=seed)
    for member in members:
        told = member.expect("joined")
        assert (told.each, told.all) == ([size - 1] * WORLDS, (size - 1) * WORLDS), f"seed {seed}"
    left = [f"w{i:02}" for i in range(WORLDS)]
    while left:
        members[0].say("close")
        gone = left.pop(0)
        for member in members:
            told = member.expect("over")
            assert (told.world, told.active) == (gone, left), f"seed {seed}"
    for member in members:
        told = member.expect("closed")
        assert (told.threads, told.devices) == ([], 0)
    assert [member.finish() for member in members] == [0] * size


def thrifty(me, size, gloo):
    # What the first world of a process brings along (the watchdog, a device, the store) is no world's own.
    first = mw.join("first", me.rank, size, store=me.store, timeout=60)
    assert not gloo or first.group is not None
    first.barrier()
    before = left_over()
    worlds = [mw.join(f"w{i}", me.rank, size, store=me.store, timeout=60) for i in range(WORLDS)]
    assert not gloo or all(world.group is not None for world in worlds)
    first.barrier()
    after = left_over()
    me.emit("held", tasks=after["tasks"] - before["tasks"], fds=after["fds"] - before["fds"])
    for world in worlds:
        assert world.close()
    assert first.close()


def test_a_world_costs_a_descriptor(cast):
    members = cast.all(thrifty, 2, gloo=False)
    for member in members:
        held = member.expect("held")
        assert (held.tasks <= 2, held.fds <= WORLDS + 2) == (True, True), held.data


def test_one_that_needs_gloo_costs_a_thread_and_two_descriptors(cast):
    members = cast.all(thrifty, 2, gloo=True)
    for member in members:
        held = member.expect("held")
        # Three more groups have two threads (`gloo.FEW`), and there may be as many devices as cores, three more, too,
        # with a thread and four descriptors each.
        # One asks the other, which reads that in threads of the pool.
        assert held.tasks <= WORLDS + 3 + 3 + 2 + 4
        assert held.fds <= 2 * WORLDS + 3 * 4 + 2
    assert [member.finish() for member in members] == [0, 0]
