"""A garbage collection may release a gloo group anywhere in the books of its world, in the thread that reads them."""

from __future__ import annotations

import sys
import threading

import pytest
import torch.distributed as dist
from kits.meetkit import PATIENCE, until

from multiworld._c10d.gloo import backend


@pytest.fixture
def let_go(monkeypatch):
    """What was released, once for each release; nothing is kept for the thread that drops it."""
    released = []

    def note():
        while backend._left:
            for group in backend._left.popleft():
                released.append(group)
                group.drop()

    monkeypatch.setattr(backend, "_let_go", note)
    return released


def made(world):
    """One more group of one member."""
    before = world.groups()
    world.build(dist.HashStore(), 0, 1)
    (group,) = [each for each in world.groups() if each not in before]
    return group


def interrupted(call, at, collect):
    """What `call` returns when `collect` is called at its step number `at`, and whether there is such a step.

    A step is one instruction in a function of `backend`.
    """
    steps, results, begun = [0], [], []

    def trace(frame, event, _):
        if frame.f_code.co_filename != backend.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            steps[0] += 1
            if steps[0] == at:
                begun.append(at)
                collect()
        return trace

    def run():
        sys.settrace(trace)
        try:
            results.append(call())
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), f"a collection at step {at} waits for its own thread"
    return results[0], bool(begun)


@pytest.mark.parametrize("way", ["groups", "take"])
def test_a_group_is_released_in_the_middle(let_go, way):
    world = backend.GlooWorld(name="w", host="127.0.0.1", timeout=30.0, check=lambda: None)
    stays, gone, taken = made(world), [], []
    while True:
        goes = made(world)
        call = world.groups if way == "groups" else lambda goes=goes: world.take((goes,))
        found, was = interrupted(call, len(gone) + 1, lambda goes=goes: world.release((goes,)))
        if not was:
            break
        assert world.groups() == (stays,), f"at step {len(gone) + 1}"
        gone.append(goes)
        taken += found if way == "take" else ()
    until(lambda: not any(thread.name == "m8d-release" for thread in threading.enumerate()))
    assert len(gone) > 5
    assert sorted(map(id, (*let_go, *taken))) == sorted(map(id, gone)), "each is dropped by one thread"
    for group in {*taken, *found, *world.take()}:
        group.drop()
