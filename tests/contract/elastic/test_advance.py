"""Worlds that change their members while they work: newcomers come in, and members leave, at an advance."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from kits.contract.elastickit import LONG, enter, is_served
from kits.contract.stopkit import POINTS, SAID, stand_still
from kits.contract.worldkit import PATIENCE, SOON, free_port, outcome
from kits.meetkit import until

import multiworld as mw


def working(me, size="1:4", pause=0.001, stop=None, **options):
    """Sums ones at each step, and says what it saw in each generation: every sum must be the world's size."""
    w = enter(me, size, **options)
    if stop is not None:
        stand_still(me, stop)
    work(me, w, pause)


def work(me, w, pause=0.001):
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


def candidate(me, point, size="1:4", **options):
    stand_still(me, point)
    enter(me, size, **options)


def everyone(actors, generation=None):
    """All are in one generation, of themselves, with one step; returns its seats by rank."""
    told = [actor.expect("in") for actor in actors]
    while generation is None and len({each.generation for each in told}) > 1:  # one was in another in between
        last = max(each.generation for each in told)
        told = [
            actor.expect("in") if each.generation < last else each
            for actor, each in zip(actors, told, strict=True)
        ]
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
    members = [cast.start(working, number, size="3:4", last_call=0.2) for number in range(3)]
    seats = everyone(members, 1)
    members.append(cast.start(working, 3, size="3:4"))
    assert everyone(members, 2) == (*seats, "s3")
    reports(members)


def test_a_member_leaves_at_an_advance(cast):
    members = [cast.start(working, number, size="2:3") for number in range(3)]
    seats = everyone(members)
    members[1].say("leave")
    assert not members[1].expect("left").wrong
    rest = [members[0], members[2]]
    assert everyone(rest) == tuple(seat for seat in seats if seat != "s1")
    reports(rest)


def test_a_member_that_asks_to_leave_while_it_prepares_is_heard(cast):
    """The others go on without it, and wait for its limit, which it had no reason to say until then."""
    members = [cast.start(working, number, size="2:4", last_call=0.2) for number in range(2)]
    members.append(cast.start(asks_late, 2, size="2:4", last_call=0.2))
    last = everyone(members)
    newcomer = cast.start(working, 3, size="2:4")
    assert not members[2].expect("left").wrong
    rest = [*members[:2], newcomer]
    assert everyone(rest) == (*(seat for seat in last if seat != "s2"), "s3")
    reports(rest)


def asks_late(me, size, **options):
    from multiworld._join.preparing import Preparing
    from multiworld.world import World

    build, advance, begun = Preparing._build, World.advance, threading.Event()

    def too_late(self, gen, succession):
        Preparing._build = build
        begun.set()
        until(lambda: succession.departing().asked)
        raise mw.JoinAbandonedError("w", "the others have gone on")

    def leaves(self):
        if begun.is_set():
            World.advance = advance
            self.leave()
        return advance(self)

    w = enter(me, size, **options)
    while w.world_size < 3:
        w.all_reduce(torch.ones(1))
        w.all_reduce(torch.tensor([w.step]), torch.distributed.ReduceOp.MAX)
        w.advance()
    Preparing._build, World.advance = too_late, leaves
    work(me, w)


def closes_at_the_entry(me, size):
    """Another thread closes the world while this one has taken the next generation, and is not in it yet."""
    from multiworld.registry import registry

    moved, freed = registry.moved, []
    w = enter(me, size, last_call=0)
    closer = threading.Thread(target=lambda: freed.append(w.close()))

    def closed_meanwhile(*where):
        closer.start()
        until(lambda: w.state is mw.State.CLOSED)
        moved(*where)

    registry.moved = closed_meanwhile
    me.emit("waits")
    advances = outcome(lambda: forever(w.advance))
    closer.join(PATIENCE)
    me.emit("closed", freed=freed, state=w.state, there=mw.worlds(), kinds=advances["kinds"])
    me.hear()


