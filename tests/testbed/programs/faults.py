"""The programs of the defect matrix: what the ranks of each scenario do, and what the observers look at.

An observer sends ``ready`` from inside the call that the fault is to meet; the runner then does the fault. A
program that lets it happen itself, by a knob of the double, sends ``fault`` at that moment.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from programs.faultkit import (
    FOREVER,
    OPS,
    Party,
    Pending,
    default_world,
    leave,
    other_world,
    stay,
    step,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from bed.rank import Rank

SETTLE = 0.3
POLL = 0.005
TICK = 0.02
LEISURE = 0.5
"""Between a bystander's operations: torch listens for dump signals only where it has had no work for a moment."""
STOPPED = -1000.0
LOOKS = 5
SPINS = 2.0
"""Seconds after which a thread that was never seen asleep counts as being inside its call."""


def _poll(pending: Pending) -> None:
    for work in pending.works:
        while not work.is_completed():
            time.sleep(POLL)


def _future(pending: Pending) -> None:
    for work in pending.works:
        work.get_future().wait()


def _stream(pending: Pending) -> None:
    pending.wait()
    torch.cuda.current_stream().synchronize()


CALLERS: dict[str, Callable[[Pending], None]] = {
    "wait": Pending.wait,
    "synchronize": lambda pending: [work.synchronize() for work in pending.works] and None,
    "stream": _stream,
    "poll": _poll,
    "future": _future,
}


