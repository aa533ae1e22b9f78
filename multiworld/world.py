"""World: the user's handle of a fault domain, and the blocking face of everything in it."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from multiworld import reentry, settings
from multiworld._core import durations
from multiworld._core.membership.state_sources import advances
from multiworld._core.state_machine import CloseAsked
from multiworld._generation.background_release import releaser
from multiworld._generation.every_step import take_all
from multiworld.errors import InvalidJoinError, JoinTimeoutError, MultiworldError
from multiworld.events import Breakage, State, WorldBroken, WorldClosed, bus, require_callable
from multiworld.logs.source import about, logger
from multiworld.objects import ObjectCollectives
from multiworld.registry import registry
from multiworld.selecting import Selecting
from multiworld.turns import Turns, posted
from multiworld.uninterrupted import stream_of_caller

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    import torch
    from torch._C._distributed_c10d import ProcessGroup, Store

    from multiworld._c10d.elastic.group import ElasticGroup
    from multiworld._core.membership.roster import Member
    from multiworld._generation.generation import Generation
    from multiworld._generation.stage import StateMachine
    from multiworld._join.arguments import JoinPlan
    from multiworld.advances import Advances
    from multiworld.aio import Aio
    from multiworld.pending import PendingOperation

__all__ = ["World", "worlds"]

_log = logger(__name__)

_START_AGAIN = 1.0
"""Seconds between two tries to start a thread, where the host has none left for this process."""

_SUBSCRIBERS = 1.0
"""Seconds that `close` waits for another thread to tell subscribers of the breakage, and then of the close."""

_LOOK_EVERY = 1.0
"""Seconds between two looks of `wait_active`, which is woken when the world changes, too."""


class Rejoins(NamedTuple):
    """What makes a world's next generation: the functions of `multiworld._join`, which makes worlds.

    Attributes:
        advancing: makes what prepares it beside a working one.
        blocking: of `World.rejoin`: the world, the timeout and the store.
        awaited: of `World.rejoin_async`.
    """

    advancing: Callable[[World], Advances]
    blocking: Callable[[World, float | dt.timedelta | None, str | Store | None], World]
    awaited: Callable[[World, float | dt.timedelta | None, str | Store | None], Awaitable[World]]


class World(Selecting, ObjectCollectives):
    """A named fault domain: its own ranks, process group, store and generation. Made by `multiworld.join`.

    ``with world:`` makes unmodified ``torch.distributed`` calls mean this world, per thread and per asyncio
    task; it may be nested and re-entered. The collectives are methods too, and awaitable as ``world.aio``.

    Attributes:
        name, rank, world_size, backend, device: as joined.
    """

    def __init__(
        self, plan: JoinPlan, make_generation: Callable[[World], Generation], rejoins: Rejoins
    ) -> None:
        self._plan = plan
        self._rejoins = rejoins
        self._gen = make_generation(self)
        self._advances = rejoins.advancing(self)
        self._next: StateMachine | None = None  # of the generation that a rejoin makes
        self._watchers: tuple[_Watcher, ...] = ()
        self._watch_lock = threading.Lock()
        self._changed = threading.Condition(self._watch_lock)
        self._told: Generation | None = None  # whose breakage the watchers heard of
        # Others see by its listener that this process lives, where ranks are assigned.
        self._stop_listening: Callable[[], None] = _nothing
        self._closes = 0  # `join_all` asks whether the program has closed the world since it looked
        self._whole: Generation | None = None  # the last one in which this member had the world's state
        self._behind: int | None = None  # which state it has, while the latest is still to come
        self._torn = False  # whether some of a state has come into this member's own, and not all
        self._turns = Turns()
        self._taken = self._turns.taken
        self._hold_back()
        self._aio: Aio | None = None
        self._elastic: ElasticGroup | None = None

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The world's name."""
        return self._plan.name

    @property
    def rank(self) -> int:
        """This process's rank, 0 to ``world_size - 1``; where ranks are assigned, in this generation."""
        return self._gen.rank

    @property
    def world_size(self) -> int:
        """How many members the world has; where ranks are assigned, in this generation."""
        return self._gen.size

    @property
    def backend(self) -> str:
        """Name of the backend: "gloo", "nccl", ..."""
        return self._plan.backend

    @property
    def device(self) -> torch.device:
        """The device that object collectives and barriers use here."""
        return self._plan.torch_device()

    @property
    def generation(self) -> int:
        """Counts the world's lives: 1 for the first, one more after each rejoin."""
        return self._gen.number

    @property
    def state(self) -> State:
        """ACTIVE, BROKEN or CLOSED (JOINING as long as a rejoin is under way)."""
        return State.JOINING if self._next is not None else self._gen.state

    @property
    def breakage(self) -> Breakage | None:
        """Why this generation is over; None as long as it is not."""
        return self._gen.breakage

    @property
    def busy(self) -> tuple[int, ...]:
        """Ranks, ascending, of the members that run, but give no sign of life for ``hang_timeout``."""
        return self._gen.busy if self._gen.state is State.ACTIVE else ()

    @property
    def members(self) -> tuple[Member, ...]:
        """Everyone in this generation, by rank: process, pid, hostname."""
        return self._gen.roster.members

    @property
    def seats(self) -> tuple[str, ...]:
        """The members' names by rank, which they keep when ranks are assigned anew; else the ranks as text."""
        return tuple(member.seat or str(member.rank) for member in self._gen.roster.members)

    @property
    def step(self) -> int:
        """How many times its members have called `advance`: a newcomer has the count of the others."""
        return self._advances.count

    @property
    def ready(self) -> bool:
        """Whether it is active and, where it was joined with a state, this member has the latest one."""
        gen = self._gen
        return self.state is State.ACTIVE and (self._plan.state is None or self._whole is gen)

    @property
    def group(self) -> ProcessGroup:
        """The ``torch.distributed.ProcessGroup`` behind it, for code that wants one.

        Raises:
            BrokenWorldException, WorldClosedError: the generation is over.
        """
        if self._gen.state is not State.ACTIVE:
            raise self._gen.error()
        return self._gen.pg

    @property
    def elastic_group(self) -> ElasticGroup:
        """One ``torch.distributed.ProcessGroup`` for all generations: it means the present one.

        Its rank and size change with the generation; operations raise `BrokenWorldException` while there is
        none. ``DistributedDataParallel(model, process_group=world.elastic_group)`` is made once, which raises
        as they do: its first forward pass in each generation, which all members make, gives all the
        parameters of rank 0.
        """
        if self._elastic is None:
            from multiworld._c10d.elastic import group  # noqa: PLC0415  (a world exists, so torch is loaded)

            with self._watch_lock:
                if self._elastic is None:
                    self._elastic = group.ElasticGroup(lambda: self._gen)
        return self._elastic

    @property
    def aio(self) -> Aio:
        """The same collectives, awaitable."""
        if self._aio is None:
            from multiworld.aio import Aio  # noqa: PLC0415  (asyncio is loaded by those who await)

            with self._watch_lock:
                if self._aio is None:  # one: its operations take turns
                    self._aio = Aio(self, self._turns)
        return self._aio

    def __repr__(self) -> str:
        return (
            f"<World {self.name!r} {self.state.value}, generation {self.generation}, rank {self.rank} of "
            f"{self.world_size}, {self.backend}>"
        )

    def pending(self, timeout: float | dt.timedelta = 1.0) -> tuple[PendingOperation, ...]:
        """Ask all members what they wait for: the operations that are not over, the longest first.

        ``print(*world.pending(), sep="\n")`` says who waits, since when, and what the missing members do::

            all_reduce #118: ranks 0, 1 and 3 wait since 3.2 s; rank 2 is at #117, in send to 3 since 3.1 s

        It may be called while other threads are in operations, and is answered while theirs are: only a member
        that holds the GIL, or is stopped, does not answer. The last 64 operations of each member count.

        Args:
            timeout: seconds, or a timedelta, that the members have to answer.

        Returns:
            Nothing where all that was begun is over, and of a world that is not active.

        Raises:
            MultiworldError: a subscriber of an event calls it, in the thread that hears the answers.
        """
        gen = self._gen
        return gen.operations.pending(_seconds(timeout)) if gen.state is State.ACTIVE else ()

    def waited_for(self, timeout: float | dt.timedelta = 1.0) -> dict[int, float]:
        """Ask all members for how long they have waited for each other: which of them is slow.

        Of the last collectives, as far as all members of their group remember them (64 operations each): each
        counts for the member that called it last, with the seconds that each other one waited for that call.

        Args:
            timeout: seconds, or a timedelta, that the members have to answer.

        Returns:
            Seconds by rank, of the members that answer. Less than 20 ms in one collective does not count.
            Nothing of a world that is not active.

        Raises:
            MultiworldError: as `pending`.
        """
        gen = self._gen
        return gen.operations.waited_for(_seconds(timeout)) if gen.state is State.ACTIVE else {}

    # -- faults ----------------------------------------------------------------------------------------------

    def on_break(self, fn: Callable[[World], object]) -> Callable[[], None]:
        """Call ``fn(world)`` once for each breakage, in a thread of its own; at once if it broke already.

        ``fn`` may block, rejoin or close the world. An exception in it is logged.

        Returns:
            A function that unregisters `fn`.
        """
        require_callable("on_break", fn)
        watcher = _Watcher(fn)
        with self._watch_lock:
            self._watchers = (*self._watchers, watcher)
            # Not by its state: a world that breaks in this moment tells the new watcher with the others.
            late = self._told is self._gen and self._gen.state is State.BROKEN
        if late:
            self._tell((watcher,))

        def forget() -> None:
            with self._watch_lock:
                self._watchers = tuple(each for each in self._watchers if each is not watcher)

        return forget

    def rejoin(self, timeout: float | dt.timedelta | None = None, store: str | Store | None = None) -> World:
        """Join again under the same name and rank: the next generation, when all members are back.

        In a world whose ranks are assigned this is `reform`.

        Args:
            timeout: seconds, or a timedelta; None takes the join's own.
            store: where the members meet now, as for `multiworld.join`; once joined there, later rejoins go
                there too. None: where they met last.

        Returns:
            This world, in its new generation. What was selected by ``with`` before stays the old generation.

        Raises:
            InvalidJoinError: the world is active.
            StaleGenerationError: this process joined a world of that name anew, and is still in that one.
            JoinAbandonedError: another thread closed this world meanwhile.
            JoinError: see `multiworld.join`; the world stays broken or closed, and may be rejoined again.
        """
        return self._rejoins.blocking(self, timeout, store)

    async def rejoin_async(
        self, timeout: float | dt.timedelta | None = None, store: str | Store | None = None
    ) -> World:
        """`rejoin`, awaitable and cancellable."""
        return await self._rejoins.awaited(self, timeout, store)

    def reform(self, timeout: float | dt.timedelta | None = None) -> World:
        """Make the next generation of a broken or closed world out of those that are here.

        These are its members that are not lost, as soon as all of them have called this, and processes that
        wait in `multiworld.join` to be let in. Ranks are dense: members keep their order, newcomers come last.
        A member that is lost meanwhile is left out. Fewer than MIN members wait for others.

        Members that are alive and do not come are waited for as long as ``last_call`` says, and at most until
        shortly before the timeout; they may come later, as newcomers.

        Args:
            timeout: seconds, or a timedelta, of this and from then on of operations; None takes the last one.

        Returns:
            This world, in its new generation. What was selected by ``with`` before stays the old generation.

        Raises:
            InvalidJoinError: the world is active, or its members chose their ranks when they joined.
            JoinAbandonedError: another thread closed this world meanwhile.
            JoinTimeoutError: fewer than MIN members came.
            JoinError: see `multiworld.join`; the world stays broken or closed, and may be reformed again.
        """
        self._require_assigned()
        return self._rejoins.blocking(self, timeout, None)

    async def reform_async(self, timeout: float | dt.timedelta | None = None) -> World:
        """`reform`, awaitable and cancellable."""
        self._require_assigned()
        return await self._rejoins.awaited(self, timeout, None)

    def advance(self) -> bool:
        """Say that a step has ended; enter the world's next generation if it is due here.

        All members call this at the end of each step, equally often. Where processes wait in `multiworld.join` to
        be let in, or a member wants to leave (`leave`), the next generation is prepared in the background, and
        entered by all members at the same advance: no operation fails. Nothing that was begun before may still be
        under way; groups, and ``with world:`` blocks, that were made before belong to the old generation. Where
        nothing is due this only counts.

        Returns:
            Whether rank, size and members have changed; for a member that left, that this world is closed.

        Raises:
            BrokenWorldException: a member was lost: see `reform`. The step has ended here and counts.
            WorldClosedError: this process closed or left the world.
            JoinTimeoutError: the members have not agreed on the next generation within ``timeout``. The step
                counts. Call this again before the next step: it waits on, and counts no other step. So it
                does after an interrupt that came while it waited.
            Exception: what ``state_dict()`` of the world's state raises, and the world is broken then.
        """
        return self._advances.advance()

    async def advance_async(self) -> bool:
        """`advance`, awaitable: what may wait runs in a thread.

        Not to be cancelled: the step is counted by then, and the thread goes on and may enter the next generation.
        """
        if not self._advances.counted():
            return False
        from asyncio import to_thread  # noqa: PLC0415  (asyncio is loaded by those who await)

        stream = stream_of_caller()  # in which the state that may be sent is computed

        def enter() -> bool:
            with stream():
                return self._advances.enter()

        return await to_thread(enter)

    def leave(self) -> None:
        """Ask to leave at one of the next advances, without a breakage: go on, and call `advance` as before.

        The `advance` at which this member leaves returns when no member is in the generation any more, and
        this world is closed. As long as fewer than MIN members would be left, nothing happens.

        Raises:
            InvalidJoinError: its members chose their ranks when they joined.
            BrokenWorldException, WorldClosedError: the world is over.
        """
        self._require_assigned()
        self._advances.leave()

    def _require_assigned(self) -> None:
        if not self._plan.assigned:
            raise InvalidJoinError(
                self.name,
                f"world {self.name!r} of {self.world_size} was to change its members",
                rule="A world whose members chose their ranks keeps its size",
                next_step="Use rejoin, or join with rank=None and a range of sizes, as world_size='2:8'",
            )

    def wait_active(self, timeout: float | dt.timedelta | None = None) -> World:
        """Wait until this world is joined again, as `multiworld.join_all` does in the background.

        Args:
            timeout: seconds, or a timedelta; None takes the join's own.

        Returns:
            This world, active; at once if it is.

        Raises:
            WorldClosedError: this process closed it.
            JoinTimeoutError: it is not active yet.
        """
        seconds = self._plan.timeout if timeout is None else _seconds(timeout)
        deadline = time.monotonic() + seconds
        with self._changed:
            while (state := self.state) is not State.ACTIVE:
                if state is State.CLOSED:
                    raise self._gen.error()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise JoinTimeoutError(
                        self.name,
                        f"world {self.name!r} (generation {self.generation}) is not active after {seconds:g} s: "
                        f"{state}" + (f", {self.breakage.detail}" if self.breakage is not None else ""),
                        rule="All members are back before the timeout",
                        next_step=_to_be_active(self._plan, state),
                    )
                self._changed.wait(min(left, _LOOK_EVERY))
        return self

    def close(self, timeout: float | dt.timedelta | None = None) -> bool:
        """Leave the world in good order and free everything it holds. Never raises, harmless when repeated.

        First it waits until the other members have received what was sent to them, for at most 0.8 of
        `timeout`; what they have not received by then is lost. Ctrl-C ends that wait: all else is done before
        KeyboardInterrupt is raised.

        The other members' worlds break with cause ``left``; operations pending here raise `WorldClosedError`,
        and a rejoin that is under way in another thread ends with `JoinAbandonedError`.

        A signal's handler may call it. If the signal came in the middle of an operation, which may hold what
        the close needs, a thread of its own closes the world: perhaps not before the handler has returned.

        Args:
            timeout: seconds, or a timedelta; None takes ``M8D_CLOSE_TIMEOUT`` (5).

        Returns:
            Whether all is free; False when the time ran out (the rest goes on in the background).
        """
        try:
            seconds = close_timeout() if timeout is None else _seconds(timeout)
        except TypeError as error:  # closing never raises
            _log.warning(
                "world %r is closed within the default time: %s", self.name, error, extra=about(self.name)
            )
            seconds = close_timeout()
        return self._end(seconds)

    def _fail(self, failure: str) -> bool:
        """`close`, where an exception ended what used this world: the others are told, at once."""
        return self._end(close_timeout(), failure)

    def _end(self, seconds: float, failure: str = "") -> bool:
        if reentry.in_the_middle():
            return reentry.in_time(partial(self._close, seconds, failure), seconds, f"m8d-close-{self.name}")
        freed = self._close(seconds, failure)
        self._gen.settle(_SUBSCRIBERS)
        return freed

    def _close(self, seconds: float, failure: str = "") -> bool:
        deadline = time.monotonic() + seconds
        with self._watch_lock:
            self._closes += 1
        joining, freed = self._next, [False]

        def close() -> None:
            freed[0] = self._gen.close(deadline, failure)

        take_all(
            self.name,
            *(() if joining is None else (partial(joining.apply, CloseAsked(deadline, failure)),)),
            close,
            partial(self._advances.stop, deadline),
            self._leave_registry,
        )
        return freed[0]

    def _leave_registry(self) -> None:
        """Let go of the name and the listener, unless another thread has joined this world again meanwhile."""
        with self._watch_lock:
            stop = self._stop_listening if self._gen.state is State.CLOSED else _nothing
        stop()
        registry.remove(self.name, self)
        # Not `_changed`: its `__enter__` is a function in Python, and Ctrl-C in it would leave the lock held.
        with self._watch_lock:
            self._changed.notify_all()

    # -- for joins -------------------------------------------------------------------------------------------

    def _join_began(self, machine: StateMachine) -> None:
        """A join for this handle begins: `machine` is that of the generation to be."""
        self._next = machine

    def _join_ended(self) -> None:
        with self._watch_lock:
            self._next = None
            self._changed.notify_all()

    def _enter(self, plan: JoinPlan, gen: Generation) -> None:
        """A join made `gen`: from here on this handle means it."""
        stop = _nothing
        if plan.assigned:
            # A broken world's members wait for those that can be reached, until these come or close it.
            stop = registry.watchdog().stay_reachable(gen.roster.members[gen.rank].endpoint.host)
        with self._watch_lock:
            before, self._stop_listening = self._stop_listening, stop
            self._plan, self._gen = plan, gen
            self._hold_back()
        before()
        if gen.state is State.CLOSED:  # by another thread
            stop()

    def _hold_back(self) -> None:
        """Let bare calls wait as this world's own do while operations of several steps go on."""
        state = self._gen.c10d
        if state is not None:
            state.taken, state.before = self._taken, partial(self._before, self._gen)

    def _before(
        self, gen: Generation, name: str, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        self._wait_turn(gen, posted(name, args, kwargs))

    def _begins(self, steps: tuple[int | None, ...], rank: int, step: int) -> None:
        """A generation begins.

        Args:
            steps: by rank, which state the members have, see `Roster.steps`.
            rank: of this member.
            step: advances of the latest.
        """
        own = steps[rank] if steps else step
        self._behind = None if own == step else own
        if steps and own is None:
            self._whole = None  # it comes new: what it had is not the world's state
        self._advances.begin(step)

    @property
    def _state_step(self) -> int | None:
        """How many advances this member's state has; None where it has not had the world's state yet."""
        claimed = self._state_claimed
        return None if claimed is None else advances(claimed)

    @property
    def _state_claimed(self) -> int | None:
        """Which state this member says that it has when it joins again: see `Claim.step`.

        A member that is lost while a state is brought must not make others take an old one for the latest.
        """
        if self._torn or (self._plan.state is not None and self._whole is None):
            return None
        return self.step if self._plan.state is None or self._behind is None else self._behind

    def _state_is_whole(self, gen: Generation) -> None:
        """This member has the world's state as it is in `gen`."""
        self._whole, self._behind, self._torn = gen, None, False

    def _state_is_torn(self) -> None:
        """This member's state is about to be changed, and is not whole until all of it has come."""
        self._torn = True

    # -- for its generations ---------------------------------------------------------------------------------

    def _generation_broke(self, gen: Generation, breakage: Breakage) -> None:
        try:
            self._advances.broke(gen)
            bus.publish(WorldBroken(self.name, gen.number, self.rank, breakage.at, breakage))
        finally:  # Ctrl-C in a subscriber
            with self._watch_lock:
                self._told, watchers = gen, self._watchers
            self._tell(watchers)

    def _generation_closed(self, gen: Generation) -> None:
        self._leave_registry()
        # Subscribers go by the name, which a later generation may have by now, of this handle or of another one:
        # that world is not closed.
        if self._gen.number <= gen.number and registry.worlds().get(self.name, self) is self:
            bus.publish(WorldClosed(self.name, gen.number, self.rank, time.monotonic()))

    def _tell(self, watchers: tuple[_Watcher, ...]) -> None:
        # A thread each: one that rejoins, which takes as long as the others take, must not keep the next one
        # waiting.
        for watcher in watchers:
            again = self._start(watcher)
            if again is not None:
                _log.warning(
                    "world %r: no thread is left for a function given to on_break: it is called when there is one",
                    self.name,
                    extra=about(self.name),
                )
                releaser.add(again, partial(self._start, watcher))

    def _start(self, watcher: _Watcher) -> float | None:
        """Tell `watcher` in a thread of its own; return the seconds to the next try where there is none left."""
        name = f"m8d-on-break-{self.name}"
        try:
            threading.Thread(target=watcher, args=(self,), daemon=True, name=name).start()
        except RuntimeError:
            return _START_AGAIN
        return None

    def _forked(self) -> None:
        """In a forked child: the world is the parent's."""
        self._watch_lock = threading.Lock()
        self._changed = threading.Condition(self._watch_lock)
        self._watchers, self._next = (), None
        self._stop_listening = _nothing
        self._turns = Turns()
        self._taken = self._turns.taken
        if self._aio is not None:
            self._aio._forked(self._turns)  # noqa: SLF001  (its own)
        self._advances.forked()
        self._gen.forked()


class _Watcher:
    """One request to be told; two of the same function stay two."""

    def __init__(self, fn: Callable[[World], object]) -> None:
        self._fn = fn

    def __call__(self, world: World) -> None:
        try:
            self._fn(world)
        except Exception:  # noqa: BLE001  (a user's fault stays with that function)
            _log.exception(
                "world %r: a function given to on_break failed", world.name, extra=about(world.name)
            )


def _to_be_active(plan: JoinPlan, state: State) -> str:
    """Return the next step where a world in `state` has not become active in time."""
    if state is State.JOINING or plan.on_loss == "shrink":
        return "See why a member is missing, or wait longer"
    step = "Call reform(), or join with on_loss='shrink'" if plan.assigned else "Call rejoin()"
    return f"{step}; where join_all does so in the background, see why a member is missing"


def _nothing() -> None:
    """No listener is held."""


def _seconds(timeout: float | dt.timedelta) -> float:
    found = durations.seconds(timeout)
    if found is None:
        raise TypeError(f"timeout={timeout!r}: it is a number of seconds, a timedelta, or None")
    return min(found, settings.MAX_TIMEOUT)


def close_timeout() -> float:
    """Return the seconds that closing may take where none are given."""
    try:
        return settings.load().close_timeout
    except MultiworldError as error:  # closing never raises; the next join says it
        _log.warning("%s", error)
        return settings.Settings.close_timeout


def worlds() -> dict[str, World]:
    """Every world of this process that is active or broken, by name."""
    return cast("dict[str, World]", registry.worlds())  # joins register nothing else