def forever(advance):
    while True:
        advance()
        time.sleep(0.001)


def sees_it_end(me, size):
    w = enter(me, size)
    until(lambda: w.breakage is not None)
    me.emit("broken", cause=w.breakage.cause)


def test_a_world_that_is_closed_while_it_enters_the_next_generation_is_closed(cast):
    closes = cast.start(closes_at_the_entry, 0, size="1:2")
    closes.expect("waits")
    newcomer = cast.start(sees_it_end, 1, size="1:2")
    told = closes.expect("closed")
    assert (told.freed, told.state, told.there) == ([True], mw.State.CLOSED, {})
    assert told.kinds[0] == "WorldClosedError"
    assert newcomer.expect("broken").cause == "left"
    closes.say("end")


def interrupted_at_the_entry(me, size, at):
    """Ctrl-C comes while this member has taken the next generation, and is not in it yet; it closes the world then."""
    from multiworld._join.preparing import Following
    from multiworld.registry import registry
    from multiworld.world import World

    told = []
    mw.subscribe(lambda event: told.append(event.generation) if isinstance(event, mw.WorldClosed) else None)
    w = enter(me, size, last_call=0)
    where = {"take": Following, "moved": registry, "_enter": World}[at]
    function = getattr(where, at)

    def interrupted(*arguments):
        setattr(where, at, function)
        function(*arguments)
        raise KeyboardInterrupt

    setattr(where, at, interrupted)
    me.emit("waits")
    try:
        forever(w.advance)
    except KeyboardInterrupt:
        me.emit("interrupted")
    freed = w.close(PATIENCE)
    until(lambda: not [each.name for each in threading.enumerate() if each.name.startswith("m8d-advance")])
    me.emit("closed", freed=freed, state=w.state, there=mw.worlds(), told=len(told))
    me.hear()


@pytest.mark.parametrize("at", ["take", "moved", "_enter"])
def test_a_member_that_is_interrupted_as_it_enters_the_next_generation_leaves_it(cast, at):
    """Its process goes on: the others would wait for a member that is in no world."""
    closes = cast.start(interrupted_at_the_entry, 0, size="1:2", at=at)
    closes.expect("waits")
    newcomer = cast.start(sees_it_end, 1, size="1:2")
    closes.expect("interrupted")
    assert newcomer.expect("broken", SOON).cause in {"left", "failed"}
    told = closes.expect("closed")
    assert (told.freed, told.state, told.there, told.told) == (True, mw.State.CLOSED, {}, 1)
    closes.say("end")


# -- faults on the way ----


@pytest.mark.parametrize("point", POINTS)
def test_a_candidate_that_dies_is_not_noticed(cast, point):
    members = [cast.start(working, number, size="2:4", last_call=0.2) for number in range(2)]
    seats = everyone(members, 1)
    lost = cast.start(candidate, 7, point=point, size="2:4")
    lost.expect("there")
    lost.kill()
    members.append(cast.start(working, 3, size="2:4"))
    assert everyone(members)[:2] == seats
    reports(members)
    for each in members:
        # At the last point it may be a member already, if the others were ready before it died: a loss as any other.
        entered = point == "ready" and any(seen.name == "in" and "s7" in seen.seats for seen in each.heard)
        assert any(seen.name == "broken" for seen in each.heard) == entered


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("point", [*POINTS, SAID])
def test_a_member_that_is_lost_while_it_prepares_is_left_out(cast, point, how):
    members = [
        cast.start(working, number, size="3:4", last_call=0.2, stop=point if number == 1 else None)
        for number in range(3)
    ]
    everyone(members, 1)
    newcomer = cast.start(working, 3, size="3:4")
    members[1].expect("there")
    getattr(members[1], how)()
    rest = [members[0], members[2], newcomer]
    seen = everyone(rest)
    assert seen[-1] == "s3"
    reports(rest)


