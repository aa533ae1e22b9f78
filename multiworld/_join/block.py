"""``with joined(...)``: a world that is joined, selected and closed with one block."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING

from multiworld import background_threads
from multiworld._join.arguments import LAST_CALL
from multiworld._join.join import join, join_async
from multiworld.exiting import name_of

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable
    from types import TracebackType

    import torch
    from torch._C._distributed_c10d import Store

    from multiworld._join.arguments import Size, StateLike
    from multiworld.world import World

__all__ = ["Joined", "close_after", "close_async", "joined"]


def joined(
    name: str,
    rank: int | None,
    world_size: Size,
    store: str | Store | None = None,
    backend: str = "gloo",
    timeout: float | dt.timedelta | None = None,
    hang_timeout: float | dt.timedelta | None = None,
    device: torch.device | str | int | None = None,
    *,
    seat: str | None = None,
    on_loss: str = "break",
    last_call: float | dt.timedelta = LAST_CALL,
    state: StateLike | None = None,
) -> Joined:
    """Join a world for one block: joined and selected where it begins, closed where it ends, in whatever way.

    Where an exception ends it, the others get cause ``failed`` with its type, at once. Ctrl-C, ``sys.exit``
    and a task that is cancelled are ends in good order, as any other: ``left``.

        with mw.joined("w1", rank, 2, store="tcp://127.0.0.1:29500") as world:
            dist.all_reduce(t)

    ``async with`` awaits the join and the close, and does not hold up the loop. The arguments are those of
    `multiworld.join`. A ``with world:`` of a world that `join` returned only selects it and may be entered
    many times; this one joins, once for each block.

    Raises:
        JoinError: where the block begins, as from `multiworld.join`; the block is not run then.
    """
    asked = partial(join, name, rank, world_size, store, backend, timeout, hang_timeout, device)
    return Joined(partial(asked, seat=seat, on_loss=on_loss, last_call=last_call, state=state))


class Joined:
    """What `joined` returns: a context manager, and an asynchronous one."""

    def __init__(self, asked: partial[World]) -> None:
        self._asked = asked
        self._world: World | None = None

    def __enter__(self) -> World:
        return self._select(self._asked())

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        world = self._leave()
        try:
            world.__exit__(kind, exc, traceback)
        finally:
            close_after(world, exc, "block")

    async def __aenter__(self) -> World:
        return self._select(await join_async(*self._asked.args, **self._asked.keywords))

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        world = self._leave()
        try:
            world.__exit__(kind, exc, traceback)
        finally:
            await close_async(world, partial(close_after, world, exc, "block"))

    def _select(self, world: World) -> World:
        try:
            world.__enter__()
        except BaseException:  # it broke in this moment
            world.close()
            raise
        self._world = world
        return world

    def _leave(self) -> World:
        world, self._world = self._world, None
        if world is None:
            raise AssertionError("a block that ends was entered")
        return world


def close_after(world: World, error: BaseException | None, what: str) -> None:
    """Close a world after what used it: an exception that ended it is told to the others.

    Args:
        world: to close.
        error: what ended it, if anything did.
        what: it was, for the others: "block", "function".
    """
    if isinstance(error, Exception):
        world._fail(f"its {what} ended with {name_of(type(error))}")
    else:
        world.close()


async def close_async(world: World, close: Callable[[], object] | None = None) -> None:
    """`World.close`, or `close`, awaitable. A cancelled task does not wait for it, and it goes on to its end.

    It has a thread of its own: those of asyncio's executor may all be in calls that wait for this world.
    Where the process gets no other thread this one closes it, and the loop waits.
    """
    loop = asyncio.get_running_loop()
    closed: asyncio.Future[None] = loop.create_future()

    def settle() -> None:
        if not closed.done():
            closed.set_result(None)

    def work() -> None:
        try:
            (close or world.close)()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: no task waits
                loop.call_soon_threadsafe(settle)

    background_threads.call(work, f"m8d-close-{world.name}")
    await closed
