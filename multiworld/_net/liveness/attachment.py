"""One world's place in the watchdog, as the rest of the package holds it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from multiworld._core.liveness.actions import Refusal, Why
from multiworld.errors import JoinAbandonedError, JoinError, JoinTimeoutError, StaleGenerationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from multiworld._core.membership.roster import Roster
    from multiworld.events import Breakage

__all__ = ["Attachment", "Owner"]


class Owner(Protocol):
    """What an attachment needs of its watchdog."""

    def report(self, attachment: Attachment, detail: str, ranks: tuple[int, ...], *, deadline: float) -> None:
        """Have a failed operation judged, and wait for that."""

    def detach(self, attachment: Attachment, failure: str = "") -> None:
        """Take the attachment out, with a goodbye where the world is not broken, or with what ended this member."""


class Attachment:
    """One world's place in the watchdog; `multiworld.watchdog.Watchdog.attach` makes it.

    Users of it call `report`, `leave` and `detach`, and read `breakage`; the rest is between it and the watchdog.

    Attributes:
        breakage: the verdict, once there is one; never changes after that.
        roster: of the world.
        error: why it was not attached.
        ready: whether it was attached.
        detached: whether it is, or is about to be; nobody is called any more.
        settled: set when it is clear whether it was attached.
        ended: set when the world broke or was detached.
    """

    def __init__(
        self,
        owner: Owner,
        roster: Roster,
        on_verdict: Callable[[Breakage], None],
        on_busy: Callable[[tuple[int, ...], bool], None] | None = None,
    ) -> None:
        self._owner = owner
        self._on_busy = on_busy
        self._on_verdict = on_verdict
        self.roster = roster
        self.breakage: Breakage | None = None
        self.error: JoinError | None = None
        self.ready = False
        self.detached = False
        self.settled = threading.Event()
        self.ended = threading.Event()

    def report(self, detail: str, ranks: tuple[int, ...] = (), *, deadline: float) -> Breakage | None:
        """Say that an operation of the world failed, and wait for the verdict. Any thread.

        If nothing better is seen within min(0.5 s, hang_timeout / 2), the verdict is "failed" with `detail`
        and `ranks`; a crash that is seen meanwhile is the verdict instead.

        Args:
            detail: what failed, in one sentence.
            ranks: of the members that are held to be the cause; may be empty.
            deadline: ``time.monotonic()`` seconds; until then this waits at most.

        Returns:
            The verdict; None where the world was detached meanwhile, or the deadline passed, or this is the
            watchdog's own thread, which cannot wait for itself.
        """
        if not self.ended.is_set():
            self._owner.report(self, detail, ranks, deadline=deadline)
        return self.breakage

    def leave(self, failure: str = "") -> None:
        """Say goodbye to all members and detach; waits about a second at most, normally a millisecond.

        With `failure`, what ends this member in a few words, the members are told that instead of a goodbye.

        When it has returned, ``on_verdict`` is not called any more. Calling it again does nothing. With the
        watchdog's last world and endpoint its thread ends and its sockets are closed. A world that is broken is
        detached without a goodbye: the members heard of the verdict.
        """
        self._owner.detach(self, failure)

    def detach(self) -> None:
        """Do as `leave`: for a broken world, whose members are told nothing more.

        A world that is not broken is left all the same: nobody shall wait for a member that is gone.
        """
        self.leave()

    def attached(self) -> None:
        """Every member is there. Called by the watchdog's thread."""
        if not self.settled.is_set():
            self.ready = True
            self.settled.set()

    def refused(self, refusal: Refusal) -> None:
        """A member says no. Called by the watchdog's thread."""
        world, generation = self.roster.world, self.roster.generation
        if refusal.why is Why.STALE:
            self._fail(
                StaleGenerationError(
                    world,
                    f"generation {generation} of {world} is over: {refusal.detail}",
                    rule="Every member of a world is in the same generation",
                    next_step="Join the world again",
                )
            )
        else:
            self._fail(
                JoinAbandonedError(
                    world, f"generation {generation} of {world} cannot come about: {refusal.detail}"
                )
            )

    def late(self, missing: Mapping[int, str]) -> JoinTimeoutError:
        """Return the error for a deadline that passed; `missing`: ranks, each with what is known about why."""
        told = []
        for rank, note in sorted(missing.items()):
            member = self.roster.members[rank]
            place = f"pid {member.pid} on {member.hostname}, {member.endpoint.host}:{member.endpoint.port}"
            told.append(f"{rank} ({place}{': ' + note if note else ''})")
        who = f"rank{'' if len(told) == 1 else 's'} {', '.join(told)}" if told else "a member"
        return JoinTimeoutError(
            self.roster.world,
            f"{who} of {self.roster.key} did not connect in time",
            rule="Every member connects to every other one before the timeout",
            next_step="See whether those processes run, and whether their addresses can be reached from here",
        )

    def broke(self, breakage: Breakage) -> None:
        """Take the verdict and hand it on, once. Called by the watchdog's thread."""
        if self.detached or self.breakage is not None:
            return
        self.breakage = breakage
        self.ended.set()
        if self.ready:
            self._on_verdict(breakage)
        else:
            key = self.roster.key
            self._fail(
                JoinAbandonedError(self.roster.world, f"{key} broke while it was joined: {breakage.detail}")
            )

    def busy(self, ranks: tuple[int, ...], *, busy: bool) -> None:
        """Hand on that members run and do not answer, or answer again. Called by the watchdog's thread."""
        if self._on_busy is not None and self.ready and not self.ended.is_set():
            self._on_busy(ranks, busy)

    def over(self) -> None:
        """It is detached. Called by the watchdog's thread; in a forked child, by the child."""
        self.detached = True
        self.ended.set()
        self.settled.set()

    def forked(self) -> None:
        """A child's copy: it belongs to the parent. The events' locks may be held by threads that are not here."""
        self.settled, self.ended = threading.Event(), threading.Event()
        self.over()

    def _fail(self, error: JoinError) -> None:
        if not self.settled.is_set():
            self.error = error
            self.settled.set()