def test_a_candidate_that_gives_up_is_not_noticed(cast):
    members = [cast.start(working, number, size="2:4", last_call=0.2) for number in range(2)]
    seats = everyone(members, 1)
    for number in (5, 6):
        assert cast.start(gives_up, number).expect("told").kinds[0] == "BackendError"
    members.append(cast.start(working, 3, size="2:4"))
    assert everyone(members)[:2] == seats
    reports(members)


def gives_up(me):
    from multiworld._c10d import groups
    from multiworld._join import steps

    def never(*_, **_keywords):
        time.sleep(1.0)
        raise mw.BackendError("w", "no room on the device")

    groups.build = steps.groups.build = never
    me.emit("told", **outcome(lambda: enter(me, "2:4", timeout=SOON)))


def test_who_asked_to_leave_leaves_after_a_breakage_too(cast):
    members = [cast.start(asks_to_leave, number) for number in range(3)]
    for each in members:
        each.expect("in")
    members[0].say("leave")
    members[0].expect("asked")
    members[1].kill()
    for each in (members[0], members[2]):
        each.expect("broken")
        each.say("go on")
    members[0].expect("left")
    members[2].say("report")
    assert members[2].expect("told").size == 1


def asks_to_leave(me):
    """Makes no step between its wish and the breakage."""
    w = enter(me, "1:3")
    w.barrier()
    me.emit("in")
    if me.rank == 0:
        me.hear()
        w.leave()
        me.emit("asked")
    until(lambda: w.breakage is not None)
    me.emit("broken")
    me.hear()
    w.reform(LONG)
    while w.world_size > 1:
        w.advance()
        if w.state is mw.State.CLOSED:
            me.emit("left")
            return
        time.sleep(0.01)
    me.hear()
    me.emit("told", size=w.world_size)


# -- state ------------------------------------------------------------------------------------------------------------


class Trained:
    """Weights that grow by one in each step, and the number of the step."""

    def __init__(self, size, seed):
        self.weights = torch.full((size,), float(seed))
        self.done = 0
        self.loaded = 0

    def state_dict(self):
        return {"weights": self.weights, "done": self.done}

    def load_state_dict(self, state):
        self.loaded += 1
        self.weights.copy_(state["weights"])
        self.done = state["done"]

    def step(self, mean):
        self.weights += mean
        self.done += 1


