"""Whose an error is: a world breaks for its own members' faults, in whatever block the error passes."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from kits.contract.worldkit import PATIENCE, SOON, outcome
from torch._utils import ExceptionWrapper
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import multiworld as mw
from multiworld.events import Breakage, Cause

LONG = 10 * PATIENCE
"""Seconds, of each operation and join: what ends before was ended by the fault."""


def join(me, name, rank, size=2, timeout=LONG):
    return mw.join(name, rank, size, store=me.store, timeout=timeout)


def over_gloo():
    """A tensor that the lane does not carry."""
    return torch.eye(2).to_sparse()


def model(group=None):
    return DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)


def loss(net):
    return net(torch.ones(1, 2)).sum()


def tell(me, call, *worlds):
    """Tell the test what became of `call`, and of these worlds."""
    seen = outcome(call)
    for w in worlds:
        seen[w.name] = outcome(lambda w=w: w.all_reduce(torch.ones(1)))["text"]
    me.emit("told", **seen)


def stays(me, w):
    """A member of `w` to which nothing happens."""
    me.hear()
    tell(me, lambda: None, w)
    me.hear()  # the others are done


def dies(me, meet):
    meet()
    me.emit("up")
    me.hear()


# -- faults of others -----------------------------------------------------------------------------------------------


def two_worlds(me, kind, position):
    """Position 0 is in both worlds, 1 in "here", 2 in "there", and dies."""
    here = join(me, "here", position) if position < 2 else None
    there = join(me, "there", position // 2) if position != 1 else None
    if position == 2:
        net = model(there.group)
        dies(me, lambda: loss(net))
        return
    if position == 1:
        stays(me, here)
        return
    with there:
        net = model()
        scalar = loss(net)
        # Posted before the fault: else the world may be known to be broken, and refuse.
        work = dist.all_reduce(over_gloo(), async_op=True)
        tensor = funcol.all_reduce(torch.ones(1), "sum", there.group)

    def waits():
        with here:
            work.wait()

    def again():
        with pytest.raises(mw.BrokenWorldException), here:
            work.wait()
        work.wait()

    def functional():
        with here:
            funcol.wait_tensor(tensor)

    def backward():
        with here:
            scalar.backward()

    calls = {"wait": waits, "again": again, "functional": functional, "backward": backward}
    me.emit("up")
    me.hear()
    tell(me, calls[kind], here)
    me.hear()


def faulty(cast, program, **arguments):
    """Start three members, kill the last when it is up, and return what the first two tell."""
    actors = [cast.start(program, each, position=each, **arguments) for each in range(3)]
    actors[2].expect("up")
    actors[0].expect("up")
    actors[2].kill()
    for each in actors[:2]:
        each.say("go on")
    seen = [each.expect("told") for each in actors[:2]]
    for each in actors[:2]:
        each.say("end")
        assert each.finish() == 0
    return seen


@pytest.mark.parametrize("kind", ["wait", "again", "functional", "backward"])
def test_a_fault_of_one_world_does_not_break_another_that_is_selected(cast, kind):
    first, second = faulty(cast, two_worlds, kind=kind)
    assert first.here == second.here == ""
    if kind != "backward":
        assert "BrokenWorldException" in first.kinds
        assert first.text.startswith("there broke")
    else:
        assert "RuntimeError" in first.kinds
        assert "BrokenWorldException" not in first.kinds


def own_group(me, kind, position):
    """0 and 2 have a default group of their own, 0 and 1 are in "here"."""
    if position != 1:
        host, port = me.store.removeprefix("tcp://").split(":")
        store = dist.PrefixStore("own", dist.TCPStore(host, int(port)))
        dist.init_process_group(
            "gloo", store=store, rank=position // 2, world_size=2, timeout=dt.timedelta(seconds=LONG)
        )
        net = model()
        scalar = loss(net)
    if position == 2:
        dies(me, lambda: None)
        return
    here = join(me, "here", position)
    if kind == "backward after another model's":
        other = model(here.elastic_group)
        loss(other).backward()
    if position == 1:
        stays(me, here)
        return
    own = dist.group.WORLD

    def collective():
        with here:
            dist.all_reduce(torch.ones(1), group=own)

    def batch():
        with here:
            for each in dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.ones(1), 1, own)]):
                each.wait()

    calls = {"collective": collective, "batch": batch, "backward after another model's": scalar.backward}
    me.emit("up")
    me.hear()
    tell(me, calls[kind], here)
    me.hear()


@pytest.mark.parametrize("kind", ["collective", "batch", "backward after another model's"])
def test_a_fault_of_torchs_own_group_does_not_break_a_world(cast, kind):
    first, second = faulty(cast, own_group, kind=kind)
    assert "RuntimeError" in first.kinds
    assert "BrokenWorldException" not in first.kinds
    assert first.here == second.here == ""


class S3TimeoutError(Exception):
    """One that a data loader's worker cannot hand over as it is."""

    def __init__(self, *, endpoint):
        super().__init__(f"Connect timeout on endpoint URL: {endpoint}")


