"""Worlds whose ranks are assigned: they shrink when members are lost, and let newcomers in when they reform."""

from __future__ import annotations

import asyncio
import gc
import tempfile
import threading
import time

import pytest
import torch
import torch.distributed as dist
from kits.contract.elastickit import LONG, answered, claimed, enter, is_served, member, of_seat, tell
from kits.contract.stopkit import POINTS, die
from kits.contract.worldkit import SOON, free_port, left_over, outcome, threads_ended
from kits.meetkit import until
from torch.distributed.device_mesh import init_device_mesh

import multiworld as mw
from multiworld.registry import registry

# -- what tests expect ------------------------------------------------------------------------------------------------


def everyone(actors, generation=None, size=None):
    """All are in one generation, of themselves, and its sums are right; returns its seats by rank."""
    told = [actor.expect("in") for actor in actors]
    size = size or len(actors)
    assert {each.seats for each in told} == {told[0].seats}, told
    assert set(told[0].seats) >= {f"s{actor.rank}" for actor in actors}
    assert all(each.seats[each.rank] == f"s{actor.rank}" for actor, each in zip(actors, told, strict=True))
    assert {each.size for each in told} == {size} == {len(told[0].seats)}
    assert {each.sum for each in told} == {size * (size + 1) / 2}
    assert {each.generation for each in told} == {told[0].generation if generation is None else generation}
    return told[0].seats


def without(actors, *gone):
    return [actor for actor in actors if actor not in gone]


def four(cast, **options):
    members = [cast.start(member, number, **options) for number in range(4)]
    return members, everyone(members, 1)


# -- shrinking --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_loss", ["break", "shrink"])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_killed_member_is_left_out(cast, rank, on_loss):
    members, seats = four(cast, on_loss=on_loss)
    victim = of_seat(members, seats[rank])
    victim.kill()
    rest = without(members, victim)
    for each in rest:
        assert each.expect("broken").cause == "crashed"
        assert each.expect("reformed").took < SOON
    assert everyone(rest, 2) == tuple(seat for seat in seats if seat != seats[rank]), "in their old order"


def test_one_after_the_other_down_to_one(cast):
    members, _ = four(cast)
    for generation in (2, 3, 4):
        members.pop(0).kill()
        everyone(members, generation)


def test_two_at_once(cast):
    members, seats = four(cast)
    for seat in seats[:2]:
        of_seat(members, seat).kill()
    rest = [of_seat(members, seat) for seat in seats[2:]]
    # They may see one loss before the other, and reform once or twice.
    seen = [rest[0].expect("in"), rest[1].expect("in")]
    assert [each.seats for each in seen] == [seats[2:]] * 2


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_a_store_that_a_member_serves_goes_on_without_it(cast, store, tmp_path):
    """Another process of that host serves it then, and knows of the world what its members remember."""
    where = f"tcp://127.0.0.1:{free_port()}" if store == "tcp" else f"file://{tmp_path}/store"
    members, _ = four(cast, store=where)
    for generation in (2, 3, 4):  # whoever serves it is among them
        members.pop(0).kill()
        everyone(members, generation)


def test_a_stopped_member_is_left_out_and_comes_back_last(cast):
    members, seats = four(cast)
    victim = of_seat(members, seats[0])
    victim.stop()
    rest = without(members, victim)
    assert {each.expect("broken").cause for each in rest} == {"hung"}
    assert everyone(rest, 2) == seats[1:]
    victim.go_on()
    claimed(cast.server, seats[0])
    of_seat(members, seats[1]).kill()
    rest = [of_seat(members, seat) for seat in (seats[2], seats[3], seats[0])]
    assert everyone(rest, 3) == (seats[2], seats[3], seats[0])


def test_two_that_stop_at_once_are_left_out_without_a_last_call(cast):
    """The verdict names the one whose silence was longest; the other is not waited for as one that is late."""
    members, _ = four(cast)
    for each in members[2:]:
        each.stop()
    everyone(members[:2], 2)


def test_a_member_leaves_and_the_others_go_on(cast):
    members, seats = four(cast)
    members[1].say("close")
    members[1].expect("closed")
    rest = without(members, members[1])
    assert {each.expect("broken").cause for each in rest} == {"left"}
    assert everyone(rest, 2) == tuple(seat for seat in seats if seat != "s1")
    assert members[1].finish() == 0


def test_a_failed_operation_loses_nobody(cast):
    members, seats = four(cast)
    members[2].say("fail")
    assert {each.expect("broken").cause for each in members} == {"failed"}
    assert everyone(members, 2) == seats


