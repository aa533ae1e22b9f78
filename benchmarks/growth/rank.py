"""Processes of `growth`: the one that members are forked from, and the one that keeps the store."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

# What a member needs is loaded before it is forked.
import torch.distributed
import torch.distributed.distributed_c10d

import multiworld as mw
import multiworld._c10d.groups
import multiworld._c10d.lane.state_transfer
import multiworld._c10d.routing.router
import multiworld._join.advancing
import multiworld._join.join
import multiworld._net.stores.succession
from benchmarks.elastic.rank import operate
from benchmarks.measuring.forks import Zygote, forever
from benchmarks.measuring.store import Meeting

if TYPE_CHECKING:
    from collections.abc import Callable

_TIMEOUT = 60.0
_HANG = 30.0
_ALL_COME = 30.0  # seconds of a last call: there is room for just those that come
_STEP = 0.002
"""Seconds of a step's own work."""
_STAY = 20
"""Steps that a guest makes before it asks to leave."""


def make(rank: int, count: int, args: dict[str, Any]) -> Any:
    """Rank 0 forks the members, rank 1 keeps the store."""
    torch.set_num_threads(1)
    return Members() if rank == 0 else Meeting()


class _State:
    """A state of one tensor.

    Args:
        size: bytes.
        value: of its elements.
    """

    def __init__(self, size: int, value: float) -> None:
        self.tensor = torch.full((size // 4,), value)

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


class Members(Zygote):
    """Commands of the process that members are forked from. It is in no world."""

    def __init__(self) -> None:
        super().__init__()
        self._pids: list[int] = []
        self._waits = 0

    def idle(self, world: str, repeat: int) -> float:
        """What an advance costs where nothing is due; µs of each.

        Args:
            world: that a member alone is in.
            repeat: how often.
        """

        def run(tell: Callable[..., None]) -> None:
            joined = self._join(world, (1, 2), "alone")
            for count in (repeat // 10, repeat):
                began = time.perf_counter()
                for _ in range(count):
                    joined.advance()
                took = time.perf_counter() - began
            tell(us=1e6 * took / repeat)
            joined.close()

        pid = self._forks.start(run)
        return float(self._forks.hear(pid, _TIMEOUT)["us"])

    def gather(self, world: str, count: int) -> None:
        """Fork members that make steps, and tell of each change of members; returns when they are together.

        Args:
            world: its name; there is room for one more.
            count: how many.
        """
        for number in range(count):
            self._pids.append(self._forks.start(partial(self._stay, name=world, number=number, count=count)))
        self._hear()

    def visit(self, world: str, number: int) -> list[list[dict[str, Any]]]:
        """Have one more process join, and leave again; what each member tells of both changes.

        Args:
            world: that members are in.
            number: of the visit.
        """

        def run(tell: Callable[..., None]) -> None:
            joined = self._join(world, (len(self._pids), len(self._pids) + 1), f"guest{number}")
            steps = 0
            while joined.state is mw.State.ACTIVE:
                operate(joined)
                time.sleep(_STEP)
                steps += 1
                if steps == _STAY:
                    joined.leave()
                joined.advance()
            tell(left=True)

        guest = self._forks.start(run)
        told = [self._hear(), self._hear()]
        self._forks.hear(guest, _TIMEOUT)
        return told

    def stand(self, world: str, count: int, size: int) -> None:
        """Fork members with a state, in a loop of all_reduce until it breaks, and one that waits for a place.

        Args:
            world: its name; it has room for just them.
            count: how many.
            size: bytes of the state.
        """
        for number in range(count):
            run = partial(self._survive, name=world, number=number, count=count, size=size)
            self._pids.append(self._forks.start(run))
        self._hear()
        self._wait(world, count, size)

    def replace(self, number: int) -> dict[str, Any]:
        """Kill a member; when, and when each of the others and the new one had done its first operation."""
        at = self._forks.kill(self._pids.pop(number))
        lines = self._hear()
        return {"at": at, "lines": [*lines, self._forks.hear(self._waits, _TIMEOUT)]}

    def scatter(self) -> None:
        """Kill those that are left."""
        pids, self._pids, self._waits = [*self._pids, *([self._waits] if self._waits else [])], [], 0
        for pid in pids:
            self._forks.kill(pid)

    def _hear(self) -> list[dict[str, Any]]:
        return [self._forks.hear(pid, _TIMEOUT) for pid in self._pids]

    def _join(
        self, world: str, sizes: tuple[int, int], seat: str, state: Any = None, last_call: float = 1.0
    ) -> mw.World:
        return mw.join(
            world, None, sizes, store=self._store, seat=seat, timeout=_TIMEOUT, hang_timeout=_HANG,
            last_call=last_call, state=state,
        )  # fmt: skip

    def _stay(self, tell: Callable[..., None], name: str, number: int, count: int) -> None:
        world = self._join(name, (count, count + 1), f"member{number}")
        operate(world)
        tell(ready=True)
        held = longest = 0.0
        changed = False
        while True:
            began = time.perf_counter()
            operate(world)
            if changed:  # the first operation of the new generation belongs to the change
                longest = max(longest, time.perf_counter() - began)
                tell(held=held, longest=longest, size=world.world_size)
                held = longest = 0.0
            time.sleep(_STEP)
            before = time.perf_counter()
            changed = world.advance()
            ended = time.perf_counter()
            held = max(held, ended - before)
            longest = max(longest, ended - began)

    def _survive(self, tell: Callable[..., None], name: str, number: int, count: int, size: int) -> None:
        world = self._join(name, (2, count), f"member{number}", _State(size, 1.0), _ALL_COME)
        operate(world)
        tell(ready=True)
        try:
            while True:
                operate(world)
        except mw.BrokenWorldException:
            noticed = time.monotonic()
        world.reform()
        # On a busy machine the one that waits may have claimed its place too late for it.
        while world.world_size < count:
            time.sleep(_STEP)
            world.advance()
        operate(world)
        tell(noticed=noticed, first=time.monotonic(), size=world.world_size, whole=True)
        forever()

    def _wait(self, name: str, count: int, size: int) -> None:
        def run(tell: Callable[..., None]) -> None:
            state = _State(size, 0.0)
            tell(calling=True)
            world = self._join(name, (2, count), "new", state, _ALL_COME)
            operate(world)
            first = time.monotonic()
            tell(first=first, size=world.world_size, whole=bool((state.tensor == 1.0).all()))
            forever()

        self._waits = self._forks.start(run)
        self._forks.hear(self._waits, _TIMEOUT)
