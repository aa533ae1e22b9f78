"""Members that are stopped, die together, die in the middle of a join, or take the store with them."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch
from kits.contract.stopkit import die
from kits.contract.worldkit import HANG, PATIENCE, SOON, free_port, outcome

import multiworld as mw


def told(me, w):
    """Tell the test of each breakage of `w`."""
    w.on_break(
        lambda world: me.emit(
            "broke",
            world=world.name,
            cause=str(world.breakage.cause),
            ranks=tuple(world.breakage.ranks),
            generation=world.generation,
        )
    )


def swap(w, count):
    """One checked round of traffic."""
    t = torch.tensor([count, w.rank])
    w.all_reduce(t)
    assert t.tolist() == [w.world_size * count, sum(range(w.world_size))]


def go_on(w, stop, tally):
    """Traffic until rank 0 says that it is enough."""
    going = torch.ones(1)
    while going.item():
        swap(w, tally[0])
        tally[0] += 1
        going[0] = float(not stop.is_set())
        w.broadcast(going, 0)
        time.sleep(0.01)


# -- stopped, and going on ------------------------------------------------------------------------------------------


def one_of_three(me, worlds, hang):
    """Be in `worlds` (name: rank of two); "healthy" has traffic all the time, in the others one waits for the other."""
    made = {
        name: mw.join(name, rank, 2, store=me.store, timeout=60, hang_timeout=hang)
        for name, rank in worlds.items()
    }
    for w in made.values():
        told(me, w)
        w.barrier()
    stop, tally, threads = threading.Event(), [0], []
    if "healthy" in made:
        threads.append(threading.Thread(target=go_on, args=(made["healthy"], stop, tally), daemon=True))
    ended = []
    waiting = [w for name, w in made.items() if name != "healthy"]
    threads += [
        threading.Thread(target=lambda w=w: ended.append(outcome(lambda: w.recv(torch.ones(1), 1 - w.rank))))
        for w in waiting
    ]
    for thread in threads:
        thread.start()
    me.emit("ready")
    me.hear()
    for thread in threads[-len(waiting) :]:
        thread.join(60)
    before = tally[0]
    deadline = time.monotonic() + SOON
    while "healthy" in made and tally[0] == before and time.monotonic() < deadline:
        time.sleep(0.1)
    me.emit("looked", ended=ended, moved=tally[0] - before)
    me.hear()
    for w in waiting:
        w.rejoin(timeout=60)
        swap(w, 7)
    me.emit("back", generations=[w.generation for w in waiting])
    me.hear()
    stop.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for w in made.values():
        w.close()


def test_a_stopped_member_breaks_its_worlds_and_learns_of_it_when_it_goes_on(cast):
    hang = HANG
    one = cast.start(one_of_three, worlds={"left": 0, "healthy": 0}, hang=hang)
    other = cast.start(one_of_three, worlds={"right": 0, "healthy": 1}, hang=hang)
    middle = cast.start(one_of_three, worlds={"left": 1, "right": 1}, hang=hang)
    for member in (one, other, middle):
        member.expect("ready")
    stopped = middle.stop()
    for member, world in ((one, "left"), (other, "right")):
        broke = member.expect("broke")
        assert (broke.world, broke.cause, broke.ranks) == (world, "hung", (1,))
        # Counted from the last sign of life, which a stalled machine may have kept from being sent.
        assert 0.25 * hang < broke.at - stopped < hang + SOON
    middle.go_on()
    learned = [middle.expect("broke") for _ in range(2)]
    assert {broke.world for broke in learned} == {"left", "right"}
    assert {(broke.cause, broke.ranks) for broke in learned} == {("hung", (1,))}, learned
    for member in (one, other, middle):
        member.say("look")
    for member in (one, other, middle):
        looked = member.expect("looked", timeout=90)
        assert looked.moved > 0 or member is middle
        assert [(seen["cause"], seen["ranks"]) for seen in looked.ended] == [("hung", (1,))] * len(
            looked.ended
        )
        assert all(seen["kinds"][0] == "BrokenWorldException" for seen in looked.ended)
    for member in (one, other, middle):
        member.say("rejoin")
    for member in (one, other, middle):
        assert set(member.expect("back").generations) == {2}
    for member in (one, other, middle):
        member.say("close")
    assert [member.finish() for member in (one, other, middle)] == [0] * 3
    for member in (
        one,
        other,
    ):  # the world that had nothing to do with it broke for nobody, until it was closed
        assert not any(
            each.name == "broke" and each.world == "healthy" and each.cause != "left" for each in member.heard
        )


def heals(me, size):
    from multiworld._generation import generation

    generation.RELEASE_DELAY = PATIENCE  # a slow machine may release the generation before the rejoin does
    w = mw.join("w1", me.rank, size, store=me.store, timeout=60, hang_timeout=HANG)

    def watchdogs():
        return [thread for thread in threading.enumerate() if thread.name == "m8d-watchdog"]

    first = watchdogs()
    me.emit("ready")
    me.emit("raised", **outcome(lambda: w.recv(torch.ones(1), size - 1)))
    w.rejoin()
    me.emit("back", generation=w.generation, same=watchdogs() == first)
    me.hear()
    w.close()


def one_more(me, size):
    w = mw.join("w1", me.rank, size, store=me.store, timeout=60, hang_timeout=HANG)
    me.emit("ready")
    me.hear()
    w.close()


def test_a_rejoin_does_not_wait_until_a_stopped_member_closes_its_connections(cast):
    """The watchdog's thread goes on; one that ends waits for the connections to close, and the rejoin for it."""
    size = 3
    others = [cast.start(heals, rank, size=size) for rank in range(size - 1)]
    stopped = cast.start(one_more, size - 1, size=size)
    for member in (*others, stopped):
        member.expect("ready")
    stopped.stop()
    for member in others:
        assert member.expect("raised").cause == "hung"
    fresh = cast.start(one_more, size - 1, size=size)
    for member in others:
        back = member.expect("back")
        assert (back.generation, back.same) == (2, True)
    for member in (*others, fresh):
        member.say("close")
    assert [member.finish() for member in (*others, fresh)] == [0] * size