def test_another_world_of_the_same_processes_stays(cast):
    members = [cast.start(in_two, number) for number in range(3)]
    for each in members:
        each.expect("in")
    members[2].kill()
    for each in members[:2]:
        assert each.expect("told").data == {"pair": 2.0, "generation": 1, "shrunk": 2, "sum": 2.0}


def in_two(me):
    w = enter(me, 3)  # a fixed size, and assigned ranks
    pair = mw.join("pair", me.rank, 2, store=me.store, timeout=LONG) if me.rank < 2 else None
    me.emit("in")
    assert outcome(lambda: w.recv(torch.ones(1), src=(w.rank + 1) % 3))["cause"] == "crashed"
    with pytest.raises(mw.JoinTimeoutError, match="of at least 3 members"):
        answered(lambda: w.reform(1.0))
    w.close()
    shrunk = mw.join("w2", None, "2:3", store=me.store, timeout=LONG, last_call=0.5)
    t, u = torch.ones(1), torch.ones(1)
    pair.all_reduce(t)
    shrunk.all_reduce(u)
    me.emit("told", pair=t.item(), generation=pair.generation, shrunk=shrunk.world_size, sum=u.item())


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("point", POINTS)
def test_a_member_lost_while_they_reform_is_left_out(cast, point, how):
    members = [cast.start(member, number, stop=point if number == 2 else None) for number in range(4)]
    everyone(members, 1)
    members[0].kill()
    members[2].expect("there")
    getattr(members[2], how)()
    rest = [members[1], members[3]]
    seen = [each.expect("in") for each in rest]
    assert {each.seats for each in seen} in ({("s1", "s3")}, {("s3", "s1")}), seen
    assert {each.sum for each in seen} == {3.0}


@pytest.mark.parametrize("point", [point for point in POINTS if point != "claimed"])
def test_a_member_that_serves_the_store_is_left_out_wherever_it_was(cast, point):
    """What the others were about to agree on is lost with the store: they agree anew at the next one."""
    port = free_port()
    where = f"tcp://127.0.0.1:{port}"
    serves = cast.start(member, 2, stop=point, store=where)
    until(lambda: is_served(port))
    members = [cast.start(member, number, store=where) for number in (0, 1, 3)]
    everyone([*members, serves], 1)
    members[0].kill()
    serves.expect("there")
    serves.kill()
    rest = members[1:]
    seen = [each.expect("in") for each in rest]
    assert {each.seats for each in seen} in ({("s1", "s3")}, {("s3", "s1")}), seen
    assert {each.sum for each in seen} == {3.0}


def loses_its_store_first(me, **options):
    """Stands still when it has connected; it ends when it is told to, and its store before the rest of it."""

    def ends():
        from multiworld._net.stores.shared import registry

        me.hear()
        for each in list(registry.shared.values()):
            if each.server is not None:
                each.server.close()
        time.sleep(0.3)
        die()

    threading.Thread(target=ends, daemon=True).start()
    member(me, stop="connected", **options)


def tries_again(me, before=0.0, pause=0.0, **options):
    """Works; when the store is lost a try ends `before` seconds late, and the next one begins after the `pause`."""
    from multiworld._join import join, steps

    with_members = steps._with_members

    def slowly(terms, *args):
        try:
            return with_members(terms, *args)
        except mw.StoreUnreachableError:
            time.sleep(before)
            raise

    steps._with_members = slowly
    join.AGAIN = max(pause, join.AGAIN)
    member(me, **options)


def test_a_survivor_that_tries_again_has_not_left(cast):
    """The first one that misses the store ends its try; to the other one it is a member that comes again."""
    port = free_port()
    where = f"tcp://127.0.0.1:{port}"
    serves = cast.start(loses_its_store_first, 2, store=where)
    until(lambda: is_served(port))
    members = [cast.start(member, 0, store=where)]
    members.append(cast.start(tries_again, 1, pause=0.8, store=where))
    members.append(cast.start(tries_again, 3, before=0.06, store=where))
    everyone([*members, serves], 1)
    members[0].kill()
    serves.expect("there")
    serves.say("end")
    everyone(members[1:], size=2)


def test_a_member_that_cannot_build_its_group_is_left_out(cast):
    members = [cast.start(member, number) for number in range(3)]
    members.append(cast.start(cannot_build, 3))
    everyone(members, 1)
    members[0].kill()
    assert set(everyone(members[1:3])) == {"s1", "s2"}
    assert "no room" in members[3].expect("told").text


def cannot_build(me):
    from multiworld._join import steps

    w = enter(me, "1:4")
    tell(me, w)

    def build(*_, **_keywords):
        raise mw.BackendError("w", "no room on the device")

    steps.groups.build = build
    with pytest.raises(mw.BrokenWorldException):
        while True:
            w.all_reduce(torch.ones(1))
    me.emit("told", **outcome(lambda: w.reform(LONG)))
    me.hear()


