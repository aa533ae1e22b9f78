"""Processes of `worlds`: the measured one, and its partner, which keeps the store."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import gc
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed

import multiworld as mw
from benchmarks.measuring.store import Meeting

dist: Any = torch.distributed

_TIMEOUT = 60.0
_QUIET = 0.15
"""Seconds in which the number of threads must not change before a process counts as settled."""


def make(rank: int, count: int, args: dict[str, Any]) -> Member:
    """Rank 0 is looked at, rank 1 is its partner."""
    torch.set_num_threads(1)
    return Member(rank)


class Member(Meeting):
    """Commands of a member of many two-member worlds."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._worlds: dict[str, mw.World] = {}
        self._plain: list[Any] = []
        self._servers: list[Any] = []

    # -- worlds ----------------------------------------------------------------------------------------------

    def join(self, store: str, names: list[str]) -> list[float]:
        """One after the other; seconds of each."""
        took = []
        for name in names:
            began = time.perf_counter()
            self._worlds[name] = mw.join(name, self._rank, 2, store=store, timeout=_TIMEOUT)
            took.append(time.perf_counter() - began)
        return took

    def pair(self, store: str, world: str, *, used: bool) -> float:
        """Join one world, sum once in it if `used`, and close it; seconds without the close."""
        tensor = torch.zeros(1)
        began = time.perf_counter()
        joined = mw.join(world, self._rank, 2, store=store, timeout=_TIMEOUT)
        if used:
            joined.all_reduce(tensor)
        took = time.perf_counter() - began
        self._worlds[world] = joined
        self.close([world])
        return took

    def join_threads(self, store: str, names: list[str], threads: int) -> float:
        """By so many threads; seconds for all."""
        began = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            joined = list(
                pool.map(lambda name: mw.join(name, self._rank, 2, store=store, timeout=_TIMEOUT), names)
            )
        took = time.perf_counter() - began
        self._worlds.update(zip(names, joined, strict=True))
        return took

    def join_async(self, store: str, names: list[str]) -> float:
        """All at once on one event loop; seconds for all."""

        async def gather() -> list[mw.World]:
            return await asyncio.gather(
                *(mw.join_async(name, self._rank, 2, store=store, timeout=_TIMEOUT) for name in names)
            )

        began = time.perf_counter()
        joined = asyncio.run(gather())
        took = time.perf_counter() - began
        self._worlds.update(zip(names, joined, strict=True))
        return took

    def use(self, names: list[str]) -> int:
        """One message through each world, from rank 1 to rank 0; how many arrived as they were sent.

        Rank 0 closes first, while rank 1 does nothing: messages of its own would make each close wait until
        rank 1 has said that they were received, which it does in its next call.
        """
        right = 0
        for number, name in enumerate(names):
            tensor = torch.full((1,), float(number if self._rank else -1))
            if self._rank:
                self._worlds[name].send(tensor, dst=0)
            else:
                self._worlds[name].recv(tensor, src=1)
            right += tensor.item() == number
        return right

    def close(self, names: list[str]) -> float:
        """One after the other; seconds for all.

        Raises:
            RuntimeError: one kept something in spite of its five seconds.
        """
        worlds = [self._worlds.pop(name) for name in names]
        began = time.perf_counter()
        freed = [world.close() for world in worlds]
        took = time.perf_counter() - began
        if not all(freed):
            raise RuntimeError(f"{freed.count(False)} of {len(freed)} worlds were not free after close()")
        return took

    def states(self) -> dict[str, int]:
        """How many worlds are in which state."""
        found = [str(world.state) for world in self._worlds.values()]
        return {state: found.count(state) for state in found}

    # -- what the process holds ------------------------------------------------------------------------------

    def held(self) -> dict[str, float]:
        """Threads, descriptors, and memory in MB, when what is under way has ended."""
        gc.collect()
        _settle()
        rollup = _rollup()
        return {
            "threads": _entries("/proc/self/task"),
            # One of them is of the listing itself, each time.
            "descriptors": _entries("/proc/self/fd"),
            "memory": (rollup["Pss_Anon"] + rollup["Pss_Shmem"]) / 1e3,
            "private_dirty": rollup["Private_Dirty"] / 1e3,
        }

    def idle(self, seconds: float) -> float:
        """What this process's threads take of one core while nothing happens, in percent."""
        began, cpu = time.perf_counter(), time.process_time()
        time.sleep(seconds)
        return 100.0 * (time.process_time() - cpu) / (time.perf_counter() - began)

    # -- the same without multiworld -------------------------------------------------------------------------

    def plain_serve(self, count: int) -> dict[str, list[float]]:
        """A store for each of so many groups: their ports, and the seconds that each took to make."""
        ports, took = [], []
        for _ in range(count):
            began = time.perf_counter()
            self._servers.append(
                dist.TCPStore("127.0.0.1", 0, None, True, dt.timedelta(seconds=_TIMEOUT), False)
            )
            took.append(time.perf_counter() - began)
            ports.append(self._servers[-1].port)
        return {"ports": ports, "took": took}

    def plain_join(self, ports: list[int], names: list[str], shared_device: bool) -> list[float]:
        """A gloo group each at those stores; seconds of each.

        Args:
            ports: one for each group, or one for all, which then share a client.
            names: of the groups.
            shared_device: whether they share a gloo device (its thread and descriptors); else each makes its
                own.
        """
        took = []
        client: Any = self._servers[0] if self._servers and len(ports) == 1 else None
        device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1") if shared_device else None
        for port, name in zip(itertools.cycle(ports) if len(ports) == 1 else ports, names, strict=False):
            began = time.perf_counter()
            if len(ports) > 1 and self._rank == 0:
                store = self._servers[ports.index(port)]
            elif len(ports) > 1 or client is None:
                store = client = dist.TCPStore(
                    "127.0.0.1", port, None, False, dt.timedelta(seconds=_TIMEOUT), False
                )
            else:
                store = client
            self._plain.append((store, _plain_group(dist.PrefixStore(name, store), self._rank, device)))
            took.append(time.perf_counter() - began)
        return took

    def plain_close(self) -> float:
        """Let go of all of them; seconds for all."""
        began = time.perf_counter()
        self._plain.clear()
        took = time.perf_counter() - began
        self._servers.clear()
        return took


