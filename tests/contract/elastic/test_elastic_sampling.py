"""Real members learn from each sample once in an epoch, through kills, newcomers and departures; with DataLoaders."""

from __future__ import annotations

import multiprocessing
import time

import torch
from kits.contract.worldkit import HANG, PATIENCE
from kits.meetkit import until
from torch.utils.data import DataLoader

import multiworld as mw
from multiworld._net.stores.record import WorldRecord
from multiworld.elastic import ElasticBatchSampler

LONG = 10 * PATIENCE
LENGTH, BATCH = 103, 8
A_BREAK = 5
"""The step before which each member asks the test what to do."""


class Learned:
    """What a model would be: how often it has learned from each sample, by epoch."""

    def __init__(self):
        self.times = torch.zeros(0, LENGTH)

    def add(self, epoch, taken):
        if epoch == len(self.times):
            self.times = torch.cat([self.times, torch.zeros(1, LENGTH)])
        self.times[epoch] += taken

    def state_dict(self):
        return {"times": self.times}

    def load_state_dict(self, state):
        self.times = state["times"].clone()


def trains(me):
    # A daemonic process, as the kit's are, may have no children. Workers end themselves when it is gone.
    multiprocessing.current_process()._config["daemon"] = False
    learned, sampler = Learned(), ElasticBatchSampler(LENGTH, BATCH, seed=1)
    w = mw.join(
        "w", None, "2:3", seat=f"s{me.rank}", store=me.store, timeout=LONG, hang_timeout=HANG, last_call=LONG,
        state={"learned": learned, "sampler": sampler},
    )  # fmt: skip
    sampler.follow(w)
    loader = DataLoader(
        torch.arange(LENGTH),
        batch_sampler=sampler,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context="fork",  # a server of this process would load torch anew
    )
    me.emit("in", step=w.step, seats=w.seats)
    stop = False
    while not stop and w.state is not mw.State.CLOSED:
        try:
            for batch in loader:
                if w.step == A_BREAK:
                    me.emit("at", step=w.step)
                    me.hear()
                stop = step(me, w, learned, sampler.epoch, batch)
                changed = w.advance()
                if changed and w.state is not mw.State.CLOSED:
                    me.emit("in", step=w.step, seats=w.seats)
                if changed or stop:
                    break
        except mw.BrokenWorldException:
            w.reform(LONG)
            me.emit("in", step=w.step, seats=w.seats)
    if w.state is not mw.State.CLOSED:
        w.barrier()
    me.emit("done", times=learned.times.tolist(), step=w.step)
    me.hear()


def step(me, w, learned, epoch, batch):
    """One step; returns whether the test has told a member to stop after it."""
    word = me.hear() if me._conn.poll(0) else ""
    if word == "leave":
        w.leave()
    taken = torch.zeros(LENGTH).index_add(0, batch, torch.ones(len(batch)))
    stop = torch.tensor([float(word == "stop")])
    w.all_reduce(taken)
    w.all_reduce(stop)
    learned.add(epoch, taken)
    return bool(stop)


def start(cast, number):
    """Start a newcomer; return when it waits to be let in."""
    record = WorldRecord(cast.server, "w", time.sleep)

    def waits():
        record.read()
        waiting = record.ledger.waiting
        return waiting is not None and f"s{number}" in {claim.slot for claim in waiting.claims}

    found = cast.start(trains, number)
    until(waits)
    return found


def until_in(members):
    """All are in one generation of theirs; returns the step at which they are."""
    wanted = {f"s{each.rank}" for each in members}
    told = [each.expect("in") for each in members]
    while any(set(each.seats) != wanted for each in told):
        told = [
            seen if set(seen.seats) == wanted else each.expect("in")
            for each, seen in zip(members, told, strict=True)
        ]
    (at,) = {each.step for each in told}
    return at


def test_every_sample_is_learned_from_once(cast):
    members = [cast.start(trains, number) for number in range(3)]
    until_in(members)
    newcomer = start(cast, 3)
    for each in members:
        assert each.expect("at").step == A_BREAK
    members[0].kill()
    members = [*members[1:], newcomer]
    for each in members[:2]:
        each.say("go")
    assert until_in(members) == A_BREAK
    for each in members:
        assert each.expect("at").step == A_BREAK, "the step is made again"
        each.say("go")
    newcomer = start(cast, 4)
    members[0].say("leave")
    members[0].expect("done")
    members = [*members[1:], newcomer]
    at = until_in(members)
    members[0].say("stop")
    first, *others = [each.expect("done") for each in members]
    assert all((each.times, each.step) == (first.times, first.step) for each in others)
    times = torch.tensor(first.times)
    assert first.step > at > A_BREAK
    whole, steps = divmod(first.step, -(-LENGTH // BATCH))
    # An epoch's last step is filled up with one sample.
    assert bool((times[:whole].sum(1) == LENGTH + 1).all())
    assert bool((times[:whole] >= 1).all())
    assert times[whole:].sum() == steps * BATCH
    assert bool((times[whole:] <= 1).all())
