"""The worlds of this process, its one watchdog, and what happens when the program ends."""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Protocol, TypeVar

from multiworld import background_threads
from multiworld.errors import InvalidJoinError, StaleGenerationError
from multiworld.events import State
from multiworld.exiting import before_threads_are_joined, failure
from multiworld.logs.source import about, logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld._generation.generation import Generation
    from multiworld.watchdog import Watchdog

__all__ = ["EXIT_BUDGET", "RegisteredWorld", "Registry", "Reservation", "registry"]

EXIT_BUDGET = 1.0
"""Seconds that closing all worlds may take when the program ends (the contract allows 2 for the whole
exit)."""

NAMES = 4096
"""Names of worlds whose last generation is known at most, beside those of worlds that are not closed: a program
that makes worlds under new names all the time does not grow by them."""

_log = logger(__name__)

_Value = TypeVar("_Value")


class Closable(Protocol):
    """What has threads of its own that use worlds."""

    def close(self, timeout: float = 5.0) -> bool:
        """End them, within `timeout` seconds."""


class RegisteredWorld(Protocol):
    """A `multiworld.World`, as the registry and joins know it."""

    _gen: Generation
    _stop_listening: Callable[[], None]

    @property
    def name(self) -> str:
        """The world's name."""

    @property
    def rank(self) -> int:
        """This process's rank."""

    @property
    def generation(self) -> int:
        """Number of its generation."""

    @property
    def state(self) -> State:
        """JOINING, ACTIVE, BROKEN or CLOSED."""

    def close(self) -> bool:
        """Leave it in good order."""

    def _close(self, seconds: float, failure: str = "") -> bool:
        """Leave it within `seconds`; `failure` is what ends the program, if anything."""

    def _forked(self) -> None:
        """In a forked child: it is the parent's."""


class Reservation:
    """A join's hold on its world's name, ended once with what came of the join: `world`, or None.

    Args:
        registry: of the process.
        name: of the world.
        rank: that is asked for.
        given_up: whether the join is undone.
        withdrawn: whether its world is closed where it came about already: what awaited the join was cancelled.
    """

    def __init__(
        self,
        registry: Registry,
        name: str,
        rank: int,
        given_up: Callable[[], bool] | None = None,
        withdrawn: Callable[[], bool] | None = None,
    ) -> None:
        self._registry = registry
        self._name = name
        self.rank = rank
        self.given_up = given_up or _never
        self._withdrawn = withdrawn or _never
        self.world: RegisteredWorld | None = None
        self.generation = 0

    def end(self) -> None:
        """Give the name back, to `world` if the join made it; harmless where it was never reserved."""
        if self.world is not None:  # a deadline, or the launcher's store, gives up no join that is over
            self.given_up = self._withdrawn
        self._registry.settle(self._name, self.world, self.generation, self.rank, self)


