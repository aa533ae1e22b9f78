"""An exception that ends a member's program is told to the others as such, with its type."""

from __future__ import annotations

import sys

import pytest
import torch
from kits import forkedkit
from kits.contract.worldkit import CONTEXT

import multiworld as mw

PROGRAM = """
import code, sys, threading
import multiworld as mw
w = mw.join("w", 1, 2, store=sys.argv[1], timeout=60, hang_timeout=30)
class Odd(Exception):
    pass
def fail():
    raise Odd("the text stays here")
what = sys.argv[2]
if what == "raised":
    fail()
elif what == "in the block":
    with w:
        {}["key"]
elif what == "of torch":
    import torch
    raise torch.distributed.DistBackendError("x")
elif what == "interrupted":
    raise KeyboardInterrupt
elif what == "with a hook":
    sys.excepthook = lambda *_: print("hooked", flush=True)
    fail()
elif what == "caught":
    try:
        fail()
    except Odd:
        print("caught")
elif what == "in a thread":
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
elif what == "in a console":
    code.InteractiveInterpreter().runsource("1 / 0")
elif what == "closed":
    try:
        fail()
    finally:
        w.close()
elif what == "exit":
    sys.exit(3)
"""


def told(world):
    with pytest.raises(mw.BrokenWorldException) as caught:
        world.recv(torch.zeros(1), 1)
    assert caught.value.ranks == (1,)
    return caught.value.cause, caught.value.detail.partition(": ")[2]


@pytest.mark.parametrize(
    ("what", "cause", "said"),
    [
        ("raised", "failed", "its program ended with Odd"),
        ("in the block", "failed", "its program ended with KeyError"),
        ("of torch", "failed", "its program ended with torch.distributed.DistBackendError"),
        ("interrupted", "left", "it closed the world in good order"),
        ("with a hook", "failed", "its program ended with Odd"),
        ("caught", "left", "it closed the world in good order"),
        ("in a thread", "left", "it closed the world in good order"),
        ("in a console", "left", "it closed the world in good order"),
        ("closed", "left", "it closed the world in good order"),
        ("exit", "left", "it closed the world in good order"),
    ],
)
def test_what_ends_a_program_is_told(what, cause, said, cast):
    member = forkedkit.program(PROGRAM, cast.store, what)
    try:
        world = mw.join("w", 0, 2, store=cast.store, timeout=60, hang_timeout=30)
        found = told(world)
        out, err = member.communicate(timeout=60)
    finally:
        member.kill()
        world.close()
    assert found == (cause, said)
    assert ("hooked" in out) is (what == "with a hook")
    assert ("the text stays here" in err) is (what in {"raised", "in a thread", "closed"})


def child(store, what):
    world = mw.join("w", 1, 2, store=store, timeout=60, hang_timeout=30)
    if what == "raises":
        raise ValueError("x")
    if what == "exits":
        sys.exit(4)
    assert world.state == "active"


@pytest.mark.parametrize(
    ("what", "cause", "said"),
    [
        ("raises", "failed", "its program ended with exit status 1"),
        ("exits", "failed", "its program ended with exit status 4"),
        ("returns", "left", "it closed the world in good order"),
    ],
)
def test_of_a_child_of_multiprocessing_its_exit_status_is_told(what, cause, said, cast):
    member = CONTEXT.Process(target=child, args=(cast.store, what))
    member.start()
    world = mw.join("w", 0, 2, store=cast.store, timeout=60, hang_timeout=30)
    try:
        assert told(world) == (cause, said)
    finally:
        world.close()
        member.join(60)
        member.kill()
