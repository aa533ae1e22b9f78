"""Preparing the next generation of a world that works, in the background.

The process's watchers look whether newcomers wait, or this member is to leave. Then a thread joins again
beside the generation that works, and offers what it made to the program's thread, which enters it at its
advance (`multiworld._join.advancing`). A member that leaves is offered nothing, at the same advance.

The old generation is released when the last member has left it: no member sees it end.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

from multiworld._core.state_machine import JoinFailed, Stage
from multiworld._generation.background_release import Releaser
from multiworld._generation.resources import UNDO_BUDGET
from multiworld._generation.stage import StateMachine
from multiworld._join.succession_store import SuccessionStore
from multiworld.errors import JoinAbandonedError, MultiworldError, StoreUnreachableError
from multiworld.events import Breakage, Cause, State
from multiworld.logs.source import about, logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld._generation.advance_counter import AdvanceCounter
    from multiworld._generation.generation import Generation
    from multiworld._net.stores.succession import Succession
    from multiworld.world import World

__all__ = ["Following", "Preparing"]

LOOK_EVERY = 0.2
"""Seconds between two looks at whether newcomers wait, in each world that advances."""
LEAVER_LOOKS = 0.01
"""Seconds between two looks of a member that leaves: the others wait for its limit once they are ready."""
AGAIN, AGAIN_AT_MOST = 0.5, 5.0
"""Seconds until the next look after a preparation that came to nothing, or a store that does not answer."""
_SELDOMER = (1, 5, 25)
"""Times `LOOK_EVERY` after looks at a silent store: each takes seconds of a thread that all worlds share."""
WAIT = 0.002
"""Seconds between two looks at how far the others are, for a while; then up to `WAIT_AT_MOST`."""
WAIT_AT_MOST = 0.05
SILENCES = 4
"""After so many calls in a row without an answer of the store, an old generation is released unasked."""

_log = logger(__name__)
watcher = Releaser(threads=2)
"""Looks at the stores of all worlds that advance."""


class Following:
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


class Preparing:
    """What is prepared for one world in this process; see the module.

    Args:
        world: that it is for.
        destroyed: called with a generation whose default group the program has destroyed.
        counter: of its advances.

    Attributes:
        watched: the generation that is looked at, or was last.
        following: what the program's thread enters at its advance, once that is agreed on.
        leaving: whether this member wants to leave.
    """

    def __init__(
        self, world: World, destroyed: Callable[[Generation], None], counter: AdvanceCounter
    ) -> None:
        self.watched: Generation | None = None
        self.following: Following | None = None
        self.leaving = False
        self._world = world
        self._destroyed = destroyed
        self._counter = counter
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._chain = 0  # of looks, each of which leads to the next one
        self._pause = AGAIN
        self._unseen = 0  # looks in a row in which the store did not answer
        self._store = SuccessionStore(world)

    # -- for the program's thread ----------------------------------------------------------------------------

    def begin(self) -> None:
        """The world was joined anew."""
        self._store.begin()

    def broke(self, gen: Generation) -> None:
        """The generation `gen` broke."""
        self._store.broke(gen)

    def watch(self, gen: Generation) -> None:
        """Look from now on whether the generation `gen`, which works, is to be succeeded."""
        with self._lock:
            if self.watched is gen:
                return
            self.watched, self._unseen = gen, 0
        if self._world._plan.assigned:
            self._look_in(0.0, gen)

    def leave(self, gen: Generation) -> None:
        """Tell the other members that this one wants to leave; in the background where the store is silent.

        Raises:
            BrokenWorldException, WorldClosedError: the generation is over.
        """
        self.leaving = True
        self._store.follow(gen)
        try:
            self._store.of(gen).leave()
        except StoreUnreachableError as error:
            _note(gen, "world %r: the store is to hear later that this member leaves: %s", error)
        self._look_in(0.0, gen)

    def stop(self, deadline: float) -> None:
        """Wait until nothing is prepared any more, at most until `deadline`; the generation is over."""
        with self._lock:
            thread = self._thread  # which has begun, or is none
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
        self._store.close()

    def forked(self) -> None:
        """In a forked child: all of it is the parent's."""
        self._lock = threading.Lock()
        self.following = self._thread = None
        self._store.forked()

    # -- in the background -----------------------------------------------------------------------------------

    def _works(self, gen: Generation) -> bool:
        return gen is self._world._gen and gen.state is State.ACTIVE

    def _look_in(self, seconds: float, gen: Generation) -> None:
        """Look then, and in place of the looks that were to come."""
        with self._lock:
            self._chain += 1
            chain = self._chain
        watcher.add(seconds, lambda: self._look(gen, chain))

    def _look(self, gen: Generation, chain: int) -> float | None:
        """Prepare the next generation if it is due; return the seconds until the next look."""
        if not self._works(gen) or chain != self._chain:
            return None
        if self._thread is not None:  # which looks again itself
            return LOOK_EVERY
        try:
            self._store.follow(gen)
            succession = self._store.of(gen)
            due = succession.due()
            self._unseen = 0
            self._counter.look()
            # Others may have prepared to go on without a member that leaves: it has to say its limit then.
            if not due and not self.leaving:
                return LOOK_EVERY
        except Exception as error:  # noqa: BLE001  (logged; the host may have no thread or descriptor left now)
            _note(gen, "world %r cannot see who waits to join it: %s", error)
            self._store.reopen()
            # Soon at first: another server of a list, or a launcher's, is there in a moment, and newcomers
            # wait there for what members know.
            pause = LOOK_EVERY * _SELDOMER[self._unseen]
            self._unseen = min(self._unseen + 1, len(_SELDOMER) - 1)
            at_most = AGAIN_AT_MOST if self._world._plan.present is None else AGAIN
            return min(pause, at_most)
        thread = threading.Thread(
            target=self._prepare, args=(gen, succession), daemon=True, name=f"m8d-advance-{gen.world}"
        )
        with self._lock:
            if chain != self._chain or self._thread is not None:
                return None  # another look has begun meanwhile, and goes on with this
            self._thread = thread
            try:
                thread.start()
            except RuntimeError:  # the host has no thread left
                self._thread = None
                return AGAIN_AT_MOST
        return None

    def _prepare(self, gen: Generation, succession: Succession) -> None:
        try:
            leaving = self.leaving
            if leaving:
                succession.leave()  # the program's thread may not have said it yet
            if not leaving or (not self._departed(gen, succession) and succession.due()):
                self._build(gen, succession)
        except MultiworldError as error:
            _note(gen, "world %r: the next generation is not prepared: %s", error)
        except Exception:  # noqa: BLE001  (logged: the world goes on)
            _log.exception(
                "world %r: the next generation could not be prepared",
                gen.world,
                extra=about(gen.world, gen.number, gen.rank),
            )
        finally:
            if self._works(gen):
                self._counter.withdraw()
            if self._thread is threading.current_thread():
                self._thread = None  # from here on the next one may begin, which says a limit of its own
        if self._works(gen):
            self._look_in(self._pause, gen)
            self._pause = min(2 * self._pause, AGAIN_AT_MOST)

    def _build(self, gen: Generation, succession: Succession) -> None:
        """Build the next generation beside this one, offer it, and see this one to its end."""
        from multiworld._generation import generation
        from multiworld._join import steps

        world, said = self._world, []

        def limit() -> int:
            said.append(self._counter.propose())
            return said[-1]

        plan, closes = world._plan, world._closes
        plan = replace(plan, store=plan.meets_at)
        machine = StateMachine(plan.name, gen.rank)
        past = weakref.ref(gen)  # what asks lives as long as the next generation, and this one would with it

        def given_up() -> bool:
            # Once this member has said its limit, it has to hear whether the others go on.
            moved = not said and plan.meets_at != plan.store
            return moved or (old := past()) is None or not self._works(old) or world._closes != closes

        terms = steps.Terms(
            plan,
            machine,
            time.monotonic() + plan.timeout,
            given_up,
            past=gen.roster,
            step=None if world._torn else self._counter.count,
            torn=world._torn,
            known=True,
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
                self._offer(gen, Following(made), resources.step)
            except BaseException as error:
                # With the error: those to whom this member is connected are told what it means for them.
                undo.__exit__(type(error), error, error.__traceback__)
                machine.apply(JoinFailed(error, time.monotonic() + UNDO_BUDGET))
                if said and isinstance(error, StoreUnreachableError):
                    self._doubt(gen, error)
                raise
            undo.pop_all()
        self._pause = AGAIN
        self._see_off(gen, succession, made)

    def _departed(self, gen: Generation, succession: Succession) -> bool:
        """Say this member's limit when the others can go on without it; False if it has to stay."""
        said, limit, told, pause = 0, 0, False, LEAVER_LOOKS
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
                _note(gen, "world %r: the store does not say when this member leaves: %s", error)
                time.sleep(WAIT_AT_MOST)
                continue
            if found.entry:
                self._offer(gen, Following(None), found.entry)
                self._see_off(gen, succession, None)
                return True
            if said and not found.asked:  # it came to nothing
                said, pause = 0, LEAVER_LOOKS
                self._counter.withdraw()
            time.sleep(pause)
        return True

    def _offer(self, gen: Generation, following: Following, entry: int) -> None:
        """Have the program's thread enter `following` at its advance `entry`; return when it has.

        Raises:
            JoinAbandonedError: the generation ended before, or the program's thread was interrupted.
        """
        self.following = following
        self._counter.decide(entry)
        while not following.entered.wait(WAIT_AT_MOST):
            if not self._works(gen) and following.take():
                raise JoinAbandonedError(
                    gen.world, f"generation {gen.number} ended before the next one began"
                )
        self.following = None
        if following.made is not None and following.made.machine.stage is Stage.ABANDONED:
            raise JoinAbandonedError(gen.world, f"generation {gen.number} was left before the next one began")

    def _see_off(self, gen: Generation, succession: Succession, made: Generation | None) -> None:
        """Release a generation that was replaced, once no member is in it any more."""
        timeout = self._world._plan.timeout
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
                _log.info(
                    "world %r, generation %d, cannot be seen off: %s",
                    gen.world,
                    gen.number,
                    error,
                    extra=about(gen.world, gen.number, gen.rank),
                )
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


def _note(gen: Generation, text: str, error: Exception) -> None:
    """Log what came to nothing in a world, which goes on; `text` takes its name and the error."""
    _log.info(text, gen.world, error, extra=about(gen.world, gen.number, gen.rank))
