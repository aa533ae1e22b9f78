"""Process of `stores`: others are forked from it, which keep a store, or join worlds there."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
import torch.distributed.distributed_c10d

import multiworld as mw
import multiworld._c10d.groups
import multiworld._c10d.routing.router
import multiworld._join.join
import multiworld._net.stores.etcd_store
from benchmarks.elastic.rank import operate
from benchmarks.measuring.forks import Zygote, forever
from benchmarks.measuring.namespaces import enter
from benchmarks.measuring.ports import unasked_ports
from multiworld._net.stores.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable

_TIMEOUT = 60.0


def make(rank: int, count: int, args: dict[str, Any]) -> Any:
    """Return its commands."""
    torch.set_num_threads(1)
    return Stores()


class Stores(Zygote):
    """Commands of the process."""

    def __init__(self) -> None:
        super().__init__()
        self._keepers: list[int] = []
        self._members: list[int] = []

    def serve(self) -> str:
        """Have two processes hold a store that is a list of two addresses; the first serves it."""
        while self._keepers:
            self._forks.kill(self._keepers.pop())
        ports = unasked_ports(2)
        self._store = "tcp://" + ",".join(f"127.0.0.1:{port}" for port in ports)
        for _ in range(2):
            pid = self._forks.start(self._keep)
            self._forks.hear(pid, _TIMEOUT)
            self._keepers.append(pid)
        return self._store

    def begin(self, store: str, netns: str | None, pairs: int, worlds: int) -> None:
        """Have pairs of processes join worlds; returns when each has joined and left a few.

        Args:
            store: where they meet.
            netns: network namespace of the processes; None for this one's.
            pairs: how many.
            worlds: that each joins.
        """
        for number in range(2 * pairs):
            pair, rank = divmod(number, 2)
            self._members.append(self._forks.start(_Joining(store, netns, pair, rank, worlds)))
        for pid in self._members:
            self._forks.hear(pid, _TIMEOUT)

    def lose_server(self) -> float:
        """Kill the process that serves the list; returns when."""
        return self._forks.kill(self._keepers.pop(0))

    def results(self) -> list[dict[str, Any]]:
        """What each member tells at its end."""
        told = [self._forks.hear(pid, 2 * _TIMEOUT) for pid in self._members]
        while self._members:
            self._forks.kill(self._members.pop())
        return told

    def _keep(self, tell: Callable[..., None]) -> None:
        handle = open_store(self._store, world="none", serve=True, deadline=time.monotonic() + _TIMEOUT)
        tell(serves=handle.serves)
        forever()


@dataclass(frozen=True)
class _Joining:
    """In a member: join one world after the other, and leave it."""

    store: str
    netns: str | None
    pair: int
    rank: int
    worlds: int

    def __call__(self, tell: Callable[..., None]) -> None:
        if self.netns is not None:
            enter(self.netns)
        calm, took, failed, first = list[float](), list[float](), list[str](), 0.0
        for number in range(self.worlds):
            began = time.monotonic()
            try:
                name = f"pair{self.pair}-{number}"
                world = mw.join(name, self.rank, 2, store=self.store, timeout=_TIMEOUT)
            except mw.JoinError as error:
                took.append(time.monotonic() - began)
                failed.append(f"{type(error).__name__}: {error}")
            else:
                took.append(time.monotonic() - began)
                operate(world)  # before the other one has left
                world.close()
            if number == self.worlds // 5:  # the first ones load what joins need
                took.clear()
            if number == 2 * self.worlds // 5:  # undisturbed so far
                calm, took = took, []
                first = time.monotonic()
                tell(begun=True)
        tell(calm=calm, took=took, failed=failed, seconds=time.monotonic() - first)
        forever()
