"""Programs of members that run to their end: what they are made of, and what a test asks of them."""

from __future__ import annotations

import time

import torch

import multiworld as mw


def number(value=0):
    return torch.tensor([value], dtype=torch.int64)


def alone(me, name="one", **more):
    return mw.join(name, 0, 1, store=me.store, timeout=30, **more)


def tell_error(me, fn):
    try:
        fn()
    except Exception as exc:  # noqa: BLE001  (whatever it is, the test wants to see it)
        me.emit(
            "raised",
            kind=type(exc).__name__,
            text=str(exc),
            cause=getattr(exc, "cause", None),
            ranks=getattr(exc, "ranks", None),
            generation=getattr(exc, "generation", None),
        )
    else:
        me.emit("returned")


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def runs(cast, program, size=1, **arguments):
    members = cast.all(program, size, **arguments)
    codes = [member.finish() for member in members]
    for member in members:
        while member.conn.poll(0):
            name, _, data = member.conn.recv()
            assert name != "error", data["trace"]
            if name == "end":
                break
    assert codes == [0] * size
