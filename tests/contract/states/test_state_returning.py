"""A member that was stopped comes back with its old state: it gets the others', and never counts as one that has it."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal

import pytest
import torch
from kits.contract.elastickit import LONG, enter, has_come
from kits.contract.worldkit import SOON, outcome
from kits.meetkit import until

import multiworld as mw
from multiworld._join import join as joining
from multiworld.elastic import ElasticBatchSampler


class Counted:
    """How many steps it has had. Where it is told to, its process dies as the state is sent, or stops to be asked."""

    def __init__(self):
        self.done, self.dies, self.asked = torch.zeros(1), False, lambda: None

    def state_dict(self):
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done.copy_(state["done"])
        self.asked()


def working(me, sampled):
    """Make steps, each with a batch where there is a sampler, as long as the test says; reform after each break."""
    counted, sampler = Counted(), ElasticBatchSampler(1000, 4)
    state = {"counted": counted, "sampler": sampler} if sampled else {"counted": counted}
    w = enter(me, "1:3", state=state)
    sampler.follow(w)
    batches = iter(sampler) if sampled else itertools.repeat(None)
    me.emit("in", seats=w.seats, step=w.step)
    while (said := me.hear(LONG)) != "end":
        if said == "dies":
            counted.dies = True
        elif said == "step":
            if next(batches, None) is None and sampled:  # an epoch is over
                batches = iter(sampler)
                next(batches)
            failed = outcome(lambda: w.all_reduce(torch.ones(1)))["kinds"]
            if not failed:
                counted.done += 1
                with contextlib.suppress(mw.BrokenWorldException):  # the step counts
                    if w.advance() and sampled:
                        batches = iter(sampler)
            me.emit("step", step=w.step, size=w.world_size, failed=failed)
        else:
            until(lambda: w.breakage is not None)
            w.reform(LONG)
            batches = iter(sampler) if sampled else batches
            taken = sampler.state_dict()["taken"] if sampled else 0
            me.emit("in", seats=w.seats, step=w.step, done=int(counted.done), ready=w.ready, taken=taken)


def steps(members, count):
    for _ in range(count):
        for each in members:
            each.say("step")
        assert not any(each.expect("step").failed for each in members)


def away(cast, sampled):
    """Three members make a step; the last is stopped for three more. Returns the others, and it, which comes back."""
    members = [cast.start(working, number, sampled=sampled) for number in range(3)]
    seats, *_ = [each.expect("in").seats for each in members]
    *others, late = [members[int(seat[1:])] for seat in seats]
    steps(members, 1)
    late.stop()
    for each in others:
        each.say("reform")
    assert [each.expect("in").step for each in others] == [1, 1]
    steps(others, 3)
    late.go_on()
    late.say("reform")
    has_come(cast.server, seats[2])
    return others, late


@pytest.mark.parametrize("sampled", [False, True])
def test_it_gets_the_state_that_the_others_have(cast, sampled):
    others, late = away(cast, sampled)
    step = 4
    while True:
        for each in others:
            each.say("step")
        made = [each.expect("step", SOON) for each in others]
        step += 1
        assert [(each.step, each.failed) for each in made] == [(step, [])] * 2
        if made[0].size == 3:  # it was let in
            break
    told = late.expect("in", SOON)
    assert (told.step, told.done, told.ready) == (step, step, True)
    steps([*others, late], 2)


def test_its_old_state_is_not_taken_for_the_latest_when_the_sender_is_lost(cast):
    others, late = away(cast, sampled=False)
    others[0].say("dies")  # as it is asked for its state, when the other one is let in
    while others[0].process.is_alive():
        with contextlib.suppress(OSError):  # it is gone
            others[0].say("step")
        others[1].say("step")
        with contextlib.suppress(
            AssertionError
        ):  # it is gone; else its pipe would be full before the late one is in
            others[0].expect("step")
        others[1].expect("step")
    others[1].say("reform")
    first, second = others[1].expect("in", SOON), late.expect("in", SOON)
    assert first.step == first.done == second.step == second.done >= 4
    assert first.ready
    assert second.ready


def test_its_old_state_is_the_latest_when_all_others_are_lost(cast):
    """Before the first of theirs has come: it goes on from the step at which it was stopped, with its samples."""
    [sender, other], late = away(cast, sampled=True)
    sender.say("dies")
    other.kill()
    sender.say("reform")
    told = late.expect("in", SOON)
    assert (told.step, told.done, told.taken, told.ready) == (1, 1, 4, True)
    steps([late], 2)


def breaks_before_a_state_is_brought():
    """So does the first try of the next join."""
    real = joining.bring_up_to_date

    def once(w, _):
        joining.bring_up_to_date = real
        raise w._gen.fail("the first try", (w.rank,))

    joining.bring_up_to_date = once


def rebuilt(me):
    """Makes three steps; then joins again with the state that it has, or with another that it has built anew."""
    counted = Counted()
    w = enter(me, "2:3", state={"counted": counted})
    for _ in range(3):
        counted.done += 1
        w.advance()
    me.emit("in", rank=w.rank)
    said = me.hear(LONG)
    if said != "same":
        counted = Counted()
        counted.done += 100 + w.rank
    if said == "torn":
        w._torn = True
        breaks_before_a_state_is_brought()
    until(lambda: w.breakage is not None)
    joining.rejoin(w, LONG, state={"counted": counted})  # as join_all does
    me.emit("again", rank=w.rank, done=int(counted.done), step=w.step, ready=w.ready)
    me.hear(LONG)


@pytest.mark.parametrize(("said", "done", "step"), [
    (("anew", "same"), 3, 3),
    (("same", "anew"), 3, 3),
    (("anew", "anew"), 100, 0),
    (("torn", "torn"), 100, 0),
])  # fmt: skip
def test_objects_that_are_given_after_a_breakage_count_as_a_newcomer_s(cast, said, done, step):
    """Where no member has those of before, rank 0's state is taken, as in a first generation; also where those of
    before had a part of a lost one's.
    """
    members = [cast.start(rebuilt, number) for number in range(3)]
    *others, lost = sorted(members, key=lambda each: each.expect("in").rank)
    lost.kill()
    for member, word in zip(others, said, strict=True):
        member.say(word)
    told = [each.expect("again", SOON) for each in others]
    assert [(each.done, each.step, each.ready) for each in told] == [(done, step, True)] * 2


def loading(me, number):
    """The second says that it loads a state, and waits there for the test."""
    counted = Counted()
    counted.done += number
    if me.rank:
        counted.asked = lambda: (me.emit("loads"), me.hear(LONG))
    w = enter(me, "1:2", state=counted, last_call=0.5)
    me.emit("in", size=w.world_size)
    while outcome(lambda: w.all_reduce(torch.ones(1)))["kinds"]:
        w.reform(LONG)
    me.emit("told", done=int(counted.done), size=w.world_size)
    me.hear(LONG)
    while not me.rank:
        w.advance()


def test_a_state_that_has_come_whole_counts_though_the_world_breaks_as_it_is_loaded(cast):
    first = cast.start(loading, 0, number=7)
    first.expect("told")
    second = cast.start(loading, 1, number=9)
    first.say("let it in")
    second.expect("loads")
    first.kill()
    second.say("go on")
    told = second.expect("told", SOON)
    assert (told.done, told.size) == (7, 1)
