"""A network that is cut under running worlds: namespaces around a bridge, and one cable of it pulled."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest
import torch
from kits.contract.runningkit import MEGABYTE, runner
from kits.contract.worldkit import HANG, SOON, enter_netns, outcome
from kits.netkit import Network

import multiworld as mw

log = logging.getLogger("measured")


@pytest.fixture
def network():
    with Network(3) as made:
        yield made


def traffic(w, stop, tally):
    """Go on with a world until rank 0 says that it is enough; every answer is checked."""
    going = torch.ones(1)
    while True:
        t = torch.tensor([tally[0], w.rank])
        w.all_reduce(t)
        assert t.tolist() == [w.world_size * tally[0], sum(range(w.world_size))]
        tally[0] += 1
        going[0] = float(not stop.is_set())
        w.broadcast(going, 0)
        if not going.item():
            return
        time.sleep(0.01)


def told(me, w):
    """Tell the test of each breakage of `w`."""

    def broke(world):
        found = world.breakage
        me.emit("broke", world=world.name, cause=str(found.cause), ranks=found.ranks, when=found.at)

    w.on_break(broke)


def node(me, netns, worlds, how):
    """Be in `worlds` (name: rank, size, store) at once; wait in "cut" for somebody who will not come back."""
    enter_netns(netns)
    made = {}

    def joined(name, rank, size, store):
        made[name] = mw.join(name, rank, size, store=store, timeout=60, hang_timeout=HANG)
        told(me, made[name])

    joiners = [threading.Thread(target=joined, args=(name, *each)) for name, each in worlds.items()]
    for joiner in joiners:
        joiner.start()
    for joiner in joiners:
        joiner.join()
    assert set(made) == set(worlds)
    stop, tallies, threads = threading.Event(), {}, []
    for name, w in made.items():
        if name != "cut":
            tallies[name] = [0]
            threads.append(threading.Thread(target=traffic, args=(w, stop, tallies[name]), daemon=True))
    for thread in threads:
        thread.start()
    if "cut" in made:
        cut = made["cut"]
        cut.barrier()
        me.emit("ready")
        if how == "blocked":
            seen = outcome(lambda: cut.recv(torch.ones(1), 1 - cut.rank))
        elif how == "awaiting":
            seen = outcome(lambda: asyncio.run(awaiting(cut)))
        else:  # talks to nobody
            seen = outcome(lambda: idle(cut))
        me.emit("raised", **seen)
        me.emit("later", **outcome(cut.barrier))
    else:
        me.emit("ready")
    me.hear()
    before = {name: tally[0] for name, tally in tallies.items()}
    deadline = time.monotonic() + SOON
    while any(tally[0] == before[name] for name, tally in tallies.items()) and time.monotonic() < deadline:
        time.sleep(0.1)
    me.emit(
        "healthy",
        moved={name: tally[0] - before[name] for name, tally in tallies.items()},
        states={name: str(w.state) for name, w in made.items()},
    )
    me.hear()  # all have looked
    stop.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if "cut" in made and me.hear() == "again":
        made["cut"].rejoin(timeout=60)
        t = torch.ones(1)
        made["cut"].all_reduce(t)
        me.emit("again", generation=made["cut"].generation, value=t.item())
        me.hear()
    for w in made.values():
        w.close()


async def awaiting(w):
    await w.aio.all_reduce(torch.ones(1))


def idle(w):
    while w.state is mw.State.ACTIVE:
        time.sleep(0.005)
    w.barrier()


def check(member, cut, ranks):
    seen = member.expect("raised")
    assert (seen.cause, seen.ranks, seen.generation) == ("unreachable", ranks, 1), seen
    assert member.expect("later").cause == "unreachable"
    broke = [each for each in member.heard if each.name == "broke"]
    if not broke:
        broke = [member.expect("broke")]
    assert [each.world for each in broke] == ["cut"]
    took = seen.at - cut
    # Counted from the last sign of life, which a stalled machine may have kept from being sent.
    assert 0.25 * HANG <= took <= 1.2 * HANG + SOON, took
    return took


def end(members, untouched):
    for member in members:
        member.say("look")
    for member, expected in zip(members, untouched, strict=True):
        healthy = member.expect("healthy")
        assert {name for name, state in healthy.states.items() if state == "active"} == expected
        assert all(moved > 0 for moved in healthy.moved.values()), healthy.moved
    for member in members:
        member.say("stop")


@pytest.mark.parametrize(
    ("how", "ways"), [("link down", ("blocked", "awaiting")), ("packets lost", ("awaiting", "blocked"))]
)
def test_a_cut_is_unreachable_on_both_sides_and_nowhere_else(cast, network, how, ways):
    """1 and 2 share the world that crosses the cut; 1 and 3 another one; 2 has one within its own host."""
    store, inside = f"tcp://{network.address(1)}:29500", "tcp://127.0.0.1:29501"
    one = cast.start(
        node,
        netns=network.hosts[0],
        how=ways[0],
        worlds={"cut": (0, 2, store), "whole": (0, 2, store)},
    )
    two = cast.start(
        node,
        netns=network.hosts[1],
        how=ways[1],
        worlds={"cut": (1, 2, store), "inside": (0, 2, inside)},
    )
    three = cast.start(node, netns=network.hosts[2], how="", worlds={"whole": (1, 2, store)})
    beside = cast.start(node, netns=network.hosts[1], how="", worlds={"inside": (1, 2, inside)})
    members = [one, two, three, beside]
    for member in members:
        member.expect("ready")
    cut = time.monotonic()
    (network.pull if how == "link down" else network.lose)(2)
    took = [check(one, cut, (1,)), check(two, cut, (0,))]
    log.info("%s, hang_timeout %.1f s: %.2f and %.2f s", how, HANG, *took)
    end(members, [{"whole"}, {"inside"}, {"whole"}, {"inside"}])
    for member in (one, two):
        member.say("again" if how == "link down" else "close")
    if how == "link down":
        network.plug(2)  # the cable is back: the world is joined again under its name
        for member in (one, two):
            again = member.expect("again")
            assert (again.generation, again.value) == (2, 2.0)
        for member in (one, two):
            member.say("close")
    assert [member.finish() for member in members] == [0] * 4


def test_a_member_that_is_cut_off_is_unreachable_for_all_others(cast, network):
    """Three hosts in one world: those that still reach each other name the one that is gone, and only that."""
    store = f"tcp://{network.address(1)}:29500"
    members = [
        cast.start(
            node, netns=network.hosts[rank], how="idle" if rank == 1 else "awaiting",
            worlds={"cut": (rank, 3, store)},
        )
        for rank in range(3)
    ]  # fmt: skip
    for member in members:
        member.expect("ready")
    cut = time.monotonic()
    network.pull(3)
    for member in members[:2]:
        check(member, cut, (2,))
    seen = members[2].expect("raised")
    assert seen.cause == "unreachable"
    assert seen.ranks
    assert set(seen.ranks) <= {0, 1}
    assert seen.at - cut <= 1.2 * HANG + SOON
    end(members, [set(), set(), set()])
    for member in members:
        member.say("close")
    assert [member.finish() for member in members] == [0] * 3


@pytest.mark.parametrize(
    ("lane", "loop", "nbytes"),
    [
        ("1", "all_reduce", 4 * MEGABYTE),
        ("1", "send_recv", 256 * MEGABYTE),
        ("1", "routed_send_recv", 4),
        ("0", "broadcast", 64 * MEGABYTE),
    ],
)
def test_what_runs_ends_when_the_network_is_cut(cast, network, lane, loop, nbytes):
    """A payload may be half on its way: none of it waits for its timeout."""
    arguments = {
        "size": 2,
        "store": f"tcp://{network.address(1)}:29500",
        "loop": loop,
        "nbytes": nbytes,
        "lane": lane,
        "hang": HANG,
    }
    members = [cast.start(runner, rank, netns=network.hosts[rank], **arguments) for rank in range(2)]
    for each in members:
        each.expect("running")
    time.sleep(0.2)
    network.pull(2)
    for each in members:
        seen = each.expect("raised")
        assert seen.cause == "unreachable"
        assert seen.untouched
        assert seen.late < 2.0 + 2 * seen.stalled, seen
        each.say(False)
    assert [each.finish() for each in members] == [0, 0]
