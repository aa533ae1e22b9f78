"""A member of the world to which everything happens, and of a pair to which nothing may.

It makes steps: some milliseconds of work, an `all_reduce`, an `advance`. Its state is a function of the
number of steps, so that a wrong one is seen. Beside that it exchanges messages with one other member in a
world of two.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import multiworld as mw

if TYPE_CHECKING:
    from collections.abc import Callable

WORLD = "chaos"
_TIMEOUT = 120.0
_LAST_CALL = 5.0
_STEP = 0.02
"""Seconds of a step's own work."""
_TELL = 0.2
"""Seconds between two reports."""
_PAUSE = 0.05
"""Seconds between two messages of a pair."""
_SIZE = 65_536
"""Elements of the state and of the `all_reduce`: 256 KiB."""


class Wrong(Exception):
    """A value is not what it must be; the message says which."""


class Weights:
    """A state whose elements are all the number of steps that were made."""

    def __init__(self) -> None:
        self.steps = 0
        self._tensor = torch.zeros(_SIZE)

    def state_dict(self) -> dict[str, Any]:
        """What newcomers get."""
        return {"steps": self.steps, "tensor": self._tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Be what another member was."""
        self.steps, self._tensor = state["steps"], state["tensor"]

    def step(self, summed: torch.Tensor, size: int) -> None:
        """Take in what all members have summed up: ones, of each of them.

        Raises:
            Wrong: the sum, or the state.
        """
        if not bool((summed == size).all()):
            raise Wrong(f"step {self.steps}: a sum of {size} ones is {summed.min()} to {summed.max()}")
        self._tensor += summed / size
        self.steps += 1
        if not bool((self._tensor == self.steps).all()):
            raise Wrong(f"the state after {self.steps} steps is {self._tensor.min()} to {self._tensor.max()}")


@dataclass(frozen=True)
class Terms:
    """How members join.

    Attributes:
        store: of all worlds.
        least: members that the world goes on with.
        most: members at a time.
        hang_timeout: seconds.
    """

    store: str
    least: int
    most: int
    hang_timeout: float


class Member:
    """One process.

    Args:
        terms: see there.
        number: of the process.
        tell: what the driver hears.
        lines: a descriptor on which orders come: "leave", or the name and rank of a pair to be.
    """

    def __init__(self, terms: Terms, number: int, tell: Callable[..., None], lines: int) -> None:
        self._terms, self._number, self._lines = terms, number, lines
        self._lock = threading.Lock()
        self._tell = tell
        self._pairs: dict[str, int] = {}
        self._leaving = threading.Event()

    def live(self) -> None:
        """Work until it is told to leave, and has left."""
        threading.Thread(target=self._obey, daemon=True).start()
        weights, terms = Weights(), self._terms
        world = mw.join(
            WORLD, None, (terms.least, terms.most), store=terms.store, seat=f"s{self._number}", state=weights,
            timeout=_TIMEOUT, hang_timeout=terms.hang_timeout, last_call=_LAST_CALL,
        )  # fmt: skip
        said, asked, first = 0.0, False, descriptors()
        while world.state is not mw.State.CLOSED:
            try:
                if self._leaving.is_set() and not asked:
                    world.leave()
                    asked = True
                time.sleep(_STEP)
                ones = torch.ones(_SIZE)
                world.all_reduce(ones)
                weights.step(ones, world.world_size)
                world.advance()
            except mw.BrokenWorldException:
                began = time.monotonic()
                world.reform()
                asked = False
                self.say(reformed=time.monotonic() - began, generation=world.generation)
            if time.monotonic() - said > _TELL:
                said = time.monotonic()
                self.say(
                    steps=weights.steps, at=said, size=world.world_size, generation=world.generation,
                    first=first, now=descriptors(), pairs=dict(self._pairs),
                )  # fmt: skip
        self.say(left=True)

    def say(self, **what: Any) -> None:
        """Tell the driver; any thread."""
        with self._lock:
            self._tell(**what)

    def _obey(self) -> None:
        with os.fdopen(self._lines) as lines:
            for line in lines:
                order = json.loads(line)
                if order == "leave":
                    self._leaving.set()
                else:
                    threading.Thread(target=self._pair, args=order, daemon=True).start()

    def _pair(self, name: str, rank: int) -> None:
        """Exchange messages with the other member of a pair until one of the two is lost or leaves."""
        try:
            with mw.joined(
                name,
                rank,
                2,
                store=self._terms.store,
                timeout=_TIMEOUT,
                hang_timeout=self._terms.hang_timeout,
            ) as world:
                self._pairs[name] = 0
                while not self._leaving.is_set():
                    _exchange(world, self._pairs[name])
                    self._pairs[name] += 1
                    time.sleep(_PAUSE)
        except (mw.BrokenWorldException, mw.JoinError) as error:
            self.say(pair=name, over=f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001  (the driver fails by it)
            self.say(error=f"{name}: {type(error).__name__}: {error}")
        finally:
            self._pairs.pop(name, None)


def _exchange(world: mw.World, number: int) -> None:
    """Send a message to the other one of two, and receive its.

    Raises:
        Wrong: that is not the one of this number.
    """
    given, got, other = torch.full((64,), float(number)), torch.zeros(64), 1 - world.rank
    if world.rank == 0:
        world.send(given, other)
        world.recv(got, other)
    else:
        world.recv(got, other)
        world.send(given, other)
    if not torch.equal(given, got):
        raise Wrong(f"{world.name}: message {number} is {got[0]}")


def descriptors() -> int:
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))
