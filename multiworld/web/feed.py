"""The page's one poll of its source, shared by all viewers; without one it asks nothing."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from multiworld.logs.source import logger
from multiworld.web.patches import patch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

__all__ = ["EVERY", "MOST_VIEWERS", "Feed", "in_a_thread"]

T = TypeVar("T")

EVERY = 0.4
"""Seconds between two looks at the source."""

SHARE = 3
"""A look that takes long is followed by so many times as long a pause, but by no more than `LONGEST`."""

LONGEST = 1.0

MOST_VIEWERS = 32
"""Event streams at a time."""

_KEEP_ALIVE = 15.0
"""Seconds after which a viewer is told that nothing has changed: a longer silence is a dead stream's."""

_log = logger(__name__)


async def in_a_thread(function: Callable[[], T]) -> T:
    """Call a function that blocks in a daemon thread: `asyncio.to_thread`'s would hold up the program's end.

    Raises:
        Exception: what it raises.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except Exception as raised:  # noqa: BLE001  (raised where it is awaited)
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="m8d-web-look", daemon=True).start()
    return await future


class Feed:
    """See the module. For one event loop.

    Args:
        view: blocks until it has the source's present view; called in a thread.
    """

    def __init__(self, view: Callable[[], dict[str, Any]]) -> None:
        self._view = view
        self._viewers = 0
        self._latest: dict[str, Any] | None = None
        self._made = -EVERY
        self._changed = asyncio.Event()
        self._look: asyncio.Task[dict[str, Any]] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._over = False

    @property
    def full(self) -> bool:
        """Whether there are as many viewers as there may be."""
        return self._viewers >= MOST_VIEWERS

    async def latest(self) -> dict[str, Any]:
        """Return a view that is not older than `EVERY`.

        Raises:
            Exception: the source's.
        """
        if self._latest is not None and time.monotonic() - self._made < EVERY:
            return self._latest
        if self._look is None or self._look.done():  # those that ask at once share the answer
            self._look = asyncio.create_task(self._ask())
            # If those that wait for it have gone, asyncio would log its error as one that was lost.
            self._look.add_done_callback(lambda look: look.cancelled() or look.exception())
        return await asyncio.shield(self._look)

    async def _ask(self) -> dict[str, Any]:
        self._latest = found = await in_a_thread(self._view)
        self._made = time.monotonic()
        return found

    def close(self) -> None:
        """End all streams. Any thread."""
        self._over = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._tell)

    @contextlib.contextmanager
    def viewer(self) -> Iterator[None]:
        """Count one viewer."""
        self._viewers += 1
        try:
            yield
        finally:
            self._viewers -= 1

    async def stream(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yield ("view", the view), then ("patch", what has changed) at each change, and each 15 s."""
        self._loop = asyncio.get_running_loop()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll())
        before = await self.latest()
        yield "view", before
        told = time.monotonic()
        while not self._over:
            changed = self._changed
            if self._latest is before:
                # asyncio.wait_for loses a cancel that comes together with a change (before Python 3.12).
                change = asyncio.ensure_future(changed.wait())
                try:
                    left = told + _KEEP_ALIVE - time.monotonic()
                    done, _ = await asyncio.wait({change}, timeout=max(0.0, left))
                finally:
                    change.cancel()
                if not done:
                    yield "patch", {"now": time.time()}
                    told = time.monotonic()
                    continue
            after = self._latest
            if after is None or after is before:
                continue
            found = patch(before, after)
            before = after
            if len(found) > 1:
                yield "patch", found
                told = time.monotonic()

    async def _poll(self) -> None:
        while self._viewers and not self._over:
            began = time.monotonic()
            try:
                await self.latest()
            except Exception as error:  # noqa: BLE001  (told in the view; the next look may succeed)
                _log.warning("no view could be made: %s", error)
                if self._latest is not None:
                    note = f"no view could be made: {error}"
                    self._latest = {**self._latest, "now": time.time(), "note": note}
            self._tell()
            took = time.monotonic() - began
            await asyncio.sleep(max(EVERY, min(LONGEST, SHARE * took)))
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
