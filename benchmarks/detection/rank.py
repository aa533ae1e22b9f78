"""Processes of `detection`: an observer, its partner, the zygote that victims are forked from."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

# What a victim needs is loaded before it is forked.
import torch.distributed
import torch.distributed.distributed_c10d

import multiworld as mw
import multiworld._c10d.groups
import multiworld._c10d.routing.router
import multiworld._join.join
from benchmarks.measuring.forks import Zygote, forever
from benchmarks.measuring.store import Meeting

if TYPE_CHECKING:
    from collections.abc import Callable

_TIMEOUT = 60.0
_THREADS = 16


def make_victim(rank: int, count: int, args: dict[str, Any]) -> Victim:
    """Every rank is a victim."""
    torch.set_num_threads(1)
    return Victim()


def make(rank: int, count: int, args: dict[str, Any]) -> Any:
    """Rank 0 observes, 1 is its partner and keeps the store, 2 forks victims."""
    torch.set_num_threads(1)
    return Victims() if rank == 2 else Observer(rank)


def _join_all(store: str, names: list[str], rank: int, size: int, hang_timeout: float) -> list[mw.World]:
    def join(name: str) -> mw.World:
        return mw.join(name, rank, size, store=store, timeout=_TIMEOUT, hang_timeout=hang_timeout)

    if len(names) == 1:
        return [join(names[0])]
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(join, names))


class Watch:
    """One way of noticing that a world broke, and when it did."""

    def __init__(self, world: mw.World) -> None:
        self.world = world
        self.at = 0.0
        self.error = ""
        self.cause = ""
        self.ranks: list[int] = []
        self.done = threading.Event()

    def raised(self, error: BaseException) -> None:
        """The first thing that is done in the ``except`` clause."""
        self.at = time.monotonic()
        self.error = type(error).__name__
        self.cause = getattr(error, "cause", "")
        self.ranks = list(getattr(error, "ranks", ()))
        self.done.set()

    def told(self, world: mw.World) -> None:
        """The function given to ``on_break``."""
        self.at = time.monotonic()
        if world.breakage is not None:
            self.cause, self.ranks = str(world.breakage.cause), list(world.breakage.ranks)
        self.done.set()

    def seen(self, deadline: float) -> dict[str, Any]:
        """What was seen, as JSON."""
        if not self.done.wait(max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"{self.world} was not seen to break")
        return {"at": self.at, "cause": self.cause, "ranks": self.ranks, "error": self.error}


class Observer(Meeting):
    """Commands of a process that is in many worlds: the one whose times are taken, and its partner."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._store = ""
        self._steady: list[mw.World] = []
        self._watches: list[Watch] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="loop").start()

    def meet(self, store: str) -> None:
        """Where worlds meet from now on."""
        self._store = store

    def steady(self, names: list[str]) -> int:
        """Join further two-member worlds with the partner, to stay; how many there are now."""
        self._steady += _join_all(self._store, names, self._rank, 2, 30.0)
        return len(self._steady)

    def exchange(self) -> int:
        """Send a message through each steady world, observer to partner; return how many arrived intact."""
        right = 0
        for number, world in enumerate(self._steady):
            tensor = torch.full((1,), float(number if self._rank == 0 else -1))
            if self._rank == 0:
                world.send(tensor, dst=1)
            else:
                world.recv(tensor, src=0)
            right += tensor.item() == number
        return right

    def watch(self, names: list[str], rank: int, size: int, hang_timeout: float, how: str, src: int) -> None:
        """Join worlds with a victim, and wait for their break.

        Args:
            names: of the worlds.
            rank: of this process in each.
            size: of each.
            hang_timeout: of each.
            how: "recv": a thread is blocked in a receive; "aio": a task awaits one; "told": no
                operation is under way, and `on_break` tells.
            src: from whom to receive.
        """
        worlds = _join_all(self._store, names, rank, size, hang_timeout)
        self._watches = [Watch(world) for world in worlds]
        begin = {"recv": self._block, "aio": self._await, "told": self._listen}[how]
        for each in self._watches:
            begin(each, src)

    def seen(self, within: float) -> list[dict[str, Any]]:
        """When and how the break was noticed, by world, in so many seconds; the worlds are closed then."""
        deadline = time.monotonic() + within
        found = [each.seen(deadline) for each in self._watches]
        for each in self._watches:
            each.world.close()
        self._watches = []
        return found

    def _block(self, watch: Watch, src: int) -> None:
        begun = threading.Event()

        def receive() -> None:
            tensor = torch.zeros(1)
            begun.set()
            try:
                watch.world.recv(tensor, src=src)
            except Exception as error:  # noqa: BLE001  (the driver judges what it was)
                watch.raised(error)

        threading.Thread(target=receive, daemon=True, name="receive").start()
        begun.wait(_TIMEOUT)

    def _await(self, watch: Watch, src: int) -> None:
        begun = threading.Event()

        async def receive() -> None:
            tensor = torch.zeros(1)
            begun.set()
            try:
                await watch.world.aio.recv(tensor, src=src)
            except Exception as error:  # noqa: BLE001  (its text is the answer)
                watch.raised(error)

        asyncio.run_coroutine_threadsafe(receive(), self._loop)
        begun.wait(_TIMEOUT)

    def _listen(self, watch: Watch, src: int) -> None:  # noqa: ARG002  (the shape of the others)
        watch.world.on_break(watch.told)

    # -- the floor -------------------------------------------------------------------------------------------

    def listen(self) -> int:
        """Serve a plain TCP socket; its port."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        return int(self._listener.getsockname()[1])

    def accept(self) -> None:
        """A victim connects; then a thread is blocked in reading what it never sends."""
        self._listener.settimeout(_TIMEOUT)
        connection, _ = self._listener.accept()
        connection.settimeout(None)
        begun, self._ended, self._end_at = threading.Event(), threading.Event(), 0.0

        def read() -> None:
            begun.set()
            with connection, contextlib.suppress(ConnectionError):
                connection.recv(1)
            self._end_at = time.monotonic()
            self._ended.set()

        threading.Thread(target=read, daemon=True, name="read").start()
        begun.wait(_TIMEOUT)

    def ended(self) -> float:
        """When that connection was seen to end."""
        if not self._ended.wait(_TIMEOUT):
            raise TimeoutError("the plain connection did not end")
        return self._end_at


class Victim:
    """Commands of a victim that is a whole process of its own: nothing of it is shared with another."""

    def join(self, store: str, port: int, names: list[str], rank: int, size: int, hang_timeout: float) -> int:
        """Join these worlds, and make a plain TCP connection to `port`; how many worlds."""
        self._worlds = _join_all(store, names, rank, size, hang_timeout)
        self._plain = socket.create_connection(("127.0.0.1", port))
        return len(self._worlds)


class Victims(Zygote):
    """Commands of the process that victims are forked from."""

    def fork(self, port: int, names: list[str], rank: int, size: int, hang_timeout: float) -> int:
        """A victim that joins these worlds, connects to `port` and waits; its pid, once all that is done."""

        def run(tell: Callable[..., None]) -> None:
            victim = Victim()
            tell(joined=victim.join(self._store, port, names, rank, size, hang_timeout))
            forever()

        pid = self._forks.start(run)
        self._forks.hear(pid, _TIMEOUT)
        return pid

    def kill(self, pid: int, after: float) -> float:
        """SIGKILL in so many seconds; when it was sent."""
        time.sleep(after)
        return self._forks.kill(pid)

    def stop(self, pid: int, after: float) -> float:
        """SIGSTOP in so many seconds; when it was sent."""
        time.sleep(after)
        return self._forks.stop(pid)
