"""Processes of `overheads`: two members of a world, with a group of stock torch too."""

from __future__ import annotations

import itertools
import time
import timeit
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

import multiworld as mw
from benchmarks.measuring.rounds import quiet
from benchmarks.measuring.store import Meeting
from benchmarks.overheads.unlogged import Calls
from multiworld._c10d.routing import router
from multiworld.events import Bus, WorldActive

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from multiworld.events import Event

dist: Any = torch.distributed

_TIMEOUT = 60.0


def make(rank: int, count: int, args: dict[str, Any]) -> Member:
    """Rank 0 is timed, rank 1 is its partner, which keeps the store."""
    torch.set_num_threads(1)
    return Member(rank)


class Bare:
    """A context manager written in Python that does nothing: what `with` itself costs."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


class Member(Meeting):
    """Commands of a member. Its group of stock torch has one member, which costs get_rank the same."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._store = ""
        self._numbers = itertools.count()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def join(self, store: str) -> None:
        """Join the world that the loops run in."""
        self._store = store
        self._world = mw.join("overheads", self._rank, 2, store=store, timeout=_TIMEOUT)

    def loop(self, form: str, repeat: int) -> float:
        """So many times the same; µs of each.

        Args:
            form: "bare": a ``with`` that does nothing; "enter": ``with world``; "get_rank/stock" outside,
                without multiworld's router; "get_rank/routed" outside, with it; "get_rank/world" inside; the
                same for "get_world_size"; "round/world": ``with world`` around one `get_world_size`;
                "publish/0", "publish/10": an event on a bus with so many subscribers.
            repeat: how often.
        """
        what, _, where = form.partition("/")
        run = getattr(self, f"_{what}")(where) if what in {"enter", "bare", "publish", "round"} else None
        if run is not None:
            return _timed(run, repeat)
        call = f"{what}()"
        if where == "stock":
            router.uninstall()
            try:
                return _timed(_timer(call, **{what: getattr(dist, what)}), repeat)
            finally:
                router.install()
        timer = _timer(call, **{what: getattr(dist, what)})
        if where == "routed":
            return _timed(timer, repeat)
        with self._world:
            return _timed(timer, repeat)

    def _bare(self, _where: str) -> timeit.Timer:
        return _timer("with bare: pass", bare=Bare())

    def _enter(self, _where: str) -> timeit.Timer:
        return _timer("with world: pass", world=self._world)

    def _round(self, _where: str) -> timeit.Timer:
        return _timer("with world: get_world_size()", world=self._world, get_world_size=dist.get_world_size)

    def _publish(self, where: str) -> timeit.Timer:
        bus: Bus[WorldActive] = Bus()
        for _ in range(int(where)):
            bus.subscribe(_counter())
        event = WorldActive("overheads", 1, 0, time.monotonic(), 2)
        return _timer("publish(event)", publish=bus.publish, event=event)

    def messages(self, repeat: int) -> float:
        """4 bytes to the other member and back, so many times; µs of each send or receive."""
        other, tensor, send, recv = 1 - self._rank, torch.zeros(1), self._world.send, self._world.recv
        with quiet():
            self._world.barrier()
            began = time.perf_counter()
            for _ in range(repeat):
                if self._rank == 0:
                    send(tensor, other)
                    recv(tensor, other)
                else:
                    recv(tensor, other)
                    send(tensor, other)
            return 1e6 * (time.perf_counter() - began) / repeat / 2

    def log(self, repeat: int) -> float:
        """What the log of operations takes of a send or receive; µs."""
        return Calls().log(repeat)

    def join_and_close(self, subscribers: int, repeat: int) -> float:
        """Join, use once and close a world of two, with so many subscribers of events; ms of each time."""
        forget = [mw.subscribe(_counter()) for _ in range(subscribers)]
        with quiet():
            began = time.perf_counter()
            for _ in range(repeat):
                name = f"brief{next(self._numbers)}"
                world = mw.join(name, self._rank, 2, store=self._store, timeout=_TIMEOUT)
                # Both have heard that it is active before either leaves.
                world.barrier()
                world.close()
            took = time.perf_counter() - began
        for each in forget:
            each()
        return 1e3 * took / repeat


def _counter() -> Callable[[Event], None]:
    seen = [0]

    def count(_event: Event) -> None:
        seen[0] += 1

    return count


def _timer(statement: str, **names: Any) -> timeit.Timer:
    return timeit.Timer(statement, globals=names)


def _timed(timer: timeit.Timer, repeat: int) -> float:
    return 1e6 * timer.timeit(repeat) / repeat  # it turns the collector off itself
