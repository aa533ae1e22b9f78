"""The members, what happens to them, and what they tell of it. In the process that they are forked from."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

# What a member needs is loaded before it is forked.
import torch.distributed
import torch.distributed.distributed_c10d

import multiworld._c10d.groups
import multiworld._c10d.lane.state_transfer
import multiworld._c10d.routing.router
import multiworld._join.advancing
import multiworld._join.join
import multiworld._net.stores.succession  # noqa: F401  (loaded before processes are forked)
from benchmarks.chaos.member import Member, Terms
from benchmarks.measuring.forks import Forks
from benchmarks.measuring.ports import unasked_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LEAST, MOST = 2, 8
FAULTS = ("start", "kill", "stop", "go on", "leave", "store")
_FEWEST = 4
"""Members that work, below which none is taken away."""
_PATIENCE = 60.0


def make(rank: int, count: int, args: dict[str, Any]) -> Crowd:
    """The rank that members are forked from."""
    torch.set_num_threads(1)
    return Crowd()


@dataclass
class Process:
    """A member's process, as the driver knows it.

    Attributes:
        number: of the process.
        pid: its own.
        orders: descriptor for what it is told.
        state: "live", "stopped", "leaving" or "gone".
        pair: the world of two that it is in, or was in last; "" for none.
        told: its last report.
    """

    number: int
    pid: int
    orders: int
    state: str = "live"
    pair: str = ""
    told: dict[str, Any] = field(default_factory=dict)


class Crowd:
    """Commands of the process that members are forked from. It is in no world and has one thread."""

    def __init__(self) -> None:
        self._forks = Forks()
        self._numbers = itertools.count()
        self._every: dict[int, Process] = {}  # by pid; one that is gone may have another's by now
        self._pairs: set[str] = set()  # to whose members nothing was done
        self._terms = Terms("", LEAST, MOST, 1.0)
        self._ports: list[int] = []
        self._chance = random.Random(0)  # noqa: S311  (nothing secret)
        self._track: list[tuple[float, int, int]] = []
        self._found = _nothing()

    def begin(self, members: int, hang_timeout: float, seed: int) -> None:
        """Start the first members; returns when they work together.

        Args:
            members: how many.
            hang_timeout: of all worlds, seconds.
            seed: of what happens.
        """
        self._chance = random.Random(seed)  # noqa: S311  (chance with a seed, no secret)
        self._ports = unasked_ports(3)
        store = "tcp://" + ",".join(f"127.0.0.1:{port}" for port in self._ports)
        self._terms = Terms(store, LEAST, MOST, hang_timeout)
        for _ in range(members):
            self._start()
        self.settle(members)

    def fault(self) -> str:
        """Have one thing happen; what it was."""
        self._listen(0.0)
        what = self._chosen()
        if what == "start":
            self._start()
        elif what == "go on":
            process = self._of("stopped")[0]
            os.kill(process.pid, signal.SIGCONT)
            process.state = "live"
        else:
            victim = self._server() if what == "store" else self._chance.choice(self._of("live"))
            if victim is None:  # another takes over at this moment
                return "none"
            self._pairs.discard(victim.pair)
            if what == "leave":
                self._order(victim, "leave")
                victim.state = "leaving"
            elif what == "stop":
                self._forks.stop(victim.pid)
                victim.state = "stopped"
            else:
                self._forks.kill(victim.pid)
                self._gone(victim)
        return what

    def wait(self, seconds: float) -> None:
        """Hear what the members tell for so long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._listen(left)

    def settle(self, members: int) -> float:
        """Have so many members work, all in one generation, with every pair going on; seconds until they did.

        Raises:
            RuntimeError: they do not.
        """
        began = time.monotonic()
        for process in self._of("stopped"):
            os.kill(process.pid, signal.SIGCONT)
            process.state = "live"
        while len(self._of("live")) > members:
            leaving = self._of("live")[-1]
            self._order(leaving, "leave")
            leaving.state = "leaving"
            self._pairs.discard(leaving.pair)
        while len(self._of("live")) < members:
            self._start()
        while not self._settled(members, began):
            self._listen(0.2)
            if time.monotonic() - began > _PATIENCE:
                raise RuntimeError(f"{members} members do not work together: {self._every}")
        return time.monotonic() - began

    def reports(self) -> dict[str, Any]:
        """What was told since the last call; `track`: see `benchmarks.chaos.part.Track`."""
        self._listen(0.0)
        found, self._found = self._found, _nothing()
        track, self._track = self._track, []
        held = [each.told for each in self._of("live") if "now" in each.told]
        return found | {
            "track": track,
            "more_descriptors": max((each["now"] - each["first"] for each in held), default=0),
        }

    def end(self) -> None:
        """Kill all."""
        for process in [each for each in self._every.values() if each.state != "gone"]:
            self._forks.kill(process.pid)
            self._gone(process)

    # -- what happens

    def _chosen(self) -> str:
        live, stopped = len(self._of("live")), len(self._of("stopped"))
        missing = MOST - live - stopped - len(self._of("leaving"))
        weights = dict.fromkeys(FAULTS, 1.0 if live > _FEWEST else 0.0)
        weights["stop"] *= stopped == 0
        weights |= {"start": 2.0 * max(missing, 0), "go on": 2.0 * stopped}
        return self._chance.choices(FAULTS, [weights[each] for each in FAULTS])[0]

    def _start(self) -> None:
        number = next(self._numbers)
        reading, writing = os.pipe()
        terms = self._terms

        def run(tell: Callable[..., None]) -> None:
            Member(terms, number, tell, reading).live()

        process = Process(number, self._forks.start(run), writing)
        os.close(reading)
        self._every[process.pid] = process
        alone = [each for each in self._of("live") if each is not process and each.pair not in self._pairs]
        if alone:
            other, name = self._chance.choice(alone), f"pair{number}"
            self._pairs.add(name)
            for rank, each in enumerate((other, process)):
                each.pair = name
                self._order(each, [name, rank])

    def _server(self) -> Process | None:
        """The process that listens at an address of the store, and may be killed."""
        inodes = {f"socket:[{inode}]" for inode in _listening(self._ports)}
        for process in self._of("live"):
            if inodes & set(_descriptors(process.pid)):
                return process
        return None

    def _order(self, process: Process, what: Any) -> None:
        os.write(process.orders, json.dumps(what).encode() + b"\n")

    def _gone(self, process: Process) -> None:
        process.state = "gone"
        os.close(process.orders)

    def _of(self, state: str) -> list[Process]:
        return [each for each in self._every.values() if each.state == state]

    # -- what they tell

    def _listen(self, within: float) -> None:
        """Take in what comes first within that time, and all that lies there."""
        for pid, told in self._forks.listen(within):
            self._take(self._every[pid], told)

    def _take(self, process: Process, told: dict[str, Any]) -> None:
        if "steps" in told:
            process.told = told
            self._track.append((told["at"], told["generation"], told["steps"]))
            self._found["sizes"].append(told["size"])
        elif "left" in told:
            self._forks.kill(process.pid)
            self._gone(process)
        elif "pair" in told:
            if told["pair"] in self._pairs:
                self._pairs.discard(told["pair"])
                self._found["broken"].append(f"process {process.number}, {told['pair']}: {told['over']}")
        else:
            self._found["reformed"].append(told["reformed"])

    def _settled(self, members: int, since: float) -> bool:
        live = self._of("live")
        told = [each.told for each in live]
        pairs = [each for each in live if each.pair in self._pairs]
        return (
            not self._of("leaving")
            and len(live) == members
            and all(each.get("at", 0.0) > since for each in told)
            and {(each["size"], each["generation"]) for each in told} == {(members, told[0]["generation"])}
            and all(each.pair in each.told["pairs"] for each in pairs)
        )


def _descriptors(pid: int) -> Iterator[str]:
    """What its threads have open: some have a descriptor table of their own."""
    for each in Path(f"/proc/{pid}/task").glob("*/fd/*"):
        with contextlib.suppress(OSError):  # closed meanwhile
            yield str(each.readlink())


def _nothing() -> dict[str, Any]:
    return {"broken": [], "reformed": [], "sizes": []}


def _listening(ports: list[int]) -> list[str]:
    """Inodes of the sockets that listen at these ports of this machine."""
    rows = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    fields = [row.split() for row in rows]
    return [each[9] for each in fields if each[3] == "0A" and int(each[1].rpartition(":")[2], 16) in ports]
