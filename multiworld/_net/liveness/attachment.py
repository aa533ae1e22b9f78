"""Attachment: a world's registration with the watchdog."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Protocol

from multiworld._core.liveness.actions import Refusal, Why
from multiworld._core.liveness.detector import GRACE, SIGN_GRACE
from multiworld._net.liveness.inquiry import Inquiry
from multiworld.errors import (
    JoinAbandonedError,
    JoinError,
    JoinTimeoutError,
    MultiworldError,
    StaleGenerationError,
)
from multiworld.events import Breakage, Cause
from multiworld.logs.source import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from multiworld._core.membership.roster import Roster

__all__ = ["Attachment", "Owner"]


_log = logger(__name__)
_REPORT_GRACE = SIGN_GRACE + 1.0
"""Seconds that a failed operation, or a lost connection, waits at most for the watchdog to say why."""

_OTHERS_GRACE = 2 * GRACE
"""Seconds in which the verdict of a member arrives to which an operation has failed at the same time."""


class Owner(Protocol):
    """Methods that an attachment calls of its watchdog."""

    def report(self, attachment: Attachment, detail: str, ranks: tuple[int, ...], *, deadline: float) -> None:
        """Have a failed operation judged, and wait for that."""

    def detach(self, attachment: Attachment, failure: str = "") -> None:
        """Remove the attachment; tell the members goodbye, or the failure, unless the world is broken."""

    def linger(self, attachment: Attachment) -> Callable[[], None]:
        """Keep the attachment of a broken world over `detach`; return what ends that."""

    def ask_to_read(self, attachment: Attachment, ranks: tuple[int, ...]) -> None:
        """Ask members to read what this one sent them."""

    def ask(self, attachment: Attachment, number: int, *, deep: bool) -> None:
        """Ask the other members what they are doing; each answer comes to `Attachment.heard`."""


class Attachment:
    """A world's registration with the watchdog; `multiworld.watchdog.Watchdog.attach` makes it.

    Its users call `report`, `breakage_for`, `linger`, `leave` and `detach`, and read `breakage` and `lost`;
    the watchdog calls the rest.

    Attributes:
        breakage: the verdict, once there is one; final.
        lost: ranks of members that were lost after it: they crashed, hang, or cannot be reached.
        roster: of the world.
        error: why it was not attached.
        ready: whether it was attached.
        detached: whether it is, or is being, detached; callbacks are not called any more.
        lingering: how often `linger` was called and not ended; the watchdog's.
        settled: set when the attachment succeeded or failed.
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
        self._read: Callable[[int], None] | None = None
        self._describe: Callable[[bool], bytes] | None = None
        self._inquiries: dict[int, Inquiry] = {}
        self._numbers = itertools.count(1)
        self.roster = roster
        self.breakage: Breakage | None = None
        self.lost: frozenset[int] = frozenset()
        self.lingering = 0
        self.error: JoinError | None = None
        self.ready = False
        self.detached = False
        self.settled = threading.Event()
        self.ended = threading.Event()

    def report(self, detail: str, ranks: tuple[int, ...] = (), *, deadline: float) -> Breakage | None:
        """Report a failed operation of the world, and wait for the verdict. Any thread.

        Without a more specific cause within min(0.5 s, hang_timeout / 2), and after that until each member
        gave a sign of life (at most min(3 s, hang_timeout) in all), the verdict is "failed" with `detail`,
        after this member's rank, and `ranks`; a crash detected meanwhile is the verdict instead.

        Args:
            detail: what failed, in one sentence.
            ranks: of the suspected members; may be empty.
            deadline: of the wait, ``time.monotonic()`` seconds.

        Returns:
            The verdict; None where the world was detached meanwhile, where the deadline passed, and in the
            watchdog's own thread, which cannot wait for itself.
        """
        if not self.ended.is_set():
            self._owner.report(self, self._seen(detail), ranks, deadline=deadline)
        return self.breakage

    def breakage_for(self, detail: str, ranks: tuple[int, ...] = ()) -> Breakage:
        """Report a failed operation as `report` does, and return why the world breaks. Any thread.

        That is the verdict, even where ``on_verdict`` is not called yet: the two must not name two causes.
        Without one it is "failed", for `detail`.
        """
        verdict = self.report(detail, ranks, deadline=time.monotonic() + _REPORT_GRACE)
        return verdict or Breakage(Cause.FAILED, ranks, self._seen(detail), time.monotonic())

    def _seen(self, detail: str) -> str:
        """Return `detail` with this member's rank: the others are told it, who have not seen it."""
        return f"at rank {self.roster.rank}: {detail}"

    def breakage_after_all(self) -> Breakage | None:
        """Return why the world breaks, if it does; for an error that may be one of its operations'.

        A member that answers was alive after the error; one that does not is judged meanwhile. This takes
        `_OTHERS_GRACE`, for the verdict of a member that knows more, and at most `SIGN_GRACE`. Any thread.
        """
        now = time.monotonic()
        if not self.ended.is_set():
            try:
                self.ask(deep=False, deadline=now + SIGN_GRACE)
            except MultiworldError:  # the watchdog's thread cannot wait for what it is to find out
                return self.breakage
            self.ended.wait(max(0.0, now + _OTHERS_GRACE - time.monotonic()))
        return self.breakage

    def ask_to_read(self, ranks: tuple[int, ...]) -> None:
        """Ask members to read what this one sent them, in a world with a lane. Any thread; never waits."""
        self._owner.ask_to_read(self, ranks)

    def read_with(self, read: Callable[[int], None]) -> None:
        """Have ``read(rank)`` called when the member `rank` asks for what it sent to be read.

        It is called in the watchdog's thread: it must be quick and may not raise.
        """
        self._read = read

    def describe_with(self, describe: Callable[[bool], bytes]) -> None:
        """Have ``describe(deep)`` called when a member asks what this one is doing.

        It is called in the watchdog's thread: it must be quick.
        """
        self._describe = describe

    def ask(self, *, deep: bool, deadline: float) -> dict[int, bytes]:
        """Ask the other members what they are doing. Any thread but the watchdog's.

        Args:
            deep: whether the stacks of their threads are wanted.
            deadline: ``time.monotonic()`` seconds.

        Returns:
            What each of them returned from its ``describe``, by rank; without those that have not answered.
            The members of a broken world answer until they release it.

        Raises:
            MultiworldError: in the watchdog's thread.
        """
        return self.begin_asking(deep=deep)(deadline)

    def begin_asking(self, *, deep: bool) -> Callable[[float], dict[int, bytes]]:
        """Send the question of `ask`; return what waits for the answers, to be called once with a deadline.

        So several worlds are asked at the same time.
        """
        if self.detached:
            return lambda _: {}
        number = next(self._numbers)
        others = (member.rank for member in self.roster.members if member.rank != self.roster.rank)
        inquiry = self._inquiries[number] = Inquiry(others)
        # Once the inquiry is there: it hears of a breakage that comes from now on.
        if self.breakage is not None:
            inquiry.lost(self.breakage.ranks)

        def answers(deadline: float) -> dict[int, bytes]:
            try:
                return inquiry.wait(deadline - time.monotonic())
            finally:
                self._inquiries.pop(number, None)

        try:
            self._owner.ask(self, number, deep=deep)
        except BaseException:
            self._inquiries.pop(number, None)
            raise
        return answers

    def linger(self) -> Callable[[], None]:
        """Have the members of a broken world judged on after it is detached: who is lost is in `lost`.

        The connections to its members stay as well: a next generation needs most of them.

        Returns:
            What ends that; idempotent.
        """
        return self._owner.linger(self)

    def leave(self, failure: str = "") -> None:
        """Tell all members goodbye and detach; takes a millisecond, at most about a second.

        With `failure` (the reason for this member's end), the members are told that instead of a goodbye.

        After it returns, ``on_verdict`` is not called any more. Idempotent. With the last world and endpoint
        the watchdog's thread ends and its sockets are closed. A broken world is detached without a goodbye:
        the members were told the verdict.
        """
        self._owner.detach(self, failure)

    def detach(self) -> None:
        """Detach a broken world, whose members need no further message.

        A world that is not broken is left as by `leave`, so that its members do not wait for this one.
        """
        self.leave()

    def attached(self) -> None:
        """Succeed: every member is connected. Called by the watchdog's thread."""
        if not self.settled.is_set():
            self.ready = True
            self.settled.set()

    def refused(self, refusal: Refusal) -> None:
        """Fail: a member refused. Called by the watchdog's thread."""
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
        """Return the error for a deadline that passed; `missing`: ranks, each with the known reason."""
        told = []
        for rank, note in sorted(missing.items()):
            member = self.roster.members[rank]
            place = f"pid {member.pid} on {member.hostname}, {member.endpoint.host}:{member.endpoint.port}"
            told.append(f"{rank} ({place}{': ' + note if note else ''})")
        who = f"rank{'' if len(told) == 1 else 's'} {', '.join(told)}" if told else "a member"
        error = JoinTimeoutError(
            self.roster.world,
            f"{who} of {self.roster.key} did not connect in time",
            rule="Every member connects to every other one before the timeout",
            next_step="See whether those processes run, and whether their addresses can be reached from here",
        )
        error.missing = tuple(sorted(missing))
        return error

    def broke(self, breakage: Breakage) -> None:
        """Record the verdict and report it, once. Called by the watchdog's thread."""
        if self.detached or self.breakage is not None:
            return
        self.breakage = breakage
        self.ended.set()
        if self.ready:
            self._on_verdict(breakage)
        else:
            key = self.roster.key
            error = JoinAbandonedError(
                self.roster.world, f"{key} broke while it was joined: {breakage.detail}"
            )
            # A member that left may only have given this attempt up.
            error.lost = () if breakage.cause in {Cause.LEFT, Cause.FAILED} else breakage.ranks
            self._fail(error)
        for each in tuple(self._inquiries.values()):
            each.lost(breakage.ranks)

    def lose(self, ranks: tuple[int, ...]) -> None:
        """Record more members that are lost. Called by the watchdog's thread."""
        self.lost |= frozenset(ranks)

    def busy(self, ranks: tuple[int, ...], *, busy: bool) -> None:
        """Report members that run without answering, or answer again. Called by the watchdog's thread."""
        if self._on_busy is not None and self.ready and not self.ended.is_set():
            self._on_busy(ranks, busy)

    def look(self, rank: int) -> None:
        """Have read what the member `rank` sent. Called by the watchdog's thread."""
        if self._read is not None and not self.ended.is_set():
            self._read(rank)

    def describe(self, *, deep: bool) -> bytes:
        """Return what this member is doing; b"" where that is not known. Called by the watchdog's thread."""
        try:
            return b"" if self._describe is None else self._describe(deep)
        except Exception:  # noqa: BLE001  (logged: the watchdog goes on)
            _log.exception("no answer to what %s is doing", self.roster.key)
            return b""

    def heard(self, number: int, rank: int, piece: bytes, *, last: bool) -> None:
        """Take a piece of a member's answer to the question `number`. Called by the watchdog's thread."""
        if (inquiry := self._inquiries.get(number)) is not None:
            inquiry.heard(rank, piece, last=last)

    def over(self) -> None:
        """Mark as detached. Called by the watchdog's thread; in a forked child, by the child."""
        self.detached = True
        self._read = self._describe = None  # they hold what holds this
        for each in tuple(self._inquiries.values()):
            each.give_up()
        self.ended.set()
        self.settled.set()

    def forked(self) -> None:
        """Detach a forked child's copy, with new events: locks of the old ones may be held for good."""
        self.settled, self.ended = threading.Event(), threading.Event()
        self._inquiries = {}
        self.over()

    def _fail(self, error: JoinError) -> None:
        if not self.settled.is_set():
            self.error = error
            self.settled.set()