# -- two at once ----------------------------------------------------------------------------------------------------


def waits(me, size):
    w = mw.join("w1", me.rank, size, store=me.store, timeout=60)
    w.barrier()
    me.emit("ready")
    me.emit(
        "raised", **outcome(lambda: w.recv(torch.ones(1), (w.rank + 1) % size) if w.rank % 2 else w.barrier())
    )
    me.emit("later", **outcome(w.barrier))
    me.hear()
    w.close()


@pytest.mark.parametrize("round_", range(3))
def test_two_that_die_at_the_same_moment_are_both_named_or_one_of_them(cast, round_):
    size = 5
    members = cast.all(waits, size)
    for member in members:
        member.expect("ready")
    dead = members[3:] if round_ else members[:2]
    alive = [member for member in members if member not in dead]
    killed = min([member.kill() for member in dead])
    for member in alive:
        seen = member.expect("raised")
        assert seen.kinds[0] == "BrokenWorldException"
        assert seen.cause == "crashed", seen
        assert seen.ranks
        assert set(seen.ranks) <= {each.rank for each in dead}, seen
        assert seen.at - killed < SOON
        later = member.expect("later")
        assert (later.cause, later.ranks) == ("crashed", seen.ranks), "the first verdict stands"
        member.say("close")
    assert [member.finish() for member in alive] == [0] * 3


# -- in the middle of a join ----------------------------------------------------------------------------------------


def dies_joining(me, size, moment):
    from multiworld import watchdog
    from multiworld._c10d import groups
    from multiworld._net.stores import rendezvous

    if moment == "attach":
        watchdog.Watchdog.attach = lambda *args, **kwargs: die()
    elif moment == "build":
        groups.build = lambda *args, **kwargs: die()
    elif moment == "built":
        build = groups.build
        groups.build = lambda *args, **kwargs: (build(*args, **kwargs), die())
    elif moment == "commit":
        rendezvous.Rendezvous.commit = lambda *args, **kwargs: die()
    mw.join("w1", me.rank, size, store=me.store, timeout=60)


def joins(me, size, failing, timeout=60):
    if failing:
        began = time.monotonic()
        first = outcome(lambda: mw.join("w1", me.rank, size, store=me.store, timeout=timeout))
        me.emit("failed", took=time.monotonic() - began, worlds=list(mw.worlds()), **first)
        me.hear()
    w = mw.join("w1", me.rank, size, store=me.store, timeout=60)
    swap(w, 3)
    me.emit("joined")
    me.hear()
    w.close()


@pytest.mark.parametrize("moment", ["attach", "build", "built", "commit"])
@pytest.mark.parametrize("dying", [0, 2])
def test_a_member_that_dies_while_the_others_join(cast, moment, dying):
    size = 3
    # Once connections are there nobody waits for the timeout; before, it may be all there is.
    timeout = 6 if moment == "attach" else 60
    members = [
        cast.start(joins, rank, size=size, failing=True, timeout=timeout)
        for rank in range(size)
        if rank != dying
    ]
    victim = cast.start(dies_joining, dying, size=size, moment=moment)
    assert victim.finish() == -signal.SIGKILL
    for member in members:
        seen = member.expect("failed", timeout=90)
        assert "JoinError" in seen.kinds, seen
        assert seen.worlds == []
        assert seen.took < 6 + SOON, seen
    for member in members:
        member.say("again")
    members.append(cast.start(joins, dying, size=size, failing=False))
    for member in members:
        member.expect("joined")
    for member in members:
        member.say("close")
    assert [member.finish() for member in members] == [0] * 3


# -- the store ------------------------------------------------------------------------------------------------------


