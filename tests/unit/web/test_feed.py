"""The page's feed: a viewer's stream ends when it is cancelled."""

from __future__ import annotations

import asyncio
import time

from unit.web.webkit import view

from multiworld.web import feed as module
from multiworld.web.feed import Feed


def test_a_stream_is_cancelled_also_when_a_change_comes_meanwhile():
    async def cancelled_after(steps):
        feed = Feed(lambda: {"now": 1.0})
        stream = feed.stream()  # without a viewer: it polls no further than the first view
        assert await anext(stream) == ("view", {"now": 1.0})
        more = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.01)
        feed._latest = {"now": 2.0, "name": "w"}
        feed._tell()
        for _ in range(steps):
            await asyncio.sleep(0)
        late = more.done()
        more.cancel()
        await asyncio.wait([more])
        return late or more.cancelled()

    assert all(asyncio.run(cancelled_after(steps)) for steps in range(8))


def test_a_viewer_is_told_when_nothing_changes(monkeypatch):
    monkeypatch.setattr(module, "EVERY", 0.01)
    monkeypatch.setattr(module, "_KEEP_ALIVE", 0.05)

    async def watched():
        feed = Feed(lambda: view(now=time.time()))
        with feed.viewer():
            stream = feed.stream()
            await anext(stream)
            heard = [await asyncio.wait_for(anext(stream), 30) for _ in range(3)]
            await stream.aclose()
        await feed._task
        return heard

    began = time.time()
    heard = asyncio.run(watched())
    assert [(kind, list(found)) for kind, found in heard] == [("patch", ["now"])] * 3
    assert all(began <= found["now"] <= time.time() for _, found in heard)


def test_a_viewer_is_told_while_a_look_takes_long(monkeypatch):
    monkeypatch.setattr(module, "_KEEP_ALIVE", 0.01)

    async def watched():
        feed = Feed(lambda: {"now": 1.0})
        stream = feed.stream()  # without a viewer: no further look is made
        await anext(stream)
        began = time.time()
        kind, found = await asyncio.wait_for(anext(stream), 30)
        await stream.aclose()
        return kind, list(found), found["now"] >= began

    assert asyncio.run(watched()) == ("patch", ["now"], True)
