"""Processes of `rebuild`: four members, and the zygote of the rank that is killed."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

# What a replacement needs is loaded before it is forked.
import torch.distributed
import torch.distributed.distributed_c10d

import multiworld as mw
import multiworld._c10d.groups
import multiworld._c10d.routing.router
import multiworld._join.join
import multiworld.joinall
from benchmarks.measuring.forks import Zygote, forever
from benchmarks.measuring.store import Meeting
from multiworld.events import WorldJoining

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld.events import Event

SEATS = 4
_LAST = SEATS - 1
_TIMEOUT = 60.0
_HANG = 30.0


def make(rank: int, count: int, args: dict[str, Any]) -> Any:
    """Ranks 0 to 3 are members, 4 forks who takes the last seat."""
    torch.set_num_threads(1)
    return Replacements() if rank == SEATS else Member(rank)


def _join(store: str, name: str, seat: int) -> mw.World:
    return mw.join(name, seat, SEATS, store=store, timeout=_TIMEOUT, hang_timeout=_HANG)


def _join_planned(control: str, seat: int, attempt: int) -> mw.World:
    os.environ.update(M8D_CONTROL=control, RANK=str(seat), TORCHELASTIC_RESTART_COUNT=str(attempt))
    (world,) = mw.join_all(rejoin=True).values()
    return world


def _operate(world: mw.World) -> None:
    """The first operation of a generation.

    Raises:
        RuntimeError: its result is wrong.
    """
    tensor = torch.ones(1)
    world.all_reduce(tensor)
    if tensor.item() != SEATS:
        raise RuntimeError(f"all_reduce over {SEATS} members gave {tensor.item()}")


class Line:
    """One member's way through a rebuild: when it got where, in seconds of the machine's monotonic clock."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}
        self.retries = 0
        self.generation = 0
        self.error = ""
        self.done = threading.Event()

    def mark(self, what: str) -> None:
        """It is there now."""
        self.times.setdefault(what, time.monotonic())

    def rejoin(self, world: mw.World) -> None:
        """From the break to the first operation, as a program's own loop would do it."""
        self.mark("began")
        while True:
            try:
                world.rejoin()
                break
            except mw.JoinError:
                self.retries += 1
        self.operate(world)

    def operate(self, world: mw.World) -> None:
        """The world is active."""
        self.mark("active")
        _operate(world)
        self.mark("first")
        self.generation = world.generation

    def run(self, work: Callable[[], None]) -> None:
        """Do it, and keep what comes of it for the driver."""
        try:
            work()
        except Exception as error:  # noqa: BLE001  (raised by `Member.rebuilt`)
            self.error = f"{type(error).__name__}: {error}"
        self.done.set()

    def told(self) -> dict[str, Any]:
        """What the driver gets."""
        return {"times": self.times, "retries": self.retries, "generation": self.generation}


class Member(Meeting):
    """Commands of a member that lives through all rebuilds.

    The last one has no seat where one is killed. It keeps the store.
    """

    def __init__(self, seat: int) -> None:
        self._seat = seat
        self._store = ""
        self._world: mw.World | None = None
        self._line = Line()
        self._forget: Callable[[], None] = lambda: None

    def meet(self, store: str) -> None:
        """Where worlds meet from now on."""
        self._store = store

    def join(self, world: str) -> dict[str, float]:
        """Join a world of four, and use it; when that began, and when the first operation was done."""
        began = time.monotonic()
        self._world = _join(self._store, world, self._seat)
        _operate(self._world)
        return {"began": began, "first": time.monotonic()}

    def join_planned(self, control: str) -> None:
        """The same by `join_all`, with rejoins in the background."""
        self._world = _join_planned(control, self._seat, 0)
        _operate(self._world)

    def arm(self, how: str) -> None:
        """Wait for the break.

        Args:
            how: "loop": blocked in a receive from the last seat, then `rejoin`; "on_break": `rejoin` in the
                function that is told; "join_all": blocked in a receive, then `wait_active`.
        """
        line, world, begun = Line(), self._world, threading.Event()
        assert world is not None  # noqa: S101  (the driver has it join first)
        self._line = line
        if how == "on_break":

            def told(world: mw.World) -> None:
                line.mark("noticed")
                line.run(lambda: line.rejoin(world))

            self._forget = world.on_break(told)
            return

        def receive() -> None:
            tensor = torch.zeros(1)
            begun.set()
            try:
                world.recv(tensor, src=_LAST)
            except mw.BrokenWorldException:
                line.mark("noticed")
            if how == "join_all":
                world.wait_active()
                line.operate(world)
            else:
                line.rejoin(world)

        if how == "join_all":
            self._forget = mw.subscribe(lambda event: _joining(event, line))
        threading.Thread(target=line.run, args=(receive,), daemon=True, name="loop").start()
        begun.wait(_TIMEOUT)

    def rebuilt(self) -> dict[str, Any]:
        """When this member got where.

        Raises:
            RuntimeError: it did not come to the first operation.
        """
        if not self._line.done.wait(_TIMEOUT) or self._line.error:
            raise RuntimeError(self._line.error or f"not rebuilt in {_TIMEOUT:g} s: {self._line.times}")
        self._forget()
        return self._line.told()

    def leave(self) -> dict[str, Any]:
        """Close the world and join it again at once."""
        line, world = Line(), self._world
        assert world is not None  # noqa: S101  (the driver has it join first)
        line.mark("at")
        world.close()
        line.mark("noticed")
        line.rejoin(world)
        return line.told()

    def close(self) -> None:
        """Close the world for good."""
        if self._world is not None:
            self._world.close()
            self._world = None


def _joining(event: Event, line: Line) -> None:
    if isinstance(event, WorldJoining):
        line.mark("began")


class Replacements(Zygote):
    """Commands of the process that forks who takes the last seat."""

    def replacement(self, world: str, control: str, attempt: int) -> int:
        """Somebody who joins as the last seat and then waits to be killed; its pid, just before it joins.

        Args:
            world: its name.
            control: of the launcher, where `join_all` joins; "": `join` does.
            attempt: counts the processes of that seat.
        """

        def run(tell: Callable[..., None]) -> None:
            tell(calling=time.monotonic())
            line = Line()
            joined = _join_planned(control, _LAST, attempt) if control else _join(self._store, world, _LAST)
            line.operate(joined)
            tell(**line.told())
            forever()

        pid = self._forks.start(run)
        self._forks.hear(pid, _TIMEOUT)
        return pid

    def told(self, pid: int) -> dict[str, Any]:
        """When a replacement got where."""
        return self._forks.hear(pid, _TIMEOUT)

    def kill(self, pid: int) -> float:
        """SIGKILL; when it was sent."""
        return self._forks.kill(pid)
