"""A state is read in the CUDA stream in which it is computed, whatever thread sends it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from multiworld._c10d.lane import state_transfer  # noqa: E402  (torch may be missing)
from multiworld._join import state as states  # noqa: E402
from multiworld._join import threaded  # noqa: E402
from multiworld.uninterrupted import stream_of_caller  # noqa: E402  (torch may be missing)
from multiworld.world import World  # noqa: E402


def test_a_torch_that_another_thread_imports_has_no_stream_yet(monkeypatch):
    for partly in (SimpleNamespace(), SimpleNamespace(cuda=SimpleNamespace())):
        monkeypatch.setitem(sys.modules, "torch", partly)
        assert stream_of_caller() is contextlib.nullcontext


@pytest.fixture
def current(monkeypatch):
    """Each thread's current stream: "side" in this one, the default one in others, as CUDA has it."""
    mine = threading.local()
    mine.stream = "side"

    class Selected:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            self.before, mine.stream = now(), self.stream

        def __exit__(self, *_):
            mine.stream = self.before

    def now():
        return getattr(mine, "stream", "default")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", now)
    monkeypatch.setattr(torch.cuda, "stream", Selected)
    return now


@pytest.mark.parametrize("receivers", [[1], [1, 2]])
def test_a_state_that_is_sent(monkeypatch, current, receivers):
    seen = []
    monkeypatch.setattr(state_transfer, "send_state", lambda *_, **__: seen.append(current()))
    plan = SimpleNamespace(state=SimpleNamespace(state_dict=dict), timeout=1.0)
    states._send(SimpleNamespace(lane=object()), plan, receivers)
    assert seen == ["side"] * len(receivers)


def test_joins_and_advances_that_are_awaited(current):
    advances = SimpleNamespace(counted=lambda: True, enter=current)

    async def main():
        began = threaded.start(current, "joins", lambda *_: None)
        assert await began == "side"
        assert await World.advance_async(SimpleNamespace(_advances=advances)) == "side"

    asyncio.run(main())