def test_a_member_that_is_late_is_waited_for(cast):
    members, seats = late_one(cast, last_call=LONG)
    members[0].kill()
    assert set(everyone(members[1:], 2)) == set(seats) - {"s0"}


def test_the_last_call_ends_in_time_to_build(cast):
    """However long it is: a world that has enough members comes about before the timeout."""
    members = [cast.start(in_time, number) for number in range(2)]
    assert [each.expect("in").size for each in members] == [2, 2]


def in_time(me):
    tell(me, enter(me, "2:4", timeout=SOON, last_call=LONG))


def test_a_member_that_is_too_late_comes_in_next_time(cast):
    # Long enough for all four to be in the first generation, and shorter than one of them is late.
    members, _ = late_one(cast, late=SOON, last_call=SOON / 4)
    members[0].kill()
    assert set(everyone(members[2:], 2)) == {"s2", "s3"}
    claimed(cast.server, "s1")
    members[2].kill()
    assert everyone([members[3], members[1]], 3) == ("s3", "s1")


def late_one(cast, late=3.0, **options):
    """Four members, of which s1 comes to its first reform some seconds late."""
    members = [
        cast.start(member, number, late=late if number == 1 else 0.0, **options) for number in range(4)
    ]
    return members, everyone(members, 1)


# -- newcomers --------------------------------------------------------------------------------------------------------


def test_too_few_wait_and_a_newcomer_lets_them_go_on(cast):
    members = [cast.start(member, number, size="3:4", last_call=0.5) for number in range(3)]
    seats = everyone(members, 1)
    members[1].kill()
    rest = without(members, members[1])
    for each in rest:
        each.expect("broken")
    newcomer = cast.start(member, 7, size="3:4", last_call=0.5)
    assert everyone([*rest, newcomer], 2) == (*(seat for seat in seats if seat != "s1"), "s7")


def test_a_newcomer_waits_unnoticed_and_comes_in_at_the_next_reform(cast):
    members, seats = four(cast)
    waiting = cast.start(member, 5)
    late = cast.start(member, 6)
    claimed(cast.server, "s5", "s6")
    assert not any(each.conn.poll(0) for each in members), "the members heard nothing"
    members[0].kill()
    # There is room for one of the two.
    seen = [each.expect("in") for each in members[1:]]
    assert seen[0].seats[:3] == tuple(seat for seat in seats if seat != "s0")
    assert seen[0].seats[3] in {"s5", "s6"}
    assert {each.seats for each in seen} == {seen[0].seats}
    came = waiting if seen[0].seats[3] == "s5" else late
    assert came.expect("in").generation == 2


def test_a_process_that_is_started_again_takes_its_seat(cast):
    members, _ = four(cast)
    members[3].kill()
    everyone(members[:3], 2)
    again = cast.start(member, 3)
    claimed(cast.server, "s3")
    members[0].kill()
    assert everyone([members[1], members[2], again], 3)[-1] == "s3"


def test_two_of_one_seat(cast):
    members = [cast.start(one_seat, number) for number in range(2)]
    kinds = sorted(each.expect("told").kinds[0] for each in members)
    assert kinds == ["JoinTimeoutError", "RankTakenError"]


def one_seat(me):
    me.emit("told", **outcome(lambda: answered(lambda: enter(me, "2:3", seat="the one", timeout=SOON))))


def test_newcomers_of_another_kind_are_refused_alone(cast):
    members = [cast.start(member, number, size="2:3", last_call=LONG) for number in range(2)]
    claimed(cast.server, "s0", "s1")
    odd = cast.start(another_kind, 5)
    assert odd.expect("told").kinds[0] == "MismatchError"
    members.append(cast.start(member, 2, size="2:3", last_call=LONG))
    everyone(members, 1)


def another_kind(me):
    me.emit("told", **outcome(lambda: enter(me, "2:9", timeout=6.0)))


# -- what it is for torch ---------------------------------------------------------------------------------------------


def test_sub_groups_and_meshes_are_made_anew(cast):
    members = [cast.start(with_groups, number) for number in range(4)]
    for each in members:
        each.expect("in")
    members[1].kill()
    for each in without(members, members[1]):
        told = each.expect("told")
        assert (told.world, told.mesh) == (3, [3])
        assert told.sum == (2.0 if told.rank < 2 else 3.0)