def _plain_group(store: Any, rank: int, device: Any) -> Any:
    wait = dt.timedelta(seconds=_TIMEOUT)
    if device is None:
        return dist.ProcessGroupGloo(store, rank, 2, wait)
    options = dist.ProcessGroupGloo._Options()  # noqa: SLF001  (torch names no public one)
    options._devices, options._threads, options._timeout = [device], 1, wait  # noqa: SLF001  (torch names no public one)
    return dist.ProcessGroupGloo(store, rank, 2, options)


def _entries(folder: str) -> int:
    return sum(1 for _ in Path(folder).iterdir())


def _settle() -> None:
    """Wait until threads that are ending have ended: their number stays the same for a moment.

    A world that broke is freed in the background a second later; the threads for it then end.
    """
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline and any(each.name == "m8d-free" for each in threading.enumerate()):
        time.sleep(0.01)
    seen, since = -1, time.monotonic()
    while time.monotonic() < deadline and time.monotonic() - since < _QUIET:
        number = _entries("/proc/self/task")
        if number != seen:
            seen, since = number, time.monotonic()
        time.sleep(0.01)


def _rollup() -> dict[str, int]:
    """This process's memory in kB, by kind.

    `Pss_Anon` and `Pss_Shmem` are what it takes from the machine. `Pss` has the share of torch's libraries in
    it, which changes by tens of MB whenever any other process on the machine loads or leaves them.
    """
    found: dict[str, int] = {}
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
        name, _, rest = line.partition(":")
        with contextlib.suppress(ValueError, IndexError):
            found[name] = int(rest.split()[0])
    return found
