"""Joiners for tests of the rendezvous: requests, a store in memory, and a world in which time is simulated.

For real threads there are `together`, `until` and a `Clock` that stands still until the test moves it.

In a `Simulation` every joiner is a greenlet, which runs until its next call of the store or of sleep: whose turn it
is then is drawn from a seed. So any interleaving of round trips can happen, and happens again with the same seed.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable

from greenlet import getcurrent, greenlet

from multiworld._core.membership.ledger import Ledger, decode
from multiworld._core.membership.request import JoinRequest
from multiworld._core.membership.roster import Endpoint, Roster
from multiworld._net.stores.record import StoreLike, WorldRecord
from multiworld._net.stores.rendezvous import Rendezvous

PATIENCE = 120.0
"""Seconds; no test takes that long when all is well, on a machine that runs."""


def together(*calls: Callable[[], object], within: float = 2 * PATIENCE) -> list[object]:
    """What the calls return or raise, each made in a thread of its own."""
    results: list[object] = [None] * len(calls)

    def run(at: int) -> None:
        try:
            results[at] = calls[at]()
        except BaseException as error:  # noqa: BLE001  (looked at by the test)
            results[at] = error

    threads = [threading.Thread(target=run, args=(at,), daemon=True) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(within)
        assert not thread.is_alive()
    return results


def until(condition: Callable[[], object]) -> None:
    """Wait for something that another thread or process does."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.002)


def until_claimed(store: StoreLike, ranks: set[int], world: str = "w") -> None:
    """Wait until exactly these ranks are claimed in the open attempt of a world."""
    record = WorldRecord(store, world, time.sleep)

    def claimed() -> bool:
        record.read()
        waiting = record.ledger.waiting
        return waiting is not None and {claim.rank for claim in waiting.claims} == ranks

    until(claimed)


def until_ready(store: StoreLike, ranks: set[int], world: str = "w") -> None:
    """Wait until exactly these ranks of the sealed attempt have said that they are ready."""
    record = WorldRecord(store, world, time.sleep)

    def ready() -> bool:
        record.read()
        current = record.ledger.current
        return current is not None and set(current.ready) == ranks

    until(ready)


class Clock:
    """Stands still; `now` is moved by the test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def ask(rank: int, size: int = 2, who: int | None = None, **changes: object) -> JoinRequest:
    """A request by process number `who`, by default the one named as its rank."""
    who = rank if who is None else who
    fields: dict[str, object] = {
        "world": "w", "rank": rank, "size": size, "backend": "gloo", "device_type": "cpu",
        "process": f"{who:032x}", "endpoint": Endpoint(f"10.0.{who >> 8}.{who & 255}", 1000 + who), "pid": 1000 + who,
        "hostname": f"host{who}", "hang_timeout": 5.0,
    }  # fmt: skip
    return JoinRequest(**(fields | changes))  # type: ignore[arg-type]


class MemoryStore:
    """What HashStore does, in a dictionary; every call is counted, and told to `before` first. Any thread."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self.keys: dict[str, str] = {}
        self.calls = 0
        self._before = before
        self._lock = threading.Lock()

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        self._called()
        with self._lock:
            there = self.keys.get(key)
            if (there is None and expected == "") or (there is not None and there == expected):
                self.keys[key] = desired
                return desired.encode()
            return (expected if there is None else there).encode()

    def add(self, key: str, amount: int, /) -> int:
        self._called()
        with self._lock:
            self.keys[key] = str(int(self.keys.get(key, "0")) + amount)
            return int(self.keys[key])

    def delete_key(self, key: str, /) -> bool:
        self._called()
        return self.keys.pop(key, None) is not None

    appends = True

    def append(self, key: str, value: str, /) -> None:
        self._called()
        with self._lock:
            self.keys[key] = self.keys.get(key, "") + value

    def _called(self) -> None:
        self._before()
        self.calls += 1


class Killed(BaseException):
    """The joiner's process has died: it does nothing more."""


class Joiner:
    """One process that joins: what it asked for, and what came of it."""

    def __init__(self, sim: Simulation, request: JoinRequest, start: float, timeout: float) -> None:
        self.request = request
        self.start, self.timeout = start, timeout
        self.die_after: int | None = None  # calls of the store
        self.cancel_at = float("inf")
        self.fails_to_build = False
        self.roster: Roster | None = None
        self.committed = False
        self.error: BaseException | None = None
        self.ended = 0.0
        self.dead = False
        self.attempt = 0
        self.turn = greenlet(self.run)
        self.wake = start
        self.done = False
        self._sim = sim
        self._calls = 0
        self.rendezvous: Rendezvous | None = None

    def pause(self, seconds: float) -> None:
        """Let others run, for so many seconds at least."""
        self.wake = self._sim.now + seconds
        self._sim.turns.switch()
        self._die_if_dead()

    def before_call(self) -> None:
        self._die_if_dead()
        self._calls += 1
        if self.die_after is not None and self._calls > self.die_after:
            self.dead = True
            raise Killed
        self.pause(self._sim.random.choice((0.0, 0.0001, 0.001)))

    def _die_if_dead(self) -> None:
        if self.dead:
            raise Killed

    def run(self) -> None:
        try:
            self._join()
        except BaseException as error:  # noqa: BLE001  (Killed is one, and all are looked at)
            self.error = error
        self.ended = self._sim.now
        self.done = True

    def _join(self) -> None:
        sim = self._sim
        way = self.rendezvous = Rendezvous(
            sim.store_of(self),
            self.request,
            deadline=sim.now + self.timeout,
            cancelled=lambda: sim.now >= self.cancel_at,
            clock=lambda: sim.now,
            sleep=self.pause,
            probe=sim.probe,
        )
        try:
            self.roster = way._agree()
            self.pause(sim.random.uniform(0, 0.05))
            if self.fails_to_build:
                error = RuntimeError("no group")
                way._last_words(error)
                raise error
            way._commit()
            self.committed = True
        finally:
            self.attempt = way._number


class Simulation:
    """Joiners, one store, and a clock that jumps to whoever wakes next."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311
        self.now = 0.0
        self.turns = getcurrent()
        self.joiners: list[Joiner] = []
        self.keys: dict[str, str] = {}
        self.written: list[Ledger] = []  # every record there ever was

    def joiner(self, request: JoinRequest, *, start: float = 0.0, timeout: float = 5.0) -> Joiner:
        made = Joiner(self, request, start, timeout)
        self.joiners.append(made)
        return made

    def store_of(self, joiner: Joiner) -> MemoryStore:
        store = _Watched(joiner.before_call, self)
        store.keys = self.keys
        return store

    def probe(self, endpoints: Iterable[Endpoint], within: float) -> dict[Endpoint, bool | None]:
        gone = {each.request.endpoint for each in self.joiners if each.dead}
        return {endpoint: endpoint not in gone for endpoint in endpoints}

    def run(self, limit: float = 1000.0) -> None:
        """Until every joiner has ended; a clock that goes beyond `limit` is a hang."""
        while left := [each for each in self.joiners if not each.done]:
            soonest = min(each.wake for each in left)
            self.now = max(self.now, soonest)
            assert self.now < limit, "somebody waits for ever"
            chosen = self.random.choice([each for each in left if each.wake <= self.now])
            chosen.turn.switch()


class _Watched(MemoryStore):
    def __init__(self, before: Callable[[], None], sim: Simulation) -> None:
        super().__init__(before)
        self._sim = sim

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        found = super().compare_set(key, expected, desired)
        if found.decode() == desired and key.endswith("/record") and desired.startswith("{"):
            self._sim.written.append(decode(desired, "w"))
        return found
