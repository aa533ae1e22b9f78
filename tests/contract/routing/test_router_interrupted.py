"""A signal's handler that raises while a world is being selected leaves none selected."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from kits.contract.routerkit import routed
from kits.signalkit import At, Interrupted

from multiworld import operation_table, selecting
from multiworld._c10d.routing import router, selection, stack


@pytest.fixture(scope="module")
def gen():
    with routed() as kit:
        yield SimpleNamespace(c10d=kit.world("w"), world="w")


class Selecting(selecting.Selecting):
    def __init__(self, gen):
        self._gen = gen


def entered(gen):
    """As ``with`` calls it: what it raises is followed by no `__exit__`."""
    Selecting(gen).__enter__()
    stack.put(stack.EMPTY)


def asked(gen):
    operation_table.inside(gen, "get_rank")


@pytest.mark.parametrize(
    ("call", "files"),
    [(entered, [selecting, stack]), (asked, [operation_table, stack])],
    ids=["a block", "a method"],
)
def test_ctrl_c_anywhere_leaves_no_world_selected(gen, call, files):
    call(gen)
    for at in itertools.count(1):
        signalled = At(at, {each.__file__ for each in files})
        with contextlib.suppress(Interrupted), signalled:
            call(gen)
        assert stack.top() == stack.EMPTY
        if signalled.left > 0:
            break
    assert at > 10, "it was interrupted at many places"


def test_ctrl_c_in_entering_one_for_torch_leaves_none_selected(gen, monkeypatch):
    def enter(state):
        stack.put((*stack.top(), state))
        raise Interrupted

    monkeypatch.setattr(selection, "enter", enter)
    with pytest.raises(Interrupted), router.selected(gen.c10d):
        pytest.fail("it was not entered")
    assert stack.top() == stack.EMPTY
    assert not dist.is_initialized()