def _observe(rank: Rank, party: Party, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Start an operation, meet the fault in a call, and look at what is left; `meanwhile` is done in between."""
    config = rank.config
    pending = OPS[config["op"]](party)
    _when_inside(lambda: _ready(rank, config.get("fault_knobs")))
    step(rank, "caller", lambda: CALLERS[config["caller"]](pending))
    step(rank, "read", pending.read)
    meanwhile()
    _afterwards(rank, party, pending)


def _afterwards(rank: Rank, party: Party, pending: Pending) -> None:
    work = pending.works[-1]
    if hasattr(work, "exception"):  # a coalescing manager has none
        step(rank, "exception", lambda: type(work.exception()).__name__)
    step(rank, "again", pending.wait)
    if hasattr(work, "synchronize"):
        step(rank, "again synchronize", lambda: [each.synchronize() for each in pending.works] and None)
    if rank.config.get("at_once"):
        step(rank, "at once", lambda: OPS["all_reduce"](party).wait())
    # Whoever has to die of the fault has the time to; and another communicator of the group, to be cleaned up.
    time.sleep(rank.config.get("linger", 2.0))
    step(rank, "later", lambda: OPS["all_reduce"](party).wait())


def _when_inside(then: Callable[[], None]) -> None:
    """Do something when this thread is inside its next call: asleep whenever one looks.

    A call that spins, as CUDA's own may, never is: then a time must do.
    """
    stat = Path(f"/proc/self/task/{threading.get_native_id()}/stat")

    def look() -> None:
        seen, deadline = 0, time.monotonic() + SPINS
        while seen < LOOKS and time.monotonic() < deadline:
            seen = seen + 1 if stat.read_text().rpartition(")")[2].split()[0] == "S" else 0
            time.sleep(POLL)
        then()

    threading.Thread(target=look, daemon=True).start()


def _ready(rank: Rank, knobs: dict[str, Any] | None) -> None:
    """Say that the fault may come; turn the knobs that are the fault, if some are."""
    rank.event("ready")
    if knobs is not None:
        time.sleep(SETTLE)
        rank.event("fault")
        for name, value in knobs.items():
            rank.bed.set(name, value)


def _warm(rank: Rank, party: Party) -> None:
    """Make the communicators that the scenario's operation needs: making one is not what is looked at."""
    for op in dict.fromkeys(("all_reduce", rank.config.get("op", "all_reduce"))):
        OPS[op](party).wait()
    torch.cuda.synchronize()
    for name, value in rank.config.get("knobs", {}).items():
        rank.bed.set(name, value)


def peer_lost(rank: Rank) -> None:
    """One group; the last rank is lost while the others are in an operation with it."""
    config = rank.config
    party = default_world(
        rank, "A", rank.rank, rank.world_size, backend=config["backend"], timeout=config.get("timeout", 600)
    )
    _warm(rank, party)
    if rank.rank == rank.world_size - 1:
        stay(rank)
    _observe(rank, party)
    if config.get("destroy"):
        step(rank, "destroy", dist.destroy_process_group)
    leave(rank)


def rebuilt(rank: Rank) -> None:
    """Ranks 0 and 1 are a group, 1 is lost, and 0 makes a new one with 2 under another prefix of the store."""
    backend = rank.config["backend"]
    if rank.rank == 2:
        rank.event("ready")
        party = default_world(rank, "A2", 1, 2, backend=backend)
        for _ in range(3):
            party.healthy()
        time.sleep(FOREVER)
    party = default_world(rank, "A", rank.rank, 2, backend=backend)
    _warm(rank, party)
    if rank.rank == 1:
        stay(rank)
    _observe(rank, party)
    step(rank, "destroy", dist.destroy_process_group)
    made: list[Party] = []

    def again() -> str:
        made.append(default_world(rank, "A2", 0, 2, backend=backend))
        return made[0].healthy()

    step(rank, "rebuilt", again)
    for number in range(2):
        step(rank, f"rebuilt {number + 2}", made[0].healthy)
    leave(rank)


def bystanders(rank: Rank) -> None:
    """Ranks 0 and 1 are one world, 2 and 3 another; they share a store server and nothing else. 1 is lost."""
    config = rank.config
    name, place = ("A", rank.rank) if rank.rank < 2 else ("B", rank.rank - 2)
    party = default_world(rank, name, place, 2, backend=config["backend"])
    _warm(rank, party)
    if rank.rank == 1:
        stay(rank)
    if rank.rank == 0:
        _observe(rank, party)
        leave(rank)
    rank.event("ready")
    step(rank, "healthy meanwhile", lambda: _tick_for(party, config["linger"]))
    leave(rank)


def _tick_for(party: Party, seconds: float) -> str:
    """Both members leave the loop by the same value, as two clocks never agree."""
    until = time.monotonic() + seconds
    while True:
        over = party.rank == 0 and time.monotonic() > until
        tensor = party.filled(STOPPED if over else 1.0)
        party.group.allreduce([tensor]).wait()
        value = tensor.cpu()[0].item()
        if value < 0:
            return "right"
        if value != party.size:
            return f"wrong: {value:g}"
        time.sleep(LEISURE)


class _Ticker:
    """A thread that goes on using the healthy group, and remembers the worst it saw."""

    def __init__(self, party: Party) -> None:
        self._party = party
        self._stop = threading.Event()
        self._worst = 0.0
        self._said = "right"
        self._began: float | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        torch.cuda.set_device(self._party.device)
        with torch.cuda.stream(torch.cuda.Stream()):
            while not self._stop.is_set():
                self._began = time.monotonic()
                try:
                    said = self._party.healthy()
                except Exception as exc:  # noqa: BLE001 -- told as the result
                    said = type(exc).__name__
                self._worst = max(self._worst, time.monotonic() - self._began)
                if said != "right":
                    self._said = said
                    return
                self._stop.wait(TICK)

    def result(self) -> str:
        """Return "right" or what was wrong; an operation that does not end is waited for by the caller's step."""
        self._stop.set()
        self._thread.join()
        return self._said

    def worst_ms(self) -> int:
        return round(self._worst * 1000)


def two_worlds(rank: Rank) -> None:
    """Rank 0 is in two worlds, with rank 1 and with rank 2; rank 1 is lost."""
    config = rank.config
    backend = config["backend"]
    if rank.rank == 1:
        party = default_world(rank, "A", 1, 2, backend=backend)
        _warm(rank, party)
        stay(rank)
    if rank.rank == 2:
        party = other_world(rank, "B", 1, 2, backend=backend)
        party.healthy()
        rank.event("ready")
        while True:
            party.healthy()
    mine = default_world(rank, "A", 0, 2, backend=backend)
    _warm(rank, mine)
    other = other_world(rank, "B", 0, 2, backend=backend)
    other.healthy()
    ticker = _Ticker(other)
    # Streams of their own: what waits for the broken world on a stream must not hold up what is on it after.
    with torch.cuda.stream(torch.cuda.Stream()):
        _observe(rank, mine, lambda: _use(rank, other, "healthy"))
    _use(rank, other, "healthy again")
    step(rank, "other thread", ticker.result)
    step(rank, "other thread's worst", ticker.worst_ms)
    if config.get("destroy"):
        step(rank, "destroy", dist.destroy_process_group)  # of torch's every group: the other one goes too
    leave(rank)


def _use(rank: Rank, other: Party, name: str) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        step(rank, name, other.healthy)


def enqueue_error(rank: Rank) -> None:
    """A call into NCCL fails while an operation is enqueued; then the same thread uses a healthy group."""
    config = rank.config
    party = default_world(rank, "A", rank.rank, 2, backend=config["backend"])
    _warm(rank, party)
    other = other_world(rank, "B", rank.rank, 2, backend=config["backend"])
    other.healthy()
    if rank.rank == 1:
        rank.event("ready")
        while True:
            other.healthy()
    rank.event("ready")
    rank.event("fault")
    with rank.bed.knobs(**config["fault_knobs"]):
        step(rank, "caller", lambda: OPS[config["op"]](party) and None)
        step(rank, "depth", lambda: rank.bed.count("group_depth"))
    _use(rank, other, "healthy")
    _use(rank, other, "healthy again")
    step(rank, "later", lambda: OPS["all_reduce"](party) and None)
    time.sleep(config.get("linger", 1.0))
    leave(rank)


def made_in_vain(rank: Rank) -> None:
    """A communicator cannot be made: NCCL says so, or it takes too long, or the peer dies meanwhile."""
    config = rank.config
    for name, value in config.get(f"knobs_of_{rank.rank}", {}).items():
        rank.bed.set(name, value)
    rank.event("ready")
    if rank.rank == 0 and config.get("own_fault", True):
        rank.event("fault")
    found: list[Pending] = []

    def call() -> None:
        party = default_world(
            rank, "A", rank.rank, 2, backend=config["backend"], timeout=config.get("timeout", 600)
        )
        found.append(OPS["all_reduce"](party))
        found[0].wait()

    step(rank, "caller", call)
    if found:
        step(rank, "read", found[0].read)
    time.sleep(FOREVER if rank.rank == 1 else config.get("linger", 2.0))
    leave(rank)
