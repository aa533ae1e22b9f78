"""pymultiworld's manager: worlds by name, on asyncio. A thin face of `multiworld.join`."""

from __future__ import annotations

import asyncio
import contextlib
import operator
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from multiworld import reentry
from multiworld._join.arguments import make_plan
from multiworld._join.block import close_async
from multiworld._join.join import join_planned_async
from multiworld.communicator import REMEMBERED, WorldCommunicator
from multiworld.errors import InvalidJoinError, JoinAbandonedError
from multiworld.events import State
from multiworld.registry import registry
from multiworld.world import close_timeout

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from multiworld._join.arguments import JoinPlan
    from multiworld.world import World

__all__ = ["WorldManager"]


class _Join(NamedTuple):
    """Of a world that is being initialized.

    Attributes:
        joining: it.
        given_up: set when the world is removed meanwhile.
    """

    joining: asyncio.Future[World]
    given_up: threading.Event


class WorldManager:
    """Creates and removes worlds, as pymultiworld 0.2.x's does.

    Other than there: nothing is set in the environment before an NCCL world is made, a broken or removed
    world's name can be used again (that makes the next generation), and `cleanup` returns.

    Args:
        enable_monitor: kept for programs that pass it; faults are always watched for.
    """

    def __init__(self, enable_monitor: bool = True) -> None:
        self.enable_monitor = enable_monitor
        self._communicator = WorldCommunicator(self)
        self._lock = threading.RLock()  # a signal's handler may remove worlds in the middle
        self._worlds: dict[str, World | None] = {}
        self._joins: dict[str, _Join] = {}  # of those that are being initialized
        self._before: dict[str, World] = {}  # those that broke, while their names are initialized again
        self._removed: deque[str] = deque(maxlen=REMEMBERED)

    @property
    def communicator(self) -> WorldCommunicator:
        """The collectives by world name."""
        return self._communicator

    async def initialize_world(
        self,
        world_name: str,
        rank: int,
        world_size: int,
        backend: str = "gloo",
        addr: str = "127.0.0.1",
        port: int = -1,
        timeout: int = 30,
        device: torch.device | None = None,
    ) -> None:
        """Join the world `world_name`; if this fails, the name means the broken world that it meant before.

        Args:
            world_name: its name.
            rank: of this process, 0 to ``world_size - 1``.
            world_size: how many members it has.
            backend: "gloo", "nccl", or another of torch's.
            addr: where rank 0 serves the store: a name or address of its host.
            port: of the store.
            timeout: seconds for the join and for each operation.
            device: for nccl a CUDA device; the CPU by default.

        Raises:
            ValueError: a world of that name is active, or being joined.
            JoinError: see `multiworld.join`; JoinAbandonedError also if it was removed meanwhile.
        """
        if not _is_port(port):
            raise InvalidJoinError(
                world_name,
                f"world {world_name!r}: port {port!r}",
                rule="The store needs a TCP port, 1 to 65535, the same on every member",
                next_step="Give one, as in port=29500",
            )
        if not isinstance(addr, str) or not addr:
            raise InvalidJoinError(
                world_name,
                f"world {world_name!r}: addr {addr!r}",
                rule="The store is at a host, by name or address, the same on every member",
                next_step='Give one, as in addr="127.0.0.1"',
            )
        host = f"[{addr}]" if ":" in addr else addr
        given_up = threading.Event()
        asked = partial(
            make_plan,
            world_name,
            rank,
            world_size,
            f"tcp://{host}:{port}",
            backend,
            timeout,
            None,
            device if backend != "gloo" else None,
        )
        with self._lock:
            self.add_world(world_name, backend)
            join = _Join(asyncio.ensure_future(_join(asked, given_up.is_set)), given_up)
            self._joins[world_name] = join
        try:
            world = await self._joined(world_name, join)
        finally:
            del join  # it has the error, which has this frame
        if backend.startswith("nccl"):
            try:
                await self._connect(world, device)
            except BaseException:
                if self._worlds.get(world_name) is world:
                    self.remove_world(world_name)
                raise

    def add_world(self, world_name: str, backend: str) -> None:
        """Make the name known; `initialize_world` calls it.

        Raises:
            ValueError: a world of that name is there and is not broken.
        """
        with self._lock:
            there = self._worlds.get(world_name)
            if world_name in self._worlds and (there is None or there.state in {State.ACTIVE, State.JOINING}):
                raise ValueError(f"World {world_name} already exists.")
            if there is not None:
                self._before[world_name] = there
            self._worlds[world_name] = None
            self._communicator.add_world(world_name, backend)

    def remove_world(self, world_name: str) -> None:
        """Close the world and forget it; its name may be used again. As `World.close`, it blocks its thread.

        One that is being initialized is given up, which the other members are told.
        A world that was removed already is left as it is: several tasks may notice that it broke, and each
        remove it.

        Raises:
            ValueError: there never was a world of that name.
        """
        with self._lock:
            if world_name not in self._worlds:
                if world_name in self._removed:
                    return
                raise ValueError(f"World {world_name} does not exist.")
            world = self._forget(world_name)
        if world is not None:
            world.close()

    def cleanup(self) -> None:
        """Close every world of this process, all at once, as `World.close` does; the program goes on."""
        for name in list(self._worlds):
            self._forget(name)
        seconds = close_timeout()
        close = partial(registry.close_all, seconds, ending=False)
        if reentry.in_the_middle():
            reentry.in_time(close, seconds, "m8d-close-all")
        else:
            close()

    async def _joined(self, name: str, join: _Join) -> World:
        """Wait for a join; one that does not come about, or is not wanted any more, leaves nothing."""
        try:
            await asyncio.wait({join.joining})  # cancelled where this task is: a removal cancels that alone
        except asyncio.CancelledError:
            await self._give_up(name, join)
            raise
        except BaseException:  # the task is destroyed, as its loop was closed
            self._put_back(name, join)
            raise
        world = _came_about(join.joining)
        if world is None:
            if not self._put_back(name, join) and join.joining.cancelled():
                raise _removed_meanwhile(name)
        elif not self._publish(name, join, world):  # too late to cancel it
            await close_async(world)
            raise _removed_meanwhile(name)
        try:
            return join.joining.result()  # or raise why there is none
        finally:
            del join  # it has the error, which has this frame

    async def _give_up(self, name: str, join: _Join) -> None:
        """Undo a join whose task was cancelled, perhaps in the moment in which it came about."""
        while not join.joining.done():
            join.joining.cancel()  # again where this task is cancelled again
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({join.joining})
        try:
            world = _came_about(join.joining)
            if world is not None:
                await close_async(world)
        finally:
            self._put_back(name, join)

    def _forget(self, name: str) -> World | None:
        with self._lock:
            if name not in self._removed:
                self._removed.append(name)
            self._communicator.remove_world(name)
            join = self._joins.pop(name, None)
            before = self._before.pop(name, None)
            world = self._worlds.pop(name, None) or before  # another thread may have removed it
        if join is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed, which has cancelled it
                join.joining.get_loop().call_soon_threadsafe(join.joining.cancel)
            # Now, not when the loop has cancelled it: what initializes the name again waits for its end.
            join.given_up.set()
        return world

    def _publish(self, name: str, join: _Join, world: World) -> bool:
        """Have `name` mean `world`, which has come about; False if it was removed meanwhile."""
        with self._lock:
            if self._joins.get(name) is not join:
                return False
            self._worlds[name] = world
            self._communicator.set_world(name, world)
            if self._joins.pop(name, None) is not join:  # removed by a signal's handler, between these lines
                self._worlds.pop(name, None)
                self._communicator.remove_world(name)
                return False
            self._before.pop(name, None)
            return True

    def _put_back(self, name: str, join: _Join) -> bool:
        """Have `name` mean what it meant before it was initialized; False if it was removed meanwhile."""
        with self._lock:
            if self._joins.get(name) is not join or self._joins.pop(name, None) is not join:
                return False
            before = self._before.pop(name, None)
            if before is None:
                self._worlds.pop(name, None)
                self._communicator.remove_world(name)
            else:
                self._worlds[name] = before
                self._communicator.set_world(name, before)
            return True

    async def _connect(self, world: World, device: Any) -> None:
        # NCCL builds its communicator with the first operation: do it now, so that the first message does not
        # pay.
        import torch  # noqa: PLC0415  (a world exists, so torch is loaded)

        await world.aio.all_reduce(torch.zeros(1, device=device if device is not None else world.device))


async def _join(asked: partial[JoinPlan], given_up: Callable[[], bool]) -> World:
    return await join_planned_async(asked(), given_up)


def _is_port(port: object) -> bool:
    try:
        return 0 < operator.index(port) < 65536  # type: ignore[arg-type]
    except TypeError:
        return False


def _came_about(joining: asyncio.Future[World]) -> World | None:
    """Return the world of a join that is over; None if it was cancelled or failed."""
    return None if joining.cancelled() or joining.exception() is not None else joining.result()


def _removed_meanwhile(name: str) -> JoinAbandonedError:
    return JoinAbandonedError(
        name,
        f"world {name!r} was removed while it was being initialized",
        rule="A removed world does not become active",
        next_step="Initialize it again",
    )
