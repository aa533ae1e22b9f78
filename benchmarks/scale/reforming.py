"""The survivors of a broken world reform: the real rendezvous, a simulated store.

Each survivor is a task (`benchmarks.scale.loop`) in which `multiworld._net.stores.rendezvous.Rendezvous`
runs unchanged, with the pure core that it calls. `WorldRecord` below it is modelled: a compare-and-set that
comes too late is not computed, only paid for, in time of the member, of the network and of the server, which
handles one request after the other.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks.scale.assumptions import Network, StoreCosts
from benchmarks.scale.loop import Loop, Task
from benchmarks.scale.watching import Cores, members
from multiworld._core.membership.ledger import Attempt, Claim, Ledger, Terms, encode
from multiworld._core.membership.letters import Letter, take_in
from multiworld._core.membership.request import JoinRequest
from multiworld._net.stores.record import TRIES, pause_before_try
from multiworld._net.stores.rendezvous import Rendezvous
from multiworld.errors import JoinError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from multiworld._core.membership.admission import Move
    from multiworld._core.membership.roster import Endpoint

LEAST = 2
AGAIN = 0.005
"""Seconds until an attempt that failed is made again, as `multiworld._join.join` does."""
_LETTER = 300
"""Bytes of a letter."""
_SMALL = 100
"""Bytes of a request that carries no record."""
T = TypeVar("T")
_NONE: Any = None
"""The store of a rendezvous whose record is simulated."""


def broken_world(size: int, per_host: int = 8) -> Ledger:
    """The record of a world in its first generation, all of whose members were ready."""
    everyone = [replace(each, seat=f"seat{each.rank}") for each in members(size, per_host)]
    claims = tuple(Claim(f"{each.rank:016x}", each, 0) for each in everyone)
    terms = Terms(size, "gloo", "cpu", least=min(LEAST, size))
    now = Attempt(1, terms, claims, generation=1, token="0" * 32, ready=tuple(range(size)))
    return Ledger(number=1, last=1, current=now)


def request(ledger: Ledger, rank: int, lost: tuple[int, ...], hang_timeout: float = 5.0) -> JoinRequest:
    """What a survivor asks for after the breakage of the ledger's generation."""
    now = ledger.current
    if now is None:
        raise ValueError("a ledger without a generation has no survivors")
    own, terms = now.claims[rank].member, now.terms
    return JoinRequest(
        world="w", rank=-1, size=terms.size, backend=terms.backend, device_type=terms.device,
        process=own.process, endpoint=own.endpoint, pid=own.pid, hostname=own.hostname,
        hang_timeout=hang_timeout, last_generation=now.generation, least=terms.least, seat=own.seat,
        past=tuple(each.member for each in now.claims), past_generation=now.generation, past_rank=rank,
        lost=lost,
    )  # fmt: skip


class Store:
    """The server: one request after the other, in the order of their arrival.

    Args:
        loop: time.
        network, costs: assumptions.
        ledger: the record at first.
        appends: whether it takes letters.

    Attributes:
        ledger: the record.
        version: how often it was replaced.
        length: bytes of its text.
        requests: that were handled.
        bytes: of these and their answers.
        tries: compare-and-sets of the record, also those that came too late.
        probes: connections that members made to see whether others are there.
    """

    def __init__(
        self, loop: Loop, network: Network, costs: StoreCosts, ledger: Ledger, *, appends: bool = True
    ) -> None:
        self.loop, self.costs, self.appends = loop, costs, appends
        self.ledger, self.version, self.length = ledger, 0, len(encode(ledger))
        self.requests = self.bytes = self.tries = self.probes = 0
        self.beats: dict[int | str, int] = {}
        self.letters: list[Letter] = []
        self._way = network.remote
        self._queue: deque[Callable[[], None]] = deque()
        self._busy = False

    def ask(self, handle: Callable[[], tuple[T, int]], then: Callable[[T], object]) -> None:
        """Have a request handled in its turn, by a function that returns the answer and the bytes of both."""

        def serve() -> None:
            answer, size = handle()
            self.requests += 1
            self.bytes += size
            self.loop.after(self.costs.request + size * self.costs.byte, lambda: finish(answer))

        def finish(answer: T) -> None:
            self.loop.after(self._way, lambda: then(answer))
            self._next()

        def come() -> None:
            self._queue.append(serve)
            if not self._busy:
                self._next()

        self.loop.after(self._way, come)

    def post(self, letter: Letter) -> tuple[None, int]:
        """Take a letter, which is not answered."""
        self.letters.append(letter)
        return None, _LETTER

    def write(self, ledger: Ledger) -> None:
        """Replace the record."""
        self.ledger, self.version, self.length = ledger, self.version + 1, len(encode(ledger))

    def _next(self) -> None:
        self._busy = bool(self._queue)
        if self._busy:
            self._queue.popleft()()