def not_of_a_group(me, size):
    w = join(me, "w", 0, size)
    w.group  # noqa: B018  (gloo's)
    own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def wait(*_):
        own.wait(["never"], dt.timedelta(milliseconds=50))

    def load():
        try:
            raise S3TimeoutError(endpoint="e")  # noqa: TRY301  (as a worker does)
        except S3TimeoutError:
            caught = ExceptionWrapper(where="in DataLoader worker process 0")
        caught.reraise()

    def remote():
        future = torch.futures.Future()
        future.set_exception(RuntimeError("RPC ran for more than set timeout (500 ms)"))
        future.wait()

    def backward():
        weight = torch.ones(1, requires_grad=True)
        weight.register_hook(wait)
        weight.sum().backward()

    calls = [wait, load, remote, backward]
    for over in (False, True):
        if over:
            w._gen.verdict(Breakage(Cause.FAILED, (), "a test says so", time.monotonic()))
        for call in calls:
            with pytest.raises(RuntimeError, match=r"(?i)timeout|timed out") as caught, w:
                call()
            assert not isinstance(caught.value, mw.MultiworldError), (call.__name__, over)
            assert (w.state is mw.State.BROKEN) == over, call.__name__
    w.close()


def test_timeouts_that_are_no_groups_neither_break_a_world_nor_are_hidden(cast):
    (actor,) = cast.all(not_of_a_group, 1)
    actor.expect("end")


def local(me, size, ends):
    w = join(me, "w", 0, size)
    net = model(w.elastic_group)
    loss(net).backward()
    other = torch.ones(1, requires_grad=True)
    product = (other * other).sum()
    product.backward()
    if ends == "closed":
        w.close()
    else:
        w._gen.verdict(Breakage(Cause.FAILED, (), "a test says so", time.monotonic()))
    calls = {
        "second time": product.backward,
        "shapes cannot be multiplied": lambda: torch.ones(2, 3) @ torch.ones(2, 3),
        "nonexistent": lambda: torch.save(torch.ones(1), "/nonexistent/file.pt"),
    }
    with pytest.raises(RuntimeError, match="second time"):
        product.backward()  # outside of all blocks
    for text, call in calls.items():
        with pytest.raises(RuntimeError, match=text), w:
            call()


@pytest.mark.parametrize("ends", ["broken", "closed"])
def test_errors_of_no_operation_stay_when_a_world_is_over(cast, ends):
    (actor,) = cast.all(local, 1, ends=ends)
    actor.expect("end")


# -- faults of its own ----------------------------------------------------------------------------------------------