def training(me, size="1:4", bytes_=4096, pause=0.001, until=None, **options):
    """Trains: each step adds the mean of ones. A newcomer must have the weights of the step at which it enters."""
    state = Trained(bytes_ // 4, 1000 * me.rank)
    began = time.monotonic()
    w = enter(me, size, state=state, **options)
    me.emit("joined", took=time.monotonic() - began, ready=w.ready, loaded=state.loaded)
    base, known = None, 0
    while until is None or w.step < until:
        try:
            if known != w.generation:
                first = state.weights[0].item() - state.done
                base = first if base is None else base
                seen = {
                    "base": first,
                    "whole": bool((state.weights == state.weights[0]).all()),
                    "done": state.done,
                }
                me.emit(
                    "in",
                    rank=w.rank,
                    size=w.world_size,
                    seats=w.seats,
                    generation=w.generation,
                    step=w.step,
                    **seen,
                )
                known = w.generation
            word = me.hear() if me._conn.poll(0) else ""
            if word == "leave":
                w.leave()
            t = torch.ones(1)
            w.all_reduce(t)
            time.sleep(pause)
            state.step(t.item() / w.world_size)
            w.advance()
            if w.state is mw.State.CLOSED:
                me.emit("left")
                return
        except mw.BrokenWorldException as broken:  # noqa: PERF203  (it works in the loop until then)
            me.emit("broken", cause=broken.cause, text=str(broken))
            w.reform(LONG)
    me.emit(
        "done",
        weights=(state.weights[0] - state.done).item(),
        whole=bool((state.weights == state.weights[0]).all()),
    )
    w.barrier()


def same_state(actors, generation=None):
    """All are in one generation with the same whole state, that of rank 0 of the first one."""
    told = [actor.expect("in") for actor in actors]
    while generation is not None and any(each.generation < generation for each in told):
        told = [
            actor.expect("in") if each.generation < generation else each
            for actor, each in zip(actors, told, strict=True)
        ]
    assert len({(each.generation, each.seats, each.base, each.done, each.step) for each in told}) == 1, told
    assert all(each.whole for each in told)
    assert sorted(told[0].seats) == sorted(f"s{actor.rank}" for actor in actors)
    return told[0]


def test_all_begin_with_one_state_and_a_newcomer_gets_the_latest(cast):
    members = [cast.start(training, number, size="3:4", last_call=0.2) for number in range(3)]
    first = same_state(members, 1)
    assert first.base == 1000 * int(first.seats[0][1:]), "rank 0's"
    members.append(cast.start(training, 3, size="3:4"))
    joined = members[3].expect("joined")
    assert (joined.ready, joined.loaded) == (True, 1)
    grown = same_state(members, 2)
    assert (grown.base, grown.seats[-1]) == (first.base, "s3")
    assert grown.step > 0
    assert grown.done == grown.step


def test_a_member_that_is_killed_is_replaced_with_the_state(cast):
    members = [cast.start(training, number, size="2:3") for number in range(3)]
    first = same_state(members, 1)
    members[1].kill()
    rest = [members[0], members[2]]
    for each in rest:
        assert each.expect("broken").cause == "crashed"
    shrunk = same_state(rest, 2)
    assert shrunk.base == first.base
    assert shrunk.done == shrunk.step, "a member that was a step behind has the other's"
    again = cast.start(training, 1, size="2:3")
    grown = same_state([*rest, again], 3)
    assert grown.base == first.base


def test_a_step_that_ended_after_the_breakage_counts(cast):
    """Its member has changed its state; one that broke off in the step has not, and gets that state."""
    members = [cast.start(ends_late, number) for number in range(3)]
    seats = [each.expect("in").seats for each in members]
    members[1].kill()
    rest = [members[0], members[2]]
    for each, ends in zip(rest, (False, True), strict=True):
        each.expect("broken")
        each.say(ends)
    told = [each.expect("told") for each in rest]
    assert [each.causes for each in told] == [[], ["crashed", "crashed"]]
    assert {(each.step, each.done, each.size) for each in told} == {(2, 2, 2)}, (seats, told)


def ends_late(me):
    state = Trained(1, 0)
    w = enter(me, "2:3", state=state)
    state.step(1)
    w.advance()
    me.emit("in", seats=w.seats)
    until(lambda: w.breakage is not None)
    me.emit("broken")
    causes = []
    if me.hear():
        state.step(1)
        causes = [outcome(w.advance)["cause"] for _ in range(2)]  # of which one ended a step
    w.reform(LONG)
    me.emit("told", causes=causes, step=w.step, done=state.done, size=w.world_size)
    me.hear()


def test_a_newcomer_without_a_state_in_time_is_told_as_all_who_join(cast):
    """The member that works has let it in, and goes on for longer than its timeout before it advances again."""
    works = cast.start(stands_still_before_it_enters, 0)
    works.expect("in")
    comes = cast.start(comes_in_vain, 1)
    comes.expect("let in")
    told = comes.expect("told")
    assert told.kinds[0] == "JoinTimeoutError"
    assert "did not get its state within 4 s" in told.text
    works.say("go on")
    assert works.expect("told").size == 1


def stands_still_before_it_enters(me):
    """Advances until the next generation is ready, and then no more before it is told to."""
    from multiworld._join.preparing import Preparing

    ready, stands, offer = threading.Event(), threading.Event(), Preparing._offer

    def offers(*args):
        ready.set()
        assert stands.wait(PATIENCE)
        offer(*args)

    Preparing._offer = offers
    w = enter(me, "1:2", state=Trained(1, 0), last_call=0)
    me.emit("in")
    while not ready.wait(0.02):  # as a step takes
        w.advance()
    stands.set()
    me.hear()
    try:
        w.advance()
    except mw.BrokenWorldException:  # it heard of the newcomer's end in the middle of it
        w.reform()
    me.emit("told", size=w.world_size)


def comes_in_vain(me):
    mw.subscribe(lambda event: me.emit("let in") if isinstance(event, mw.WorldActive) else None)
    me.emit("told", **outcome(lambda: enter(me, "1:2", state=Trained(1, 0), timeout=4)))


# -- DDP --------------------------------------------------------------------------------------------------------------


def with_ddp(me, size="1:3", **options):
    """A DDP model that is made once, and trains on while its world grows and shrinks."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(me.rank)
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    w = enter(me, size, state={"model": module, "optimizer": optimizer}, **options)
    model = DistributedDataParallel(module, process_group=w.elastic_group)
    known = 0
    while True:
        try:
            with w:
                if known != w.generation:
                    flat = torch.cat([each.detach().flatten() for each in module.parameters()])
                    momentum = torch.cat(
                        [each["momentum_buffer"].flatten() for each in optimizer.state.values()] or [flat * 0]
                    )
                    all_ = [torch.zeros_like(flat) for _ in range(w.world_size)]
                    w.all_gather(all_, flat)
                    sums = [torch.zeros_like(flat) for _ in range(w.world_size)]
                    w.all_gather(sums, momentum)
                    same = all(torch.equal(each, flat) for each in all_)
                    seen = {"same": same and all(torch.equal(each, momentum) for each in sums)}
                    me.emit(
                        "in", seats=w.seats, generation=w.generation, step=w.step, size=w.world_size, **seen
                    )
                    known = w.generation
                optimizer.zero_grad()
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
            word = me.hear() if me._conn.poll(0) else ""
            if word == "leave":
                w.leave()
            w.advance()
            if w.state is mw.State.CLOSED:
                me.emit("left")
                return
        except mw.BrokenWorldException as broken:  # noqa: PERF203  (it works in the loop until then)
            me.emit("broken", cause=broken.cause, text=str(broken))
            w.reform(LONG)


def test_a_ddp_model_made_once_trains_through_growth_and_departure(cast):
    members = [cast.start(with_ddp, number, size="2:3", last_call=0.2) for number in range(2)]
    assert all(each.expect("in").same for each in members)
    members.append(cast.start(with_ddp, 2, size="2:3"))
    told = [each.expect("in") for each in members]
    assert {(each.size, each.generation, each.same) for each in told} == {(3, 2, True)}
    assert len({each.step for each in told}) == 1
    assert told[0].step > 0
    members[0].say("leave")
    members[0].expect("left")
    told = [each.expect("in") for each in members[1:]]
    assert {(each.size, each.generation, each.same) for each in told} == {(2, 3, True)}
    assert not any(seen.name == "broken" for each in members for seen in each.heard)


# -- a store that goes away meanwhile ----------------------------------------------------------------------------------


def serves(me, where):
    mw.join("other", 0, 1, store=where)
    me.emit("serves")
    me.hear()


def stays_broken(me, where, advances):
    """A member that `advances` looks for newcomers, and serves the store when its server has died."""
    w = enter(me, "2:2", store=where)
    if advances:
        w.advance()
    me.emit("in")
    until(lambda: w.state is mw.State.BROKEN)
    me.emit("broken")
    me.hear()


def test_a_store_served_in_the_place_of_one_that_went_away_ends_when_the_world_broke(cast):
    port = free_port()
    where = f"tcp://127.0.0.1:{port}"
    server = cast.start(serves, 0, where=where)
    server.expect("serves")
    stays, other = (cast.start(stays_broken, number, where=where, advances=not number) for number in (0, 1))
    for each in (stays, other):
        each.expect("in")
    server.kill()
    server.finish()
    until(lambda: is_served(port))
    other.kill()
    stays.expect("broken")
    until(lambda: not is_served(port))