def lives_on(me, size, rounds):
    w = mw.join("w1", me.rank, size, store=me.store, timeout=60)
    for generation in range(1, rounds + 1):
        swap(w, generation)
        me.emit("active", generation=w.generation)
        if me.rank == 0 and generation < rounds:
            time.sleep(60)  # to be killed
        if generation == rounds:
            break
        me.emit("raised", **outcome(lambda: w.recv(torch.ones(1), 0)))
        w.rejoin()
    me.hear()
    w.close()


def comes_new(me, size, last):
    w = mw.join("w1", me.rank, size, store=me.store, timeout=60)
    swap(w, w.generation)
    me.emit("active", generation=w.generation)
    if last:
        me.hear()
        w.close()
    else:
        time.sleep(60)


def test_rank_0_dies_with_the_store_and_a_new_one_serves_it_again(cast):
    size, rounds = 3, 3
    store = f"tcp://127.0.0.1:{free_port()}"
    members = [cast.start(lives_on, rank, size=size, rounds=rounds, store=store) for rank in (1, 2)]
    for generation in range(1, rounds + 1):
        leader = cast.start(comes_new, 0, size=size, last=generation == rounds, store=store)
        for member in (leader, *members):
            assert member.expect("active").generation == generation
        if generation < rounds:
            killed = leader.kill()
            for member in members:
                seen = member.expect("raised")
                assert (seen.cause, seen.ranks, seen.generation) == ("crashed", (0,), generation)
                assert seen.at - killed < SOON
    for member in (leader, *members):
        member.say("close")
    assert [member.finish() for member in (leader, *members)] == [0] * 3


def comes_back(me, size, how, late):
    w = mw.join("w1", me.rank, size, store=me.store, timeout=60)
    swap(w, 1)
    me.emit("active")
    me.emit("raised", **outcome(lambda: w.recv(torch.ones(1), 2)))
    if me.rank in late:
        me.hear()
    if how == "close and join":
        w.close()
        w = mw.join("w1", me.rank, size, store=me.store, timeout=60)
    elif how == "join":
        w = mw.join("w1", me.rank, size, store=me.store, timeout=60)
    else:
        w.rejoin()
    swap(w, 2)
    me.emit("back", generation=w.generation)
    me.hear()
    w.close()


@pytest.mark.parametrize("how", ["rejoin", "join", "close and join"])
def test_rank_0_comes_back_to_its_own_store_after_the_others(cast, how):
    """It serves the store: the others wait there for it, and it must not take it away under them."""
    size, store = 3, f"tcp://127.0.0.1:{free_port()}"
    members = [
        cast.start(comes_back, rank, size=size, how=how, late=[0], store=store) for rank in range(size - 1)
    ]
    dying = cast.start(comes_back, 2, size=size, how=how, late=[2], store=store)
    for member in (*members, dying):
        member.expect("active")
    dying.kill()
    for member in members:
        assert member.expect("raised").cause == "crashed"
    fresh = cast.start(comes_new, 2, size=size, last=True, store=store)
    time.sleep(
        1.0
    )  # rank 1 and the new rank 2 are waiting by then; a shorter wait tests less, and fails nothing
    members[0].say("come back")
    for member in members:
        assert member.expect("back", timeout=90).generation == 2
    for member in (*members, fresh):
        member.say("close")
    assert [member.finish() for member in (*members, fresh)] == [0] * size


def serves(me):
    w = mw.join("keeper", 0, 1, store=me.store, timeout=30)
    me.emit("serving")
    me.hear()
    w.close()


def works_on(me):
    w = mw.join("w1", me.rank, 2, store=me.store, timeout=60, hang_timeout=HANG)
    told(me, w)
    stop, tally = threading.Event(), [0]
    worker = threading.Thread(target=go_on, args=(w, stop, tally), daemon=True)
    worker.start()
    me.emit("ready")
    me.hear()
    me.emit("looked", count=tally[0], state=str(w.state))
    me.hear()
    stop.set()
    worker.join(60)
    assert not worker.is_alive()
    began = time.monotonic()
    w.close()
    me.emit("closed", took=time.monotonic() - began)


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_store_that_hangs_or_dies_breaks_no_active_world(cast, end):
    store = f"tcp://127.0.0.1:{free_port()}"
    keeper = cast.start(serves, store=store)
    keeper.expect("serving")
    members = [cast.start(works_on, rank, store=store) for rank in range(2)]
    for member in members:
        member.expect("ready")
    getattr(keeper, end)()
    time.sleep(HANG + 0.5)  # more than the hang_timeout, in which nothing must happen
    for member in members:
        member.say("look")
    for member in members:
        looked = member.expect("looked")
        assert looked.state == "active"
        assert looked.count > 10
    for member in members:
        member.say("close")
    for member in members:
        assert member.expect("closed").took < SOON
        assert not [each for each in member.heard if each.name == "broke" and each.cause != "left"]
        assert member.finish() == 0
