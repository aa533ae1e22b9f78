"""Tensors that wrap others, modes and the profiler: messages mean what they mean with torch alone, on both sides.

A wrapper's operation is torch's own until the dispatcher has unwrapped it. If its message then went through gloo, the
other member, whose tensor is plain, would wait for it at the lane until the timeout.
"""

from __future__ import annotations

import contextlib
import os

import pytest
import torch
import torch.distributed as dist
from kits.contract.waykit import RECEIVES, SENDS, world
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

SENT = torch.arange(6.0).reshape(2, 3)


def room():
    return torch.zeros(2, 3)


class PassOn(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


# -- ways to wrap: (message, tensor) -> the plain tensor after `message` was called with a wrapper of it --------------


def plain(message, tensor):
    message(tensor)
    return tensor


def collective(message, tensor):
    message(AsyncCollectiveTensor(tensor))
    return tensor


def pair(message, tensor):
    message(TwoTensor(tensor, tensor.clone()))
    return tensor


def grad(message, tensor):
    def loss(x):
        message(x)
        return x.sum()

    assert torch.equal(torch.func.grad(loss)(tensor), torch.ones(2, 3))
    return tensor


def twice_grad(message, tensor):
    return grad(lambda x: grad(message, x), tensor)


def functionalized(message, tensor):
    torch.func.functionalize(lambda x: (message(x), x + 1)[1])(tensor)
    return tensor


def in_a_mode(message, tensor):
    with PassOn():
        return plain(message, tensor)


def wrapped_in_a_mode(message, tensor):
    with PassOn():
        return collective(message, tensor)


def without_gradients(message, tensor):
    with torch.no_grad():
        return plain(message, tensor)


def in_inference(message, tensor):
    with torch.inference_mode():
        return plain(message, tensor)


WRAPS = {
    "plain": (plain, plain),
    "collective sends": (collective, plain),
    "collective receives": (plain, collective),
    "collective both": (collective, collective),
    "pair sends": (pair, plain),
    "grad sends": (grad, plain),
    "grad receives": (plain, grad),
    "grad of grad sends": (twice_grad, plain),
    "functionalize sends": (functionalized, plain),
    "mode sends": (in_a_mode, plain),
    "mode receives": (plain, in_a_mode),
    "wrapped in a mode": (wrapped_in_a_mode, plain),
    "no_grad": (without_gradients, without_gradients),
    "inference_mode sends": (in_inference, plain),
    "inference_mode receives": (plain, in_inference),
}
PAIRS = [(send, f"recv_{send}") for send in SENDS] + [("method", "recv_any"), ("block", "recv_block_any")]


def wrapping(me, size):
    with world(me, size) as w:
        wrong = []
        for name, (sends, receives) in WRAPS.items():
            for send, receive in PAIRS:
                # One message per send, also where a pair sends two.
                extra = 1 if sends is pair else 0
                if me.rank == 0:
                    sends(lambda t, way=send: SENDS[way](w, t, 1), SENT.clone())
                    continue
                got = receives(lambda t, way=receive: RECEIVES[way](w, t, 0), room())
                if not torch.equal(got, SENT):
                    wrong.append((name, send, receive))
                for _ in range(extra):
                    w.recv(room(), 0)
        w.barrier()
        me.emit("wrong", wrong=wrong)


def test_wrapped_tensors_go_where_plain_ones_go(cast):
    members = cast.all(wrapping, 2)
    assert members[1].expect("wrong").wrong == []
    assert [each.finish() for each in members] == [0, 0]


def reduced(value):
    return AsyncCollectiveTensor(torch.full((3,), value))


def torchs_broadcast(w, one):
    with w:
        dist.broadcast(one, 0)
    return one


def gathered(w, one):
    got = list_of(torch.zeros(3))
    w.gather(one, None if w.rank else got)
    return torch.stack(got)


def list_of(tensor):
    return [tensor, torch.zeros(3)]


COLLECTIVES = {
    "broadcast": lambda w, one: (w.broadcast(one, 0), one)[1],
    "torch's": torchs_broadcast,
    "all_reduce": lambda w, one: (w.all_reduce(one), one)[1],
    "reduce": lambda w, one: (w.reduce(one, 0), one)[1],
    "all_gather": lambda w, one: (
        w.all_gather(got := [torch.zeros(3), torch.zeros(3)], one),
        torch.stack(got),
    )[1],
    "gather": gathered,
    "scatter": lambda w, one: (
        w.scatter(one, None if w.rank else [torch.ones(3), torch.full((3,), 2.0)]),
        one,
    )[1],
    "scattered": lambda w, one: (w.scatter(got := torch.zeros(3), None if w.rank else [one, one]), got)[1],
    "reduce_scatter": lambda w, one: (w.reduce_scatter(got := torch.zeros(3), list_of(one)), got)[1],
}
"""Collectives of a world of two: (world, tensor) -> a result."""


def collectives(me, size):
    with world(me, size, timeout=20) as w:
        wrong = []
        for name, call in COLLECTIVES.items():
            for wraps in range(size):  # the member whose tensor comes from a functional collective
                plain = call(w, torch.full((3,), 1.0 + me.rank))
                got = call(w, reduced(1.0 + me.rank) if me.rank == wraps else torch.full((3,), 1.0 + me.rank))
                if not torch.equal(got + 0, plain):
                    wrong.append((name, wraps))
        me.emit("wrong", wrong=wrong)


def test_collectives_take_what_functional_collectives_return(cast):
    """In one member only: in the others the call goes over the lane."""
    members = cast.all(collectives, 2)
    assert [each.expect("wrong").wrong for each in members] == [[], []]
    assert [each.finish() for each in members] == [0, 0]


# -- what torch refuses, or does not send -----------------------------------------------------------------------------


def unsent(me, size):
    with world(me, size) as w:
        if me.rank == 0:
            with w:
                with pytest.raises(RuntimeError, match="Batching rule not implemented"):
                    torch.func.vmap(lambda x: (dist.send(x, 1), x)[1])(SENT)
                for call in (dist.send, dist.recv):  # sends nothing, as with gloo; older torch refuses
                    with FakeTensorMode(), contextlib.suppress(NotImplementedError, RuntimeError):
                        call(torch.ones(3), 1)
        w.barrier()
        if me.rank == 0:
            w.send(SENT, 1)
        else:
            got = room()
            w.recv(got, 0)
            assert torch.equal(got, SENT)
        assert w.state.name == "ACTIVE"
        w.barrier()


def test_what_torch_does_not_send_is_not_sent(cast):
    assert [each.finish() for each in cast.all(unsent, 2)] == [0, 0]


# -- the profiler -----------------------------------------------------------------------------------------------------


def profiled(me, size, lane):
    os.environ["M8D_LANE"] = lane
    with world(me, size) as w:
        assert (w._gen.lane is not None) is (lane == "1")
        found = {}
        for send, receive in (
            ("block", "recv_block"),
            ("block_work", "recv_block_any"),
            ("method", "recv_method"),
        ):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                if me.rank == 0:
                    SENDS[send](w, SENT, 1)
                else:
                    RECEIVES[receive](w, room(), 0)
            found[receive] = sorted(each.name for each in profile.events() if each.name.startswith("c10d::"))
        me.emit("found", found=found)
        w.barrier()


def test_the_profiler_records_what_it_records_of_gloo(cast):
    found = {}
    for lane in "10":
        members = cast.all(profiled, 2, lane=lane)
        found[lane] = [each.expect("found").found for each in members]
        assert [each.finish() for each in members] == [0, 0]
    assert found["1"] == found["0"]
    assert found["1"][0]["recv_block"] == ["c10d::send"]
    assert found["1"][1]["recv_block"] == ["c10d::recv_"]