class Record:
    """Stands in for `multiworld._net.stores.record.WorldRecord`, see the module.

    Attributes:
        root: prefix of its keys.
        ledger: the record as last read.
    """

    def __init__(self, task: Task, store: Store, cores: Cores) -> None:
        self.root = "m8d/w"
        self.ledger = Ledger()
        self._version = -1
        self._task, self._store, self._cores = task, store, cores

    def read(self) -> bool:
        """Read the record; return whether it changed."""
        before, store = self._version, self._store
        version, ledger = self._ask(lambda: ((store.version, store.ledger), _SMALL + store.length))
        self._spend(0.0 if version == before else store.costs.decode * _claims(ledger))
        self._version, self.ledger = version, ledger
        return version != before

    def apply(
        self, step: Callable[[Ledger], Move], letter: Callable[[Ledger], Letter | None] = lambda _: None
    ) -> Move:
        """Replace the record by the result of `step`, as `WorldRecord` does."""
        store, costs, tries, posted = self._store, self._store.costs, 0, False

        def write(letters: list[Letter]) -> tuple[Move | None, int]:
            store.tries += 1
            size = _SMALL + 3 * store.length
            if self._version != store.version:
                return None, size
            move = step(store.ledger)
            if move.ledger is not store.ledger:
                move = replace(move, ledger=reduce(take_in, letters, move.ledger))
                store.write(move.ledger)
            return move, size

        while True:
            if posted and (known := step(self.ledger)).ledger is self.ledger:
                return known  # another member has written it
            letters = self._letters() if posted else []
            self._spend(costs.decode * len(letters))
            self._spend(costs.step * _claims(self.ledger))
            move = self._ask(partial(write, letters))
            self._version, self.ledger = store.version, store.ledger
            if move is not None:
                return move
            tries += 1
            self._spend(costs.decode * _claims(self.ledger))
            if tries > TRIES:
                if store.appends and not posted and (mine := letter(self.ledger)) is not None:
                    posted = True  # and no answer is waited for
                    store.ask(partial(store.post, mine), lambda _: None)
                chance = store.loop.random.random()
                self._task.sleep(pause_before_try(self.ledger, tries, chance, posted=posted))
                if posted:
                    self.read()

    def _letters(self) -> list[Letter]:
        store = self._store
        return self._ask(lambda: (list(store.letters), _SMALL + _LETTER * len(store.letters)))

    def _ask(self, handle: Callable[[], tuple[T, int]]) -> T:
        found: list[T] = []

        def begin(go_on: Callable[[], None]) -> None:
            def came(answer: T) -> None:
                found.append(answer)
                go_on()

            self._store.ask(handle, came)

        self._task.wait(begin)
        return found[0]

    def beat(self, slot: int | str) -> None:
        """Give a sign of life."""
        self._small(lambda beats: beats.update({slot: beats.get(slot, 0) + 1}))

    def beats(self, slot: int | str) -> str:
        """Return a value that changes with every sign of life."""
        return self._small(lambda beats: str(beats.get(slot, "")))

    def forget_beats(self, slot: int | str) -> None:
        """Delete the key of `beat`."""
        self._small(lambda beats: beats.pop(slot, None))

    def _small(self, do: Callable[[dict[int | str, int]], T]) -> T:
        return self._ask(lambda: (do(self._store.beats), _SMALL))

    def _spend(self, seconds: float) -> None:
        """Compute so long, on one of the host's cores."""
        loop = self._store.loop
        end = self._cores.begin(loop.now) + seconds
        self._cores.take(end)
        self._task.wait(lambda go_on: loop.at(end, go_on))


