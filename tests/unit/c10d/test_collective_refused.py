"""Collectives over the lane that are refused in one member: the next one that it calls is in their place."""

from __future__ import annotations

import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from kits import collectivekit
from kits.collectivekit import PATIENCE

from multiworld._c10d.fault_classification import classify
from multiworld._c10d.lane.collectives import GenerationCollectives
from multiworld.errors import CollectiveMismatchError


@pytest.fixture
def groups():
    with collectivekit.pair() as made:
        yield made


def released(count=4, at=0):
    """A tensor without memory, as FSDP leaves it; a view of one where it begins elsewhere."""
    tensor = torch.zeros(at + count)[at:]
    tensor.untyped_storage().resize_(0)
    return tensor


def ones(count=4):
    return torch.ones(count)


REFUSED = {
    "all_reduce": lambda of: of.all_reduce(released()),
    "reduce": lambda of: of.reduce(released(), 0),
    "reduce_scatter": lambda of: of.reduce_scatter(ones(), [ones(), released()]),
    "reduce_scatter_tensor": lambda of: of.reduce_scatter_tensor(ones(), released(8)),
    "broadcast": lambda of: of.broadcast(released(), 0),
    "broadcast of a view": lambda of: of.broadcast(released(at=1), 0),
    "all_gather": lambda of: of.all_gather([ones(), released()], ones()),
    "all_gather_into_tensor": lambda of: of.all_gather_into_tensor(released(8), ones()),
    "gather": lambda of: of.gather(ones(), [released(), ones()], of.rank),
    "scatter": lambda of: of.scatter(released(), [ones(), ones()], of.rank),
    "all_to_all": lambda of: of.all_to_all([ones(), ones()], [ones(), released()]),
    "all_to_all_single": lambda of: of.all_to_all_single(released(), ones()),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_one_without_memory_has_no_number(groups, name):
    with pytest.raises(RuntimeError, match=r"without memory|storage of size 0"):
        REFUSED[name](groups[1])
    sent, got = torch.full((4,), 7.0), torch.zeros(4)
    sending = threading.Thread(target=groups[0].broadcast(sent, 0).wait)
    sending.start()
    groups[1].broadcast(got, 0).wait()
    sending.join(PATIENCE)
    assert torch.equal(got, sent)


def test_one_without_bytes_needs_no_memory(groups):
    nothing = torch.zeros(4)[4:]
    assert groups[0].broadcast(nothing, 0) is not None
    assert groups[0].broadcast(torch.empty(0), 0) is not None


def fails():
    bool(torch.zeros(2))


@pytest.mark.parametrize("place", ["at once", "at its end"])
def test_one_that_fails_in_one_member_breaks_the_world(groups, monkeypatch, place):
    """It has its number in the others: called again, it would be the next one."""
    other = threading.Thread(target=lambda: groups[0].all_reduce(ones()).wait())
    other.start()
    failing = groups[1].all_reduce(ones())
    if place == "at once":
        monkeypatch.setattr(failing._scratch, "take", bool)  # not a function of the test: the program's own
    else:
        failing.finally_(fails)
    failing.wait()
    assert classify(failing.error).detail.startswith("all_reduce failed with RuntimeError: Boolean value of")
    assert type(failing.error.__cause__) is RuntimeError
    groups[0]._endpoint.fail(ConnectionError("the world is over"))
    other.join(PATIENCE)


class Group:
    """A process group."""


def checking(of):
    """The collectives of a generation whose members compare their calls, and its group."""
    nowhere = types.SimpleNamespace(endpoint=of._endpoint, timeout=PATIENCE, log=of._log, world="w")
    made = GenerationCollectives(
        nowhere, types.SimpleNamespace(coalescing=()), None,
        rank=of.rank, size=2, carried=True, crowds=True, near=True, checks=True, secure=False,
    )  # fmt: skip
    group = Group()
    made._known[group] = made.default
    return made, group


def test_one_that_is_refused_is_not_compared(groups):
    """M8D_CHECK=1: the comparison would have its number, and the next one be compared with the call's own bytes."""
    results, options = [torch.zeros(32), torch.zeros(32)], dist.BroadcastOptions()
    results[0] += 7

    def member(rank):
        made, group = checking(groups[rank])
        if rank:
            with pytest.raises(RuntimeError, match="have to lie apart"):
                made.posted("broadcast", group, ([torch.zeros(1).expand(32)], options), {})
        made.posted("broadcast", group, ([results[rank]], options), {}).wait()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(member, range(2)))
    assert torch.equal(*results)


def test_one_that_differs_from_the_others_changes_no_tensor(groups):
    rooms = [torch.zeros(2) for _ in range(2)]

    def member(rank):
        made, group = checking(groups[rank])
        with pytest.raises(CollectiveMismatchError):
            if rank:
                made.posted("barrier", group, (), {})
            else:
                made.posted("allgather", group, ([rooms], [torch.ones(2)]), {})

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(member, range(2)))
    assert not any(map(torch.any, rooms))
