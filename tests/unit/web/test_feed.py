"""The page's feed: a viewer's stream ends when it is cancelled."""

from __future__ import annotations

import asyncio

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