def with_groups(me):
    w = enter(me, "2:4")
    with w:
        dist.new_group([0, 1])
    me.emit("in")
    assert outcome(lambda: w.recv(torch.ones(1), src=(w.rank + 1) % 4))["cause"] == "crashed"
    with w.reform():
        group = dist.new_group([0, 1])
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        t = torch.ones(1)
        dist.all_reduce(t, group=group if dist.get_rank() < 2 else mesh.get_group())
        if dist.get_rank() < 2:
            dist.all_reduce(torch.ones(1), group=mesh.get_group())
        seen = {"rank": w.rank, "world": dist.get_world_size(), "mesh": list(mesh.mesh.shape)}
        me.emit("told", **seen, sum=t.item())
    w.barrier()


def test_awaited(cast):
    members = [cast.start(awaiting, number) for number in range(3)]
    for each in members:
        each.expect("in")
    members[0].kill()
    for each in members[1:]:
        assert each.expect("told").data == {"size": 2, "sum": 2.0}


def awaiting(me):
    async def main():
        w = await mw.join_async(
            "w", None, "1:3", store=me.store, seat=f"s{me.rank}", timeout=LONG, last_call=LONG
        )
        me.emit("in")
        with pytest.raises(mw.BrokenWorldException):
            while True:
                await w.aio.all_reduce(torch.ones(1))
        assert await w.reform_async() is w
        t = torch.ones(1)
        await w.aio.all_reduce(t)
        me.emit("told", size=w.world_size, sum=t.item())
        await w.aio.barrier()

    asyncio.run(main())


# -- alone ------------------------------------------------------------------------------------------------------------


def test_wrong_calls():
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        with (
            mw.join("fixed", 0, 1, store=store) as w,
            pytest.raises(mw.InvalidJoinError, match="keeps its size"),
        ):
            w.reform()
        w.close()
        with mw.join("w", None, "1:2", store=store, last_call=0) as w:
            assert (w.rank, w.world_size, len(w.seats)) == (0, 1, 1)
            with pytest.raises(mw.InvalidJoinError, match="is active"):
                w.reform()
        first = w.generation
        w.close()
        assert w.reform() is w
        assert w.generation == first + 1
        w.close()


def test_a_close_that_ends_after_a_reform_leaves_the_new_generation_alone(tmp_path, monkeypatch):
    w = mw.join("w", None, "1:2", store=f"file://{tmp_path}/store", last_call=0)
    waits, go, told = threading.Event(), threading.Event(), []
    monkeypatch.setattr(w._advances._preparing, "stop", lambda _: (waits.set(), go.wait(LONG)))
    closes = threading.Thread(target=w.close)
    unsubscribe = mw.events.subscribe(told.append)
    try:
        closes.start()
        assert waits.wait(LONG)
        first = w._gen
        assert w.reform() is w
        go.set()
        closes.join(LONG)
        w._generation_closed(first)  # the last step of its end may come as late
        assert mw.worlds() == {"w": w}
        (listener,) = registry.watchdog()._sockets.listeners._by_host.values()
        assert listener.holds == 2, "the generation's, and the one that lasts over its breakage"
        with pytest.raises(mw.InvalidJoinError, match="is active"):
            mw.join("w", None, "1:2", store=f"file://{tmp_path}/store", last_call=0)
        closed = [each.generation for each in told if isinstance(each, mw.events.WorldClosed)]
        assert closed == [first.number]
    finally:
        go.set()
        unsubscribe()
        w.close()
    assert mw.worlds() == {}


def test_a_handle_that_is_succeeded_holds_nothing():
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        mw.join("warm", 0, 1, store=store).close()
        assert threads_ended() == []
        first = mw.join("w", None, "1:2", store=store, last_call=0)
        first._gen.verdict(mw.Breakage(mw.Cause.FAILED, (), "a test", time.monotonic()))
        second = mw.join("w", None, "1:2", store=store, last_call=0)
        second._gen.verdict(mw.Breakage(mw.Cause.FAILED, (), "a test", time.monotonic()))
        began = time.monotonic()
        with pytest.raises(mw.StaleGenerationError):
            first.reform(30.0)
        assert time.monotonic() - began < SOON
        second.close()
        assert threads_ended() == []


def test_nothing_is_left_behind():
    with tempfile.TemporaryDirectory() as folder:
        mw.join("warm", 0, 1, store=f"file://{folder}/store").close()
        assert threads_ended() == []
        before = left_over()
        for _ in range(5):
            w = mw.join("w", None, "1:2", store=f"file://{folder}/store", last_call=0)
            w.close()
            w.reform()
            w.close()
        del w
        gc.collect()
        assert threads_ended() == []
        after = left_over()
        assert after["sockets"] <= before["sockets"]
        assert after["fds"] <= before["fds"]
