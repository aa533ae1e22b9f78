"""NCCL worlds that change their size: a member is lost, newcomers come in, some die on the way, a member leaves."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import multiworld as mw
from programs.worldkit import JOIN, broken, everything, full, held, joined, meet, same, until
from programs.worlds_faults import Neighbours

if TYPE_CHECKING:
    from bed.rank import Rank

LONG = 600.0  # seconds
BACKGROUND = ("m8d-advance-", "m8d-nccl-connect-")
"""Names of the threads that prepare the next generation."""


def elastic(me: Rank, **more: Any) -> mw.World:
    """Join the world of the test, of two or three members whose ranks are assigned."""
    if "port" in me.config:  # of the ranks that were there before
        me.store_ports[:] = [me.config["port"]]
    return joined(
        me, rank=None, world_size="2:3", seat=me.config.get("seat", f"s{me.rank}"), timeout=JOIN, **more
    )


def ends(world: mw.World) -> Any:
    """Make the group of the first and the last member, as all members do; None in those between."""
    ranks = [0, world.world_size - 1]
    with world:
        made = dist.new_group(ranks)
    return made if world.rank in ranks else None


def summed(world: mw.World, device: Any, group: Any, base: float) -> list[Any]:
    """Sum in the world, and in the group of its ends; what came wrong."""
    wrong, n = [], world.world_size
    t = full(world.rank + base, device)
    world.all_reduce(t)
    wrong += [] if same(t, n * base + n * (n - 1) / 2) else [["world", base, n, t.cpu().tolist()]]
    if group is not None:
        t = full(world.rank + base, device)
        with world:
            dist.all_reduce(t, group=group)
        wrong += [] if same(t, 2 * base + n - 1) else [["group", base, n, t.cpu().tolist()]]
    return wrong


def values(world: mw.World, device: Any, group: Any) -> list[Any]:
    """Every operation as a method, and sums; what came wrong."""
    return everything(world, device, ways=("method",)) + summed(world, device, group, 1)


def comms(me: Rank) -> int:
    """Communicators of this process; those that are being made are among them."""
    assert me.bed is not None
    return me.bed.count("comms")


def settled(me: Rank, wanted: int, connecting: int = 0) -> dict[str, int]:
    """Wait until this process has no more communicators and threads of a preparation; return what it has."""
    now: dict[str, int] = {}

    def there() -> bool:
        names = [each.name for each in threading.enumerate()]
        now.update(comms=comms(me), background=sum(name.startswith(BACKGROUND) for name in names))
        return now["comms"] <= wanted and now["background"] <= connecting

    until(there, 30)
    return {**now, "fds": held()["fds"]}


def shrinks(me: Rank) -> None:
    """Two members whose third is lost: in the world's operation, or in that of a group of the world."""
    beside = Neighbours(me)
    me.event("store", port=me.store_ports[0])
    me.hear("join")
    world = elastic(me, last_call=JOIN, on_loss="shrink" if me.config["shrinks"] else "break")
    beside.start()
    group = ends(world)
    wrong = values(world, me.device, group)
    old = world.rank, world.generation
    me.event("ready", size=world.world_size)
    with broken(me, "broken"):
        if me.config["op"] == "group" and group is not None:
            with world:
                dist.all_reduce(full(1, me.device), group=group)
        else:
            world.all_reduce(full(1, me.device))
    if me.config["shrinks"]:
        world.wait_active(JOIN)
    else:
        world.reform(JOIN)
    if group is not None:
        with broken(me, "broken"):
            dist.all_reduce(full(1, me.device), group=group)
    group = ends(world)
    wrong += values(world, me.device, group)
    # The world beside, this one, and its group: nothing is left of the generation that was lost.
    now = settled(me, 3)
    me.event("values", wrong=wrong, beside=beside.stop(), comms=now["comms"], old=old, rank=world.rank,
             size=world.world_size, generation=world.generation, seats=world.seats)  # fmt: skip
    close(me, world, beside)


