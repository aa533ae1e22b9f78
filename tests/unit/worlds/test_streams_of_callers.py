"""What a thread posts for a caller is posted on the caller's CUDA stream."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from multiworld import uninterrupted  # noqa: E402  (torch may be missing)
from multiworld._c10d.waiter_pool import pool  # noqa: E402  (torch may be missing)
from multiworld.aio import Aio  # noqa: E402  (torch may be missing)
from multiworld.turns import COLLECTIVE, Turns  # noqa: E402  (torch may be missing)


def blocking(step):
    uninterrupted.run(Turns(), COLLECTIVE, lambda: True, step, cut=lambda _: None)


def awaited(step):
    turns = Turns()

    async def main():
        await Aio(SimpleNamespace(), turns)._in_turn(turns.take(COLLECTIVE), step)

    asyncio.run(main())


@pytest.mark.parametrize("call", [blocking, awaited])
def test_an_operation_that_a_thread_runs_is_on_its_callers_stream(monkeypatch, call):
    on, seen = ["none"], []

    @contextlib.contextmanager
    def stream(which):
        on.append(which)
        yield
        on.pop()

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the caller's")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    try:
        call(lambda: seen.append(on[-1]))
    finally:
        pool.dismiss()
    assert seen == ["the caller's"]
    assert on == ["none"]