@dataclass
class Survivor:
    """One survivor, and when it got where.

    Attributes:
        request: of its join.
        agreed: seconds from the breakage until it had the next roster.
        active: until all had said that they are ready.
        tries: joins that came to nothing, and were made again.
        size: of the generation that it is in then.
        error: what ended it.
    """

    request: JoinRequest
    agreed: float = math.inf
    active: float = math.inf
    tries: int = 0
    size: int = 0
    error: str = ""


@dataclass(frozen=True)
class Reformed:
    """What came of a reform.

    Attributes:
        agreed: seconds until the last survivor had the roster.
        active: seconds until the generation was active on all.
        together: whether all survivors are in one generation.
        tries: compare-and-sets of the record.
        requests: to the store.
        bytes: of requests and answers.
        probes: connections made to see whether processes are there.
    """

    agreed: float
    active: float
    together: bool
    tries: int
    requests: int
    bytes: int
    probes: int


def reform(
    size: int,
    *,
    seed: int = 1,
    network: Network | None = None,
    costs: StoreCosts | None = None,
    cores: int = 0,
    building: float = 0.0,
    timeout: float = 30.0,
    letters: bool = True,
) -> Reformed:
    """A world of `size` loses its last member, and the others reform.

    Args:
        size: members before.
        seed: of chance.
        network: assumptions about it.
        costs: assumptions about the store and the record in it.
        cores: of each host; 0: as many as processes.
        building: seconds between agreement and readiness: connections and groups.
        timeout: of the joins.
        letters: whether the store takes letters (`multiworld._core.membership.letters`).
    """
    loop, network, costs = Loop(seed), network or Network(), costs or StoreCosts()
    store = Store(loop, network, costs, broken_world(size, network.per_host), appends=letters)
    lost = (size - 1,)  # its watchdog has told each of them
    survivors = [Survivor(request(store.ledger, rank, lost)) for rank in range(size - 1)]
    hosts = [Cores(cores) for _ in range((size - 1) // network.per_host + 1)]

    def live(survivor: Survivor, rank: int) -> Callable[[Task], None]:
        own = hosts[rank // network.per_host]
        return lambda task: _live(task, store, survivor, own, building, timeout)

    tasks = [
        Task(loop, live(each, rank), loop.random.uniform(0, 1e-3)) for rank, each in enumerate(survivors)
    ]
    loop.run(4 * timeout, lambda: all(task.done for task in tasks))
    for task in tasks:
        if task.error is not None:
            raise task.error
    return Reformed(
        agreed=max(each.agreed for each in survivors),
        active=max(each.active for each in survivors),
        together={each.size for each in survivors} == {size - 1},
        tries=store.tries,
        requests=store.requests,
        bytes=store.bytes,
        probes=store.probes,
    )


def _live(
    task: Task, store: Store, survivor: Survivor, cores: Cores, building: float, timeout: float
) -> None:
    """What a survivor's process does from the breakage on."""
    loop = task.loop
    deadline = loop.now + timeout

    def probe(endpoints: Iterable[Endpoint], _within: float) -> dict[Endpoint, bool | None]:
        found: dict[Endpoint, bool | None] = dict.fromkeys(endpoints, True)
        store.probes += len(found)
        task.sleep(len(found) * store.costs.probe)
        return found

    while True:
        way = Rendezvous(
            _NONE, survivor.request, deadline=deadline, clock=lambda: loop.now, sleep=task.sleep, probe=probe
        )
        way._record = Record(task, store, cores)  # type: ignore[assignment]  # noqa: SLF001  (its stand-in)
        try:
            roster = way._agree()  # noqa: SLF001  (`agree` runs it in a thread with real deadlines; so `commit`)
            survivor.agreed = loop.now
            task.sleep(building)
            way._commit()  # noqa: SLF001  (the step that is timed)
        except JoinError as error:
            survivor.tries += 1
            if loop.now + AGAIN >= deadline:
                survivor.error = f"{type(error).__name__}: {error}"
                return
            task.sleep(AGAIN)
        else:
            survivor.active, survivor.size = loop.now, roster.size
            return


def _claims(ledger: Ledger) -> int:
    attempts = (ledger.current, ledger.waiting, ledger.before)
    return sum(len(each.claims) for each in attempts if each is not None)