def close(me: Rank, world: mw.World, beside: Neighbours) -> None:
    """Close all worlds, together with the other rank of this start."""
    meet(me, "done")
    world.close()
    for each, _ in beside.worlds:
        each.close()
    stuck = me.config.get("stuck", 0)
    me.event("closed", left=settled(me, stuck, stuck)["comms"] - stuck)


def victim(me: Rank) -> None:
    """The third member, until it is killed."""
    world = elastic(me, last_call=JOIN)
    me.event("ready", wrong=values(world, me.device, ends(world)), rank=world.rank)
    me.hear("never", timeout=LONG)


def grows(me: Rank) -> None:
    """Two members that work in steps while newcomers come, with worlds beside."""
    beside = Neighbours(me)
    me.event("store", port=me.store_ports[0])
    world = elastic(me, last_call=0)
    beside.start()
    work(me, world)
    me.event("beside", **beside.stop())
    close(me, world, beside)


def newcomer(me: Rank) -> None:
    """A member that comes later; one that is to die says when it is inside NCCL, which is told to hang there."""
    bed, hangs = me.bed, me.config.get("hangs", False)
    assert bed is not None
    if hangs:
        bed.set("INIT_HANG_MS", int(LONG * 1000))
    seen = "comms_made" if hangs else "introduced"
    threading.Thread(
        target=lambda: until(lambda: bed.count(seen) > 0) and me.event("connecting"), daemon=True
    ).start()
    world = elastic(me, last_call=0)
    work(me, world)
    world.close()
    me.event("closed", left=settled(me, 0)["comms"])


def told(me: Rank, name: str) -> bool:
    """Whether the test has told this."""
    try:
        me.hear(name, timeout=0.002)
    except TimeoutError:
        return False
    return True


def obey(me: Rank, world: mw.World, wanted: int, stuck: int) -> None:
    """Do what the test has told: leave, hang where communicators are made, go on there (before it counts, too), count."""
    assert me.bed is not None
    if told(me, "leave"):
        world.leave()
    if told(me, "hang"):
        me.bed.set("INIT_HANG_MS", int(LONG * 1000))
    if told(me, "go on"):
        me.bed.set("INIT_HANG_MS", 0)
    if told(me, "count"):
        me.bed.set("INIT_HANG_MS", 0)
        now = settled(me, wanted + stuck, stuck)
        me.event("counted", generation=world.generation, wanted=wanted, **now)


def work(me: Rank, world: mw.World) -> None:
    """Work in steps until all members were told to stop, or this one has left; tell of each generation.

    Each has a group; what came before the last one must be gone when all of it is used.
    """
    wrong: list[Any] = []
    others, stuck, stop = comms(me) - 1, me.config.get("stuck", 0), False
    generation = steps = made = mine = 0
    group: Any = None
    while world.state is mw.State.ACTIVE:
        if world.generation != generation:
            group = ends(world)
            wrong += values(world, me.device, group)
            mine = others + 1 + (group is not None)
            allowed = stuck if generation else 0  # of a newcomer that died before
            now = settled(me, mine + allowed, allowed)
            generation, steps, made = world.generation, 0, mine + allowed
            me.event("in", generation=generation, rank=world.rank, size=world.world_size, seats=world.seats,
                     over=now["comms"] - mine - allowed, fds=now["fds"])  # fmt: skip
        wrong += summed(world, me.device, group, world.step)
        flag = full(float(stop), me.device, 1)
        world.all_reduce(flag)
        if flag.cpu().item() == world.world_size:
            break
        stop = stop or told(me, "stop")
        obey(me, world, mine, stuck)
        now_made = comms(me)
        steps += made > mine  # a step that was worked beside what is prepared
        if now_made > made:
            made = now_made
            me.event("prepares", generation=generation)
        if world.advance():
            me.event("entered", before=now_made, wanted=mine, steps=steps)
    me.event("worked", wrong=wrong, state=world.state.value)
