"""Advances of a world whose ranks are assigned: the next generation is prepared beside the working one.

A program calls `World.advance` at each step's end. Where newcomers wait in their joins, or a member wants to
leave, all members prepare the next generation in the background: they join again beside the generation that
works. Once it stands, they agree on an advance that none of them has passed (`AdvanceCounter`), and each
enters the new generation there. Until they have agreed, whatever fails leaves the old one as it was.

The old generation is released when the last member has left it: no member sees it end.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from multiworld._core.state_machine import Announced, Joined, JoinFailed, Replaced
from multiworld._generation.advance_counter import AdvanceCounter
from multiworld._generation.background_release import Releaser
from multiworld._generation.resources import UNDO_BUDGET
from multiworld._generation.stage import StateMachine
from multiworld._join.kept_state import KeptState
from multiworld._join.state import bring_up_to_date
from multiworld._net.stores.address import is_list
from multiworld.errors import JoinAbandonedError, JoinTimeoutError, MultiworldError, StoreUnreachableError
from multiworld.events import Breakage, Cause, State, WorldActive, WorldClosed, bus
from multiworld.registry import registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld._generation.generation import Generation
    from multiworld._net.stores.store import StoreHandle
    from multiworld._net.stores.succession import Succession
    from multiworld.world import World

__all__ = ["Advancing"]

LOOK_EVERY = 0.2
"""Seconds between two looks at whether newcomers wait, in each world that advances."""
AGAIN, AGAIN_AT_MOST = 0.5, 5.0
"""Seconds until the next look after a preparation that came to nothing, or a store that does not answer."""
WAIT = 0.002
"""Seconds between two looks at how far the others are, for a while; then up to `WAIT_AT_MOST`."""
WAIT_AT_MOST = 0.05
SILENCES = 4
"""After so many calls in a row without an answer of the store, an old generation is released unasked."""

_log = logging.getLogger(__name__)
_watcher = Releaser(threads=2)
"""Looks at the stores of all worlds that advance."""


class _Next:
    """What a member enters at its advance: a generation, or nothing where it leaves.

    Attributes:
        made: the generation; None where this member leaves.
        entered: set when it did.
    """

    def __init__(self, made: Generation | None) -> None:
        self.made = made
        self.entered = threading.Event()
        self._lock = threading.Lock()
        self._taken = False

    def take(self) -> bool:
        """Take it, to enter it or to undo it; False where the other thread has."""
        with self._lock:
            taken, self._taken = self._taken, True
            return not taken


class Advancing:
    """The advances of one world in this process; see the module.

    Args:
        world: that they are of.
        destroyed: called with a generation whose default group the program has destroyed.
    """

    def __init__(self, world: World, destroyed: Callable[[Generation], None]) -> None:
        self._world = world
        self._destroyed = destroyed
        self._counter = AdvanceCounter()
        self._lock = threading.Lock()
        self._watched: Generation | None = None
        self._next: _Next | None = None
        self._thread: threading.Thread | None = None
        self._leaving = False
        self._pause = AGAIN
        self._spare: StoreHandle | None = None  # in the place of a store that went away

    @property
    def count(self) -> int:
        """How many advances the world has made."""
        return self._counter.count

    def begin(self, count: int) -> None:
        """Begin with the first generation, or one after a breakage, after `count` advances."""
        self._leaving = False
        self._counter.begin(count)

    def advance(self) -> bool:
        """See `World.advance`."""
        return self.counted() and self.enter()

    def counted(self) -> bool:
        """Count an advance; return whether `enter` is to be called, which may wait.

        Raises:
            BrokenWorldException, WorldClosedError: the generation is over.
        """
        gen = self._world._gen  # noqa: SLF001  (joins make worlds)
        if gen.state is not State.ACTIVE:
            raise gen.error()
        if gen is not self._watched:
            self._watch(gen)
        return self._counter.advance()

    def leave(self) -> None:
        """See `World.leave`."""
        gen = self._world._gen  # noqa: SLF001  (joins make worlds)
        if gen.state is not State.ACTIVE:
            raise gen.error()
        self._leaving = True
        self._succession(gen).leave()

    def enter(self) -> bool:
        """Enter the next generation if it is due at this advance; return whether it was."""
        gen = self._world._gen  # noqa: SLF001  (joins make worlds)
        timeout = self._world._plan.timeout  # noqa: SLF001  (joins make worlds)
        try:
            enters = self._counter.enters(
                lambda: gen.state is State.ACTIVE, time.monotonic() + timeout + UNDO_BUDGET
            )
        except TimeoutError as error:
            raise JoinTimeoutError(
                gen.world,
                f"world {gen.world!r}, generation {gen.number}: {error}",
                rule="Members agree on the next generation while they advance",
                next_step="See whether its store answers; the world breaks if it does not",
            ) from error
        following = self._next
        if not enters or following is None or not following.take():
            if gen.state is not State.ACTIVE:
                raise gen.error()
            return False
        try:
            self._go_on(gen, following.made)
        finally:
            following.entered.set()
        if following.made is None:
            self._depart(gen)
        else:
            bring_up_to_date(self._world, KeptState())
        return True

    def stop(self, deadline: float) -> None:
        """Wait until nothing is prepared any more, at most until `deadline`; the generation is over."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.close()

    def forked(self) -> None:
        """In a forked child: all of it is the parent's."""
        self._lock = threading.Lock()
        self._next = self._thread = self._spare = None
        self._counter.forked()

    # -- in the program's thread -----------------------------------------------------------------------------

    def _go_on(self, gen: Generation, made: Generation | None) -> None:
        world = self._world
        if made is None:
            gen.machine.apply(Replaced())
            return
        made.machine.apply(Joined())
        registry.moved(gen.world, made.number, made.rank)
        world._enter(world._plan, made)  # noqa: SLF001  (joins make worlds)
        gen.machine.apply(Replaced(made.number))
        self._counter.begin(self._counter.count)
        try:
            bus.publish(WorldActive(made.world, made.number, made.rank, time.monotonic(), made.size))
        finally:
            made.machine.apply(Announced())
        self._watch(made)

    def _depart(self, gen: Generation) -> None:
        """Leave for good, once the last member has left the generation."""
        world = self._world
        self.stop(time.monotonic() + world._plan.timeout)  # noqa: SLF001  (joins make worlds)
        world._leave_registry()  # noqa: SLF001  (joins make worlds)
        bus.publish(WorldClosed(gen.world, gen.number, gen.rank, time.monotonic()))

    def _watch(self, gen: Generation) -> None:
        with self._lock:
            if self._watched is gen:
                return
            self._watched = gen
        if self._world._plan.assigned:  # noqa: SLF001  (joins make worlds)
            _watcher.add(0.0, lambda: self._look(gen))

    # -- in the background -----------------------------------------------------------------------------------

    def _works(self, gen: Generation) -> bool:
        return gen is self._world._gen and gen.state is State.ACTIVE  # noqa: SLF001  (joins make worlds)

    def _look(self, gen: Generation) -> float | None:
        """Prepare the next generation if it is due; return the seconds until the next look."""
        if not self._works(gen):
            return None
        try:
            succession = self._succession(gen)
            if self._leaving:
                succession.leave()
            due = succession.due()
            self._counter.look()
            # Others may have prepared to go on without a member that leaves: it has to say its limit then.
            if not due and not self._leaving:
                return LOOK_EVERY
        except MultiworldError as error:
            _log.info("world %r cannot see who waits to join it: %s", gen.world, error)
            self._reopen()
            return AGAIN_AT_MOST
        thread = threading.Thread(
            target=self._prepare, args=(gen, succession), daemon=True, name=f"m8d-advance-{gen.world}"
        )
        self._thread = thread
        thread.start()
        return None

    def _prepare(self, gen: Generation, succession: Succession) -> None:
        try:
            if not self._leaving or (not self._departed(gen, succession) and succession.due()):
                self._build(gen, succession)
        except MultiworldError as error:
            _log.info("world %r: the next generation is not prepared: %s", gen.world, error)
        except Exception:  # noqa: BLE001  (logged: the world goes on)
            _log.exception("world %r: the next generation could not be prepared", gen.world)
        finally:
            if self._thread is threading.current_thread():
                self._thread = None
        if self._works(gen):
            self._counter.withdraw()
            _watcher.add(self._pause, lambda: self._look(gen))
            self._pause = min(2 * self._pause, AGAIN_AT_MOST)

    def _build(self, gen: Generation, succession: Succession) -> None:
        """Build the next generation beside this one, offer it, and see this one to its end."""
        from multiworld._generation import generation  # noqa: PLC0415  (it loads torch)
        from multiworld._join import steps  # noqa: PLC0415  (it loads torch)

        world, said = self._world, []

        def limit() -> int:
            said.append(self._counter.propose())
            return said[-1]

        plan, closes = world._plan, world._closes  # noqa: SLF001  (joins make worlds)
        machine = StateMachine(plan.name, gen.rank)
        terms = steps.Terms(
            plan,
            machine,
            time.monotonic() + plan.timeout,
            lambda: not self._works(gen) or world._closes != closes,  # noqa: SLF001  (joins make worlds)
            past=gen.roster,
            step=self._counter.count,
            limit=limit,
        )
        with contextlib.ExitStack() as undo:
            try:
                resources = steps.build(terms, undo)
                made = generation.Generation(machine, resources, world, plan.timeout)
                undo.callback(made.refuse)
                resources.c10d.on_destroyed = lambda: self._destroyed(made)
                undo.callback(
                    resources.attachment.leave, f"generation {gen.number} broke before this one began"
                )
                self._offer(gen, _Next(made), resources.step)
            except BaseException as error:
                undo.close()
                machine.apply(JoinFailed(error, time.monotonic() + UNDO_BUDGET))
                if said and isinstance(error, StoreUnreachableError):
                    self._doubt(gen, error)
                raise
            undo.pop_all()
        self._pause = AGAIN
        self._see_off(gen, succession, made)

    def _departed(self, gen: Generation, succession: Succession) -> bool:
        """Say this member's limit when the others can go on without it; False if it has to stay."""
        said, limit, told, pause = 0, 0, False, LOOK_EVERY
        while self._works(gen):
            try:
                found = succession.departing()
                if not found.leaves:
                    return False
                if found.asked and found.asked != said:
                    said, told, pause = found.asked, False, WAIT
                    limit = self._counter.propose()
                if said and not told:
                    succession.limit(limit)
                    told = True
                    continue
            except StoreUnreachableError as error:
                if not said:
                    raise
                # The others may have its limit, and go by it: this member stays at it until it knows.
                _log.info("world %r: the store does not say when this member leaves: %s", gen.world, error)
                time.sleep(WAIT_AT_MOST)
                continue
            if found.entry:
                self._offer(gen, _Next(None), found.entry)
                self._see_off(gen, succession, None)
                return True
            if said and not found.asked:  # it came to nothing
                said, pause = 0, LOOK_EVERY
                self._counter.withdraw()
            time.sleep(pause)
        return True

    def _offer(self, gen: Generation, following: _Next, entry: int) -> None:
        """Have the program's thread enter `following` at its advance `entry`; return when it has.

        Raises:
            JoinAbandonedError: the generation ended before.
        """
        self._next = following
        self._counter.decide(entry)
        while not following.entered.wait(WAIT_AT_MOST):
            if not self._works(gen) and following.take():
                raise JoinAbandonedError(
                    gen.world, f"generation {gen.number} ended before the next one began"
                )
        self._next = None

    def _see_off(self, gen: Generation, succession: Succession, made: Generation | None) -> None:
        """Release a generation that was replaced, once no member is in it any more."""
        timeout = self._world._plan.timeout  # noqa: SLF001  (joins make worlds)
        began = time.monotonic()
        said, silent, pause = False, 0, WAIT
        # What a new generation ends with has ended this one for the others as well.
        while time.monotonic() - began < timeout and (made is None or made.state is State.ACTIVE):
            try:
                said = said or succession.enter()
                if succession.all_entered():
                    break
                silent = 0
            except StoreUnreachableError as error:
                _log.info("world %r, generation %d, cannot be seen off: %s", gen.world, gen.number, error)
                silent += 1
                if silent == SILENCES:
                    break
                pause = WAIT_AT_MOST
            time.sleep(pause)
            pause = min(max(WAIT, (time.monotonic() - began) / 50), WAIT_AT_MOST)
        gen.retire(time.monotonic() + UNDO_BUDGET)

    def _doubt(self, gen: Generation, error: StoreUnreachableError) -> None:
        """End a generation whose members may have gone on: the store took the limit and gave no answer."""
        detail = f"the store went away while the next generation was agreed on: {error.value}"
        gen.verdict(Breakage(Cause.FAILED, (gen.rank,), detail, time.monotonic()))

    # -- the store -------------------------------------------------------------------------------------------

    def _succession(self, gen: Generation) -> Succession:
        """Return what this member writes of `gen` in the store.

        Raises:
            BrokenWorldException, WorldClosedError: the generation is over.
        """
        from multiworld._net.stores.succession import Succession  # noqa: PLC0415  (only who advances needs it)

        resources, roster = gen.resources, gen.roster
        if resources is None:
            raise gen.error()
        request = replace(
            resources.rendezvous.request,
            past=roster.members,
            past_generation=roster.generation,
            past_rank=roster.rank,
            lost=(),
            working=True,
        )
        return Succession((self._spare or resources.store).store, request)

    def _reopen(self) -> None:
        """Look for the store again: another process of its host may serve it by now, or this one."""
        from multiworld._net.stores.opening import open_in_time  # noqa: PLC0415  (it loads torch)

        plan = self._world._plan  # noqa: SLF001  (joins make worlds)
        if not isinstance(plan.store, str) or is_list(plan.store):  # a list moves by itself
            return
        with contextlib.suppress(MultiworldError):
            found = open_in_time(
                plan.store,
                world=plan.name,
                serve=not plan.served,
                only=False,
                deadline=time.monotonic() + 1.0,
                cancelled=lambda: False,
            )
            spare, self._spare = self._spare, found
            if spare is not None:
                spare.close()