class Registry:
    """Names to worlds, thread-safe. One per process; a forked child starts with an empty one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a handler, or a destructor, may look at the worlds in the middle
        self._worlds: dict[str, RegisteredWorld] = {}
        self._joining: dict[str, object] = {}  # names that are being joined, by whom
        self._made_by: dict[str, object] = {}  # the joins of `_worlds`
        self._last: dict[str, tuple[int, int]] = {}
        self._noted: dict[str, int] = {}
        self._watchdog: Watchdog | None = None
        self._hooked = False
        self._fork_hooked = False
        self._ending = False
        self._pid = os.getpid()
        self._closables: weakref.WeakSet[Closable] = weakref.WeakSet()

    def worlds(self) -> dict[str, RegisteredWorld]:
        """Every world of this process that is not closed, by name, in the order they were joined."""
        with self._lock:
            self._check_fork()
            there = list(self._worlds.items())  # one step: such a destructor may remove one
            return {name: world for name, world in there if world.state is not State.CLOSED}

    @property
    def ending(self) -> bool:
        """Whether the program ends: joins that are under way are given up."""
        return self._ending and os.getpid() == self._pid

    def joining(self) -> tuple[str, ...]:
        """Names of the worlds that this process is joining now."""
        with self._lock:
            self._check_fork()
            return tuple(self._joining)

    def reserve(
        self, name: str, held: RegisteredWorld | None = None, join: object = None
    ) -> RegisteredWorld | None:
        """Take `name` for a join; return the world that holds it now and must be released first, if any.

        Args:
            name: of the world.
            held: the handle that asks to rejoin, None for a new join.
            join: the join, for `settle`.

        Raises:
            InvalidJoinError: this process is in an active world of that name, or is joining it.
            StaleGenerationError: `held` is not active, and another handle has the name since.
        """
        with self._lock:
            self._check_fork()
            if self._ending:
                raise InvalidJoinError(name, f"world {name!r} was to be joined while the program ends")
            if name in self._joining:
                raise InvalidJoinError(
                    name,
                    f"world {name!r} is being joined by another thread or task of this process",
                    rule="A process joins a world once",
                    next_step="Wait for that join, or use another name",
                )
            there = self._worlds.get(name)
            if (
                held is not None
                and there is not None
                and there is not held
                and there.state is not State.CLOSED
            ):
                raise StaleGenerationError(
                    name,
                    f"world {name!r} was joined anew in this process since generation {held.generation}: "
                    f"generation {there.generation}, which is {there.state}",
                    rule="The latest handle of a name is the one that rejoins",
                    next_step="Use multiworld.worlds()[name], or close that one first",
                )
            if there is not None and there.state is State.ACTIVE:
                raise InvalidJoinError(
                    name,
                    f"world {name!r} is active in this process: generation {there.generation}, rank {there.rank}",
                    rule="A process is in a world of a name once",
                    next_step="Use it, close it first, or use another name",
                )
            self._joining[name] = join
            return there if there is not held else None

    def being_undone(self, name: str) -> bool:
        """Whether a join that was given up has the name still: another one of that name waits for its end."""
        with self._lock:
            self._check_fork()
            there = self._worlds.get(name)
            join = self._joining.get(name)
            if join is None and there is not None and there.state is State.ACTIVE:
                join = self._made_by.get(name)
        return isinstance(join, Reservation) and join.given_up()

    def settle(
        self,
        name: str,
        world: RegisteredWorld | None,
        generation: int = 0,
        rank: int = -1,
        join: object = None,
    ) -> None:
        """End the reservation of `name`: with the joined world, or None where the join failed.

        Does nothing where `join` has no reservation: it was refused, or interrupted before it had one.
        """
        with self._lock:
            if self._joining.get(name, self) is not join:
                return
            del self._joining[name]
            before = self._worlds.get(name)
            if world is not None:
                if world._gen.state is not State.CLOSED:  # noqa: SLF001  (a callback may have)
                    self._worlds[name], self._made_by[name] = world, join
                self._keep(self._last, name, (generation, rank))
        if before is not None and world is not None and before is not world:
            before._stop_listening()  # noqa: SLF001  (the registry owns the process's worlds)

    def moved(self, name: str, generation: int, rank: int) -> None:
        """Note that the world of this name went on to another generation, in which this process has `rank`."""
        with self._lock:
            self._keep(self._last, name, (generation, rank))

    def _keep(self, kept: dict[str, _Value], name: str, value: _Value) -> None:
        kept.pop(name, None)
        kept[name] = value  # as the latest
        if len(kept) > NAMES:
            live = {*self._worlds, *self._joining, name}
            if (oldest := next((each for each in kept if each not in live), None)) is not None:
                del kept[oldest]

    def remove(self, name: str, world: RegisteredWorld) -> None:
        """Forget a closed world; not one that another thread has joined again since."""
        with self._lock:
            if self._worlds.get(name) is world and world._gen.state is State.CLOSED:  # noqa: SLF001  (a rejoin may have)
                del self._worlds[name]
                self._made_by.pop(name, None)
            last = not self._worlds
        if last:
            background_threads.dismiss()

    def last(self, name: str) -> tuple[int, int]:
        """The last generation of `name` this process was in, and its rank there; (0, -1) if it never was."""
        with self._lock:
            return self._last.get(name, (0, -1))

    def note(self, name: str, generation: int) -> None:
        """Note that members have agreed on this generation of `name`, whether it comes about or not."""
        with self._lock:
            self._keep(self._noted, name, max(generation, self._noted.get(name, 0)))

    def noted(self, name: str) -> int:
        """The latest generation of `name` that this process has agreed on; 0 if there is none."""
        with self._lock:
            return self._noted.get(name, 0)

    def watchdog(self) -> Watchdog:
        """The process's watchdog, made when it is first needed."""
        from multiworld.watchdog import Watchdog  # noqa: PLC0415  (not before the first join)

        with self._lock:
            self._check_fork()
            if self._watchdog is None:
                self._watchdog = Watchdog()
            self.hook()
            return self._watchdog

    def watchdog_still(self) -> float | None:
        """See `Watchdog.still`; makes none."""
        watchdog = self._watchdog
        return None if watchdog is None or os.getpid() != self._pid else watchdog.still()

    def close_at_end(self, what: Closable) -> None:
        """Close `what`, too, when the program ends; it is held weakly."""
        with self._lock:
            self._check_fork()
            self.hook()
            self._closables.add(what)

    def hook(self) -> None:
        """Have worlds closed, and this package's threads ended, when the program ends.

        Where it ends already, no world is joined any more: its threads would come back from torch while the
        interpreter ends, which ends the process by SIGABRT.
        """
        if not self._hooked:
            self._hooked = True
            if not before_threads_are_joined(self.close_all):
                self._ending = True
            if not self._fork_hooked:
                self._fork_hooked = True
                os.register_at_fork(after_in_child=self._forked)

    def close_all(self, timeout: float = EXIT_BUDGET, *, ending: bool = True) -> bool:
        """Close every world of this process, in parallel, within `timeout` seconds; `ending` gives up its joins."""
        if os.getpid() != self._pid:
            return True
        deadline = time.monotonic() + timeout
        with self._lock:
            self._ending = self._ending or ending
            open_worlds = list(self._worlds.values())
            closables = list(self._closables) if ending else []
        why = failure() if ending else None
        for each in closables:
            each.close(max(0.0, deadline - time.monotonic()))
        closers: list[threading.Thread] = []
        others: list[RegisteredWorld] = []
        for world in open_worlds:
            close = world._close  # noqa: SLF001  (the registry owns the process's worlds)
            name = f"m8d-close-{world.name}"
            closer = threading.Thread(target=close, args=(timeout, why or ""), daemon=True, name=name)
            try:
                closer.start()
            except RuntimeError:  # the process gets no other thread
                others.append(world)
            else:
                closers.append(closer)
        for world in others:
            self._close_here(world, max(0.0, deadline - time.monotonic()), why or "")
        for closer in closers:
            closer.join(max(0.0, deadline - time.monotonic()))
        left = [closer for closer in closers if closer.is_alive()]
        if ending:
            # Given up, they tell the other members, by way of the watchdog too. A daemon thread that is loading
            # modules as the interpreter ends may hold a lock for good that the end needs, logging's for one.
            while self._joining and time.monotonic() < deadline + background_threads.GRACE:
                time.sleep(0.002)
            if self._watchdog is not None:
                self._watchdog.stop(deadline)
            background_threads.end(deadline)
        return not left

    def _close_here(self, world: RegisteredWorld, seconds: float, why: str) -> None:
        try:
            world._close(seconds, why)  # noqa: SLF001  (the registry owns the process's worlds)
        except Exception:  # noqa: BLE001  (logged: the end goes on)
            _log.exception("world %r: it could not be closed", world.name, extra=about(world.name))

    def _forked(self) -> None:
        """In a forked child, right after the fork."""
        self._lock = threading.RLock()  # another thread may have held it
        worlds = tuple(self._worlds.values())
        self._check_fork()
        for world in worlds:
            world._forked()  # noqa: SLF001  (the registry owns the process's worlds)

    def _check_fork(self) -> None:
        # A forked child has copies of its parent's sockets and none of its threads: it starts from nothing,
        # and must not close what it does not own. Its joins are not judged by generations of its parent's.
        if os.getpid() != self._pid:
            self._worlds, self._joining, self._made_by, self._watchdog = {}, {}, {}, None
            self._last, self._noted = {}, {}
            self._pid, self._hooked, self._ending = os.getpid(), False, False
            self._closables = weakref.WeakSet()


def _never() -> bool:
    return False


registry = Registry()
"""The process's registry."""