def lost_in_one_of_two(me, kind, position):
    """Position 0 is in both worlds, 1 in "there", 2 in "here", and dies."""
    there = join(me, "there", position) if position < 2 else None
    here = join(me, "here", position // 2) if position != 1 else None
    if position == 1:
        stays(me, there)
        return
    net = model(here.group)
    scalar = loss(net)
    if position == 2:
        dies(me, lambda: None)
        return
    there.group  # noqa: B018  (gloo's)
    with here:
        work = dist.all_reduce(over_gloo(), async_op=True)
        tensor = funcol.all_reduce(torch.ones(1), "sum", here.group)

    def backward():
        with here:
            scalar.backward()

    def functional():
        with here:
            funcol.wait_tensor(tensor)

    def future():
        with here:
            with pytest.raises(RuntimeError) as raw:
                work.get_future().wait()
            assert not isinstance(raw.value, mw.MultiworldError)  # yet
            raise raw.value

    def outside():
        with there:
            work.wait()

    calls = {"backward": backward, "functional": functional, "end of the block": future, "outside": outside}
    me.emit("up")
    me.hear()
    tell(me, calls[kind], there)
    me.hear()


@pytest.mark.parametrize("kind", ["backward", "functional", "end of the block", "outside"])
def test_what_a_lost_member_leads_to_is_its_worlds_beside_another_one(cast, kind):
    first, second = faulty(cast, lost_in_one_of_two, kind=kind)
    assert "BrokenWorldException" in first.kinds, first.text
    assert first.text.startswith("here broke")
    assert (first.cause, first.ranks) == ("crashed", (1,))
    assert first.there == second.there == ""


def hooked(me, kind, position):
    """Position 0 is in both worlds, 1 in "here", 2 in "there", and dies while 0 waits in a hook."""
    here = join(me, "here", position) if position < 2 else None
    there = join(me, "there", position // 2) if position != 1 else None
    if position == 1:
        stays(me, here)
        return
    net = model(there.group)
    if position == 2:
        dies(me, lambda: None)
        return

    def hook(group, bucket):
        future = allreduce_hook(group, bucket)
        me.emit("up")
        return future

    net.register_comm_hook(there.group, hook)
    scalar = loss(net)

    def backward():
        with {"inside": there, "inside another": here, "outside": contextlib.nullcontext()}[kind]:
            scalar.backward()

    tell(me, backward, here)
    me.hear()
    me.hear()


@pytest.mark.parametrize("kind", ["inside", "inside another", "outside"])
def test_what_a_lost_member_leads_to_in_a_communication_hook_is_its_worlds(cast, kind):
    first, second = faulty(cast, hooked, kind=kind)
    assert "BrokenWorldException" in first.kinds, first.text
    assert first.text.startswith("there broke")
    assert (first.cause, first.ranks) == ("crashed", (1,))
    assert first.here == second.here == ""


def awaited_in_vain(me, size):
    w = join(me, "w", me.rank, size, timeout=SOON / 5 if me.rank == 0 else LONG)
    net = model(w.group)
    scalar = loss(net)
    if me.rank == 0:
        with w:
            me.emit("told", **outcome(scalar.backward))
    me.hear()


def test_a_backward_pass_that_takes_too_long_breaks_the_only_world(cast):
    first, second = cast.all(awaited_in_vain, 2)
    seen = first.expect("told")
    assert seen.cause == "failed"
    for each in (first, second):
        each.say("end")
        assert each.finish() == 0


def both_in(cast, program, **arguments):
    """Two members of a world, once both are in it; the second one waits."""
    members = cast.all(program, 2, **arguments)
    for each in members:
        each.expect("in")
    return members


def making_a_model(me, size):
    w = join(me, "w", me.rank, size)
    with w:
        dist.all_reduce(over_gloo())
        me.emit("in")
        if me.rank == 1:
            me.hear()
        me.emit("told", **outcome(model))  # inside of the block, whose end would tell it, too
    me.hear()


def test_a_member_that_is_lost_while_a_model_is_made_is_told(cast):
    first, second = both_in(cast, making_a_model)
    second.kill()
    assert first.expect("told", SOON).cause == "crashed"


def divides_by_who_is_left(me, size):
    w = join(me, "w", me.rank, size)
    with w:
        net = model()
        with net.join(divide_by_initial_world_size=False):
            if me.rank == 1:
                me.emit("in")
                me.hear()
            scalar = loss(net)  # asks how many still have inputs, which the backward pass divides by
            me.emit("in")
            me.emit("told", **outcome(scalar.backward))
            me.hear()


def test_a_member_that_is_lost_before_it_tells_that_it_has_inputs(cast):
    first, second = both_in(cast, divides_by_who_is_left)
    second.kill()
    seen = first.expect("told", SOON)
    assert (seen.kinds[0], seen.cause, seen.ranks) == ("BrokenWorldException", "crashed", (1,))


def coalesces(me, size):
    w = join(me, "w", me.rank, size)
    group = w.group
    me.emit("in")
    if me.rank == 1:
        me.hear()

    def call():
        with dist._coalescing_manager(group):
            dist.all_reduce(torch.ones(1), group=group)

    me.emit("told", **outcome(call), again=outcome(call)["kinds"][:1])
    me.hear()


def test_a_member_that_is_lost_in_coalesced_collectives_is_told(cast):
    first, second = both_in(cast, coalesces)
    second.kill()
    seen = first.expect("told", SOON)
    assert (seen.kinds[0], seen.cause, seen.ranks) == ("BrokenWorldException", "crashed", (1,))
    assert seen.again == ["BrokenWorldException"]


def makes_groups(me, size, lane):
    os.environ["M8D_LANE"] = lane
    w = join(me, "w", me.rank, size)
    with w:
        dist.all_reduce(over_gloo())
        me.emit("in")
        if me.rank == 1:
            me.hear()
        me.emit("told", **outcome(dist.new_group), again=outcome(lambda: dist.new_subgroups(2)))
    me.hear()


@pytest.mark.parametrize("lane", ["1", "0"])
def test_a_member_that_is_lost_while_a_group_is_made_is_told(cast, lane):
    first, second = both_in(cast, makes_groups, lane=lane)
    second.kill()
    told = first.expect("told", SOON)
    assert (told.kinds[0], told.cause, told.ranks) == ("BrokenWorldException", "crashed", (1,))
    assert told.again["kinds"][0] == "BrokenWorldException"


def monitored(me, size, lost):
    w = join(me, "w", me.rank, size)
    with w:
        dist.all_reduce(over_gloo())
        me.emit("in")
        if me.rank == 1:
            me.hear()
        patience = dt.timedelta(seconds=LONG if lost else 0.2)
        seen = outcome(lambda: dist.monitored_barrier(timeout=patience))
    me.emit("told", **seen, state=w.state.name)
    me.hear()


@pytest.mark.parametrize("lost", [True, False])
def test_a_monitored_barrier_tells_a_lost_member_from_a_late_one(cast, lost):
    first, second = both_in(cast, monitored, lost=lost)
    if lost:
        second.kill()
    told = first.expect("told", SOON)
    wanted = ("BrokenWorldException", "BROKEN") if lost else ("RuntimeError", "ACTIVE")
    assert (told.kinds[0], told.state) == wanted, told


def late_outside(me, size):
    w = join(me, "w", me.rank, size, timeout=SOON / 3)
    group = w.group
    me.emit("in")
    if me.rank == 1:
        me.hear()
    me.emit("told", **outcome(lambda: dist.monitored_barrier(group)), state=w.state.name)
    me.hear()


def test_a_monitored_barrier_outside_of_the_block_has_the_worlds_timeout(cast):
    first, _ = both_in(cast, late_outside)
    told = first.expect("told", SOON)
    assert (told.kinds[0], told.state) == ("RuntimeError", "ACTIVE"), told
    assert f"{SOON / 3 * 1000:g}ms" in told.text.replace(" ", ""), told.text
