"""Worlds that change their members while they work: newcomers come in, and members leave, at an advance."""

from __future__ import annotations

import time

import torch
from worldkit import HANG, PATIENCE, SOON

import multiworld as mw

LONG = 10 * PATIENCE


def enter(me, size, **options):
    given = {
        "seat": f"s{me.rank}",
        "store": me.store,
        "timeout": LONG,
        "hang_timeout": HANG,
        "last_call": LONG,
    }
    return mw.join("w", None, size, **(given | options))


def working(me, size="1:4", pause=0.001, **options):
    """Sums ones at each step, and says what it saw in each generation: every sum must be the world's size."""
    w = enter(me, size, **options)
    known, wrong, longest = 0, 0, 0.0
    while True:
        if known != w.generation:
            me.emit("in", rank=w.rank, size=w.world_size, seats=w.seats, generation=w.generation, step=w.step)
            known = w.generation
        word = me.hear() if me._conn.poll(0) else ""
        if word == "leave":
            w.leave()
        if word == "report":
            me.emit("report", wrong=wrong, longest=longest, step=w.step)
        try:
            t = torch.ones(1)
            w.all_reduce(t)
            wrong += t.item() != w.world_size
            at = torch.tensor([w.step])
            w.all_reduce(at, torch.distributed.ReduceOp.MAX)
            wrong += at.item() != w.step
            time.sleep(pause)
            began = time.monotonic()
            changed = w.advance()
            longest = max(longest, time.monotonic() - began)
            if changed and w.state is mw.State.CLOSED:
                me.emit("left", wrong=wrong, longest=longest)
                return
        except mw.BrokenWorldException as broken:
            me.emit("broken", cause=broken.cause, text=str(broken))
            w.reform(LONG)


def everyone(actors, generation=None):
    told = [actor.expect("in") for actor in actors]
    assert {each.seats for each in told} == {told[0].seats}, told
    assert sorted(told[0].seats) == sorted(f"s{actor.rank}" for actor in actors)
    assert len({each.step for each in told}) == 1, told
    if generation is not None:
        assert {each.generation for each in told} == {generation}
    return told[0].seats


def reports(actors):
    for each in actors:
        each.say("report")
    told = [each.expect("report") for each in actors]
    assert not any(each.wrong for each in told), told
    return max(each.longest for each in told)


def test_a_newcomer_comes_in_at_an_advance(cast):
    members = [cast.start(working, number, last_call=0.2) for number in range(3)]
    seats = everyone(members, 1)
    members.append(cast.start(working, 3))
    assert everyone(members, 2) == (*seats, "s3")
    print("longest", reports(members), time.monotonic())


def test_a_member_leaves_at_an_advance(cast):
    members = [cast.start(working, number, last_call=0.2) for number in range(3)]
    seats = everyone(members, 1)
    members[1].say("leave")
    assert not members[1].expect("left").wrong
    rest = [members[0], members[2]]
    assert everyone(rest, 2) == tuple(seat for seat in seats if seat != "s1")
    print("longest", reports(rest))
