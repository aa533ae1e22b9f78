"""FSDP2 models trained by members that are killed and come: from replicas of shards, and from checkpoints."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from kits.contract.battery.features_parallel import find
from kits.contract.worldkit import HANG, PATIENCE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import multiworld as mw
from multiworld.elastic import reshard

LONG = 10 * PATIENCE
BATCH = 12
SAVE_EVERY = 5
A_BREAK, ANOTHER = 3, 7
"""The steps at which members ask the test what to do, in the first and in the second generation."""

# -- program ----------------------------------------------------------------------------------------------------------


class Losses:
    """Of each step: the part of the state that is not sharded."""

    def __init__(self):
        self.each, self.generation = [], 0

    def state_dict(self):
        return {"each": self.each, "generation": self.generation}

    def load_state_dict(self, state):
        self.each, self.generation = list(state["each"]), state["generation"]


def net_of():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 11), nn.Tanh(), nn.Linear(11, 7), nn.Tanh(), nn.Linear(7, 1))


def optimizer_of(net):
    return torch.optim.AdamW(net.parameters(), lr=0.02)


def loss_of(net, step, rank=0, members=1):
    x = torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(step))
    mine = x[BATCH * rank // members : BATCH * (rank + 1) // members]
    return (net(mine) - mine.sum(1, keepdim=True)).square().sum() / BATCH


def sharded(size):
    """Model and optimizer on a mesh of `size` members: 2 x 2 of four, else one replica of as many shards."""
    fully_shard = find("fully_shard", "torch.distributed.fsdp", "torch.distributed._composable.fsdp")
    shape = (2, 2) if size == 4 else (1, size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    net = net_of()
    for layer in net[::2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, optimizer_of(net)


def state_of(net, optimizer):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    return dict(zip(("net", "optimizer"), get_state_dict(net, optimizer), strict=True))


def load_state(net, optimizer, state, step):
    from torch.distributed.checkpoint.state_dict import set_state_dict

    if not step:
        optimizer.state.clear()  # get_state_dict has made it as of one step
        return
    set_state_dict(net, optimizer, model_state_dict=state["net"], optim_state_dict=state["optimizer"])


def trains(me, folder, stops=None):
    import torch.distributed.checkpoint as dcp

    losses, folder = Losses(), Path(folder)
    w = mw.join(
        "w", None, "2:4", seat=f"s{me.rank}", store=me.store, timeout=LONG, hang_timeout=HANG, last_call=LONG,
        state=losses,
    )  # fmt: skip
    net = optimizer = None
    generation = ended = made = stop = 0  # made: steps of `net`; the losses may be another member's
    stops = {1: A_BREAK, 2: ANOTHER} if stops is None else stops
    while not stop:
        try:
            if generation != w.generation:
                if net is not None and w.step > ended:
                    net = caught_up(me, net, optimizer, away=losses.generation != generation)
                    made += 1
                old = None if net is None else state_of(net, optimizer)
                with w:
                    model = sharded(w.world_size)
                    new = state_of(*model)
                    missing = reshard(w, old, new, made)
                    at = restored(w, dcp, folder, new) if missing else len(losses.each)
                    losses.each = losses.each[:at]
                    load_state(*model, new, at)
                (net, optimizer), generation, ended, made = model, w.generation, w.step, at
                me.emit("in", step=at, seats=w.seats, missing=missing)
            step, word = len(losses.each), ""
            if stops.get(generation) == step:
                me.emit("at", step=step)
                word = me.hear()
            elif me._conn.poll(0):
                word = me.hear()
            with w:
                optimizer.zero_grad()
                loss = loss_of(net, step, w.rank, w.world_size)
                (loss * w.world_size).backward()
                vote = torch.tensor([loss.item(), float(word == "stop")])
                dist.all_reduce(vote)  # all have their gradients
                interrupted(me, w, word)
            optimizer.step()
            made += 1
            losses.each.append(vote[0].item())
            losses.generation = generation
            stop = vote[1].item()
            ended += 1
            changed = advanced(me, w, word)
            if not changed and not stop and len(losses.each) % SAVE_EVERY == 0:
                with w:
                    dcp.save(state_of(net, optimizer), checkpoint_id=folder / f"{len(losses.each)}")
        except mw.BrokenWorldException:  # noqa: PERF203  (it trains in the loop until then)
            w.reform(LONG)
    me.emit("done", losses=losses.each)
    w.barrier()


def caught_up(me, net, optimizer, *, away):
    me.emit("away" if away else "late")
    if away:  # the others made steps without this member
        return None
    optimizer.step()  # they had made the step of these gradients
    return net


def advanced(me, w, word):
    changed = w.advance()
    if word == "go":
        me.emit("made")
    return changed


def interrupted(me, w, word):
    if word == "die":
        me.hear()  # not before those that go on have all gradients, and have made their step
        os.kill(os.getpid(), signal.SIGKILL)
    while word == "late":  # until another is lost
        w.barrier()


def restored(w, dcp, folder, state):
    """Read the last checkpoint that is whole; returns its step, 0 without one."""
    found = [int(each.parent.name) for each in folder.glob("*/.metadata")]
    at = torch.tensor([max(found, default=0)])
    w.broadcast(at, 0)
    if at:
        dcp.load(state, checkpoint_id=folder / f"{int(at)}")
    return int(at)


def of_another_step(me, size):
    w = mw.join("w", None, size, seat=f"s{me.rank}", store=me.store, timeout=LONG, last_call=LONG)
    want, have = {"t": torch.zeros(3)}, {"t": torch.full((3,), float(w.rank))}
    me.emit("told", missing=[
        reshard(w, have, want, 7 + w.rank), reshard(w, None if w.rank else have, want, 7 + w.rank)
    ], values=want["t"].tolist())  # fmt: skip
    w.barrier()


# -- tests ------------------------------------------------------------------------------------------------------------


def by_hand(steps):
    net = net_of()
    optimizer, found = optimizer_of(net), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(net, step)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def entered(members):
    told = [each.expect("in") for each in members]
    assert len({(each.seats, each.step, tuple(each.missing)) for each in told}) == 1, told
    return told[0]


def say(members, *words):
    for each, word in zip(members, words, strict=True):
        each.expect("at")
        each.say(word)
    for each, word in zip(members, words, strict=True):
        if word == "go":
            each.expect("made")
    for each, word in zip(members, words, strict=True):
        if word == "die":
            each.say("now")


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7), reason="FSDP2 of this torch needs a GPU"
)
def test_shards_come_from_a_replica_or_from_a_checkpoint(cast, tmp_path):
    members = [cast.start(trains, number, folder=str(tmp_path)) for number in range(4)]
    assert entered(members).step == 0

    say(members, "die", "late", "go", "go")
    members = members[1:]
    shrunk = entered(members)
    assert members[0].heard[-2].name == "late"
    assert (shrunk.step, shrunk.missing) == (A_BREAK + 1, []), "nothing was lost: the replica has it"

    say(members, "die", "go", "go")
    members = members[1:]
    again = entered(members)
    assert again.step == SAVE_EVERY, "from the checkpoint"
    assert "net.0.weight" in again.missing
    assert any(name.endswith("exp_avg") for name in again.missing)

    newcomer = cast.start(trains, 5, folder=str(tmp_path))
    members.append(newcomer)
    grown = entered(members)
    assert (len(grown.seats), grown.missing) == (3, [])

    members[0].say("stop")
    first, *others = [each.expect("done").losses for each in members]
    assert all(each == first for each in others)
    assert len(first) > grown.step > SAVE_EVERY
    torch.testing.assert_close(torch.tensor(first), torch.tensor(by_hand(len(first))), rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7), reason="FSDP2 of this torch needs a GPU"
)
def test_shards_of_a_member_that_was_away_are_not_taken(cast, tmp_path):
    members = [cast.start(trains, number, folder=str(tmp_path)) for number in range(4)]
    entered(members)
    stopped = members[-1]
    for each in members:
        each.expect("at")
    stopped.stop()
    for each in members[:3]:
        each.say("go")  # into a step that breaks
    shrunk = entered(members[:3])
    assert (shrunk.step, len(shrunk.seats)) == (A_BREAK, 3), "the other replica has its shard"
    say(members[:3], "go", "go", "go")  # and steps are made without it
    stopped.go_on()
    stopped.say("go")
    assert stopped.expect("away")
    back = entered(members)
    assert (len(back.seats), back.missing) == (4, [])
    assert back.step > ANOTHER

    members[0].say("stop")
    first, *others = [each.expect("done").losses for each in members]
    assert all(each == first for each in others)
    assert len(first) > back.step
    torch.testing.assert_close(torch.tensor(first), torch.tensor(by_hand(len(first))), rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7), reason="FSDP2 of this torch needs a GPU"
)
def test_shards_are_of_the_step_that_their_member_made(cast, tmp_path):
    """The others went back to the beginning, and all but one were lost there: its steps are fewer than those of the shards."""
    program = {"folder": str(tmp_path), "stops": {1: A_BREAK, 2: 0}}
    members = {f"s{number}": cast.start(trains, number, **program) for number in range(4)}
    seats = entered([*members.values()]).seats
    for each in members.values():
        each.expect("at")
    stopped = members[seats[3]]
    stopped.stop()
    members[seats[1]].kill()  # the replica of its shard
    others = [members[seats[0]], members[seats[2]]]
    for each in others:
        each.say("go")
    again = entered(others)
    assert (again.step, "net.0.weight" in again.missing) == (0, True)
    for each in others:
        each.expect("at")
    others[1].kill()
    stopped.go_on()
    left = [others[0], stopped]
    for each in left:
        each.say("go")
    assert entered(left).step == 0
    left[0].say("stop")
    first, second = [each.expect("done").losses for each in left]
    assert first == second
    torch.testing.assert_close(torch.tensor(first), torch.tensor(by_hand(len(first))), rtol=1e-3, atol=1e-4)


def test_states_of_different_steps_do_not_fit_together(cast):
    members = cast.all(of_another_step, 2)
    for each in members:
        told = each.expect("told")
        assert told.missing == [["t"], []]
        assert told.values == [0.0, 0.0, 0.0]
