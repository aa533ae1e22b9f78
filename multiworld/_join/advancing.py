"""Advances of a world whose ranks are assigned: the next generation is prepared beside the working one.

A program calls `World.advance` at each step's end. Where newcomers wait in their joins, or a member wants to
leave, all members prepare the next generation in the background (`multiworld._join.preparing`): they join
again beside the generation that works. Once it stands, they agree on an advance that none of them has passed
(`AdvanceCounter`), and each enters the new generation there. Until they have agreed, whatever fails leaves
the old one as it was.

What is here runs in the program's thread: it counts, stops where it was told to, and enters.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from multiworld._core.state_machine import Announced, Joined, JoinFailed, Replaced, Stage
from multiworld._generation.advance_counter import AdvanceCounter
from multiworld._generation.resources import UNDO_BUDGET
from multiworld._join.kept_state import KeptState
from multiworld._join.preparing import Preparing
from multiworld._join.state import bring_up_to_date
from multiworld.errors import JoinTimeoutError, WorldClosedError
from multiworld.events import State, WorldActive, bus
from multiworld.registry import registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld._generation.generation import Generation
    from multiworld._join.preparing import Following
    from multiworld.world import World

__all__ = ["Advancing"]

_UNENTERED = {Stage.CONNECTING, Stage.LOST, Stage.OPENING, Stage.DOOMED}


class Advancing:
    """The advances of one world in this process; see the module.

    Args:
        world: that they are of.
        destroyed: called with a generation whose default group the program has destroyed.
    """

    def __init__(self, world: World, destroyed: Callable[[Generation], None]) -> None:
        self._world = world
        self._counter = AdvanceCounter()
        self._preparing = Preparing(world, destroyed, self._counter)
        self._late = 0  # the generation whose breakage came before the end of a step
        self._asked_to_leave = 0  # how often the program had closed the world then
        self._closes = 0  # the same, when it was joined

    @property
    def count(self) -> int:
        """How many advances the world has made."""
        return self._counter.count

    def begin(self, count: int) -> None:
        """Begin with the first generation, or one after a breakage, after `count` advances."""
        # A wish to leave lasts over a breakage, and not over a close by the program.
        self._closes = self._world._closes
        self._preparing.leaving &= self._asked_to_leave == self._closes
        self._preparing.begin()
        self._counter.begin(count)

    def broke(self, gen: Generation) -> None:
        """The world's generation `gen` broke; what is open for the next one is closed in the background."""
        self._preparing.broke(gen)

    def advance(self) -> bool:
        """See `World.advance`."""
        return self.counted() and self.enter()

    def counted(self) -> bool:
        """Count an advance; return whether `enter` is to be called, which may wait.

        Raises:
            BrokenWorldException, WorldClosedError: the generation is over.
        """
        gen = self._world._gen
        if gen.state is not State.ACTIVE:
            # The step has ended here all the same: members that broke off in it are behind and get its state.
            if gen.state is State.BROKEN and gen.number != self._late:
                self._late = gen.number
                self._counter.advance()
            raise gen.error()
        if gen is not self._preparing.watched:
            self._preparing.watch(gen)
        return self._counter.advance()

    def leave(self) -> None:
        """See `World.leave`."""
        gen = self._world._gen
        if gen.state is not State.ACTIVE:
            raise gen.error()
        self._asked_to_leave = self._world._closes
        self._preparing.leave(gen)

    def enter(self) -> bool:
        """Enter the next generation if it is due at this advance; return whether it was."""
        gen = self._world._gen
        timeout = self._world._plan.timeout
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
        following = self._preparing.following if enters else None
        if following is None or not self._entered(gen, following):
            self._counter.passed()
            if gen.state is not State.ACTIVE:
                self._late = gen.number  # this advance is counted
                raise gen.error()
            return False
        if following.made is None:
            self._depart(gen)
        else:
            bring_up_to_date(self._world, KeptState())
        return True

    def stop(self, deadline: float) -> None:
        """Wait until nothing is prepared any more, at most until `deadline`; the generation is over."""
        self._preparing.stop(deadline)

    def forked(self) -> None:
        """In a forked child: all of it is the parent's."""
        self._preparing.forked()
        self._counter.forked()

    def _entered(self, gen: Generation, following: Following) -> bool:
        """Enter what follows `gen`, unless it is undone already."""
        try:
            if not following.take():
                return False
            self._go_on(gen, following.made)
        except BaseException as error:
            self._undo(gen, following.made, error)
            raise
        finally:
            following.entered.set()
        return True

    def _go_on(self, gen: Generation, made: Generation | None) -> None:
        world = self._world
        if made is None:
            self._preparing.leaving = False  # it has left: when it comes back, it stays
            gen.machine.apply(Replaced())
            return
        made.machine.apply(Joined())
        registry.moved(gen.world, made.number, made.rank)
        world._enter(world._plan, made)
        gen.machine.apply(Replaced(made.number))
        if world._closes != self._closes:
            # Another thread closes the world, and may have ended no more than the generation before this one.
            raise WorldClosedError(gen.world, f"world {gen.world!r} was closed as it changed its members")
        self._counter.begin(self._counter.count)
        try:
            bus.publish(WorldActive(made.world, made.number, made.rank, time.monotonic(), made.size))
        finally:
            made.machine.apply(Announced())
        self._preparing.watch(made)

    def _undo(self, gen: Generation, made: Generation | None, error: BaseException) -> None:
        """Leave: the others have gone on, and this member was interrupted before it had."""
        if made is not None:
            if made.machine.stage not in _UNENTERED:
                return
            made.machine.apply(JoinFailed(error, time.monotonic() + UNDO_BUDGET))
        if gen.state is State.ACTIVE:
            gen.machine.apply(Replaced(0 if made is None else made.number))
        if self._world._gen.state is not State.CLOSED:
            return
        if gen.machine.replaced is None:  # another thread closed it, and tells of that
            self._world._leave_registry()
        else:
            self._world._generation_closed(self._world._gen)

    def _depart(self, gen: Generation) -> None:
        """Leave for good, once the last member has left the generation."""
        world = self._world
        try:
            self.stop(time.monotonic() + world._plan.timeout)
        finally:  # also after Ctrl-C in that wait
            world._generation_closed(gen)
