"""Rendezvous of a world's members through a store: all get the same roster, or all raise.

`multiworld._core.membership.admission` decides; `Rendezvous` carries the steps out. The members communicate
through one small record in the store (`multiworld._net.stores.record`), which every step replaces by
compare-and-set, in one round trip. No call waits inside the store, which other worlds may share.

A store whose server does not answer (its process is stopped, its host gone) blocks the calling thread inside
torch without a limit. So every public call runs in a thread of its own, which is abandoned at the deadline.

The store is trusted: it holds the tokens with which the members of a generation authenticate each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from multiworld._core.membership import admission, assigned, majority, refusals
from multiworld._core.membership.admission import Move, Phase
from multiworld._core.membership.ledger import Claim
from multiworld._core.membership.letters import ClaimLetter, ReadyLetter
from multiworld._core.membership.reachability import apart
from multiworld._core.membership.request import JoinRequest, validate
from multiworld._net.patience import NoAnswerError, NoThreadError, in_time
from multiworld._net.stores.probe import answers
from multiworld._net.stores.record import StoreLike, WorldRecord
from multiworld.errors import (
    JoinAbandonedError,
    JoinError,
    StoreUnreachableError,
)
from multiworld.logs.source import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from multiworld._core.membership.ledger import Attempt, Failure, Ledger
    from multiworld._core.membership.roster import Endpoint, Roster

__all__ = [
    "BEAT_EVERY", "LOST_AFTER", "PARTING", "REFUSING", "JoinRequest", "Rendezvous", "StoreLike",
    "least_pause",
]  # fmt: skip

BEAT_EVERY = 0.25
"""Seconds between the signs of life of a member that waits for others."""
LOST_AFTER = 2.0
"""Seconds without one after which a claim may be taken over; longer than a thread commonly holds the GIL."""
CHECK_EVERY = 0.01
"""Seconds between two reads of the store by `Rendezvous.check`."""
REFUSING = 1.0
"""Seconds for which a process that cannot claim a rank tries to tell the members that wait for it."""
BUILDING = 5.0
"""Seconds before its deadline, or a quarter of its timeout, at which a member ends the last call."""
PARTING = 0.5
"""Seconds that `fail`, `over` and other final reports may take."""
MISSED_AFTER = 5.0
"""Seconds after which a waiting member logs the missing ranks; the interval then doubles."""
_SLACK = 0.25
"""Seconds after a deadline in which a thread may still report it to the others before it is abandoned."""
_LAST_WORDS = 2.0
"""Seconds for the same report when a call is interrupted (Ctrl-C) and the process may end."""
_PROBE_WITHIN = 0.2
_PROBE_EVERY = 0.5
_SEAL_AFTER = 0.02
"""Seconds before other members try to seal an attempt: the claim that completes it normally does.

Survivors that wait for each other look who is gone in turn, so many seconds apart: each look connects to all.
"""
_TOLD_WITHIN = 1.0
"""Seconds for which members of the generation before must have been reached.

Where they have gone on in another generation, they have found this store by then, and told it.
"""
T = TypeVar("T")
_log = logger(__name__)


def least_pause(members: int) -> float:
    """Return the least seconds between two reads: all members read at most about 20 MB/s in sum.

    A record has about 160 bytes for each.
    """
    return min(members**2 * 6.5e-6, 0.5)


class Rendezvous:
    """One process's join of one generation of a world.

    Call `agree`, build the generation's resources, then `commit`; `fail` if building fails; `over` when the
    generation has ended for this process. Use one object per join.

    Args:
        store: shared by all members; see `StoreLike`. Its calls may be made from other threads.
        request: of this process.
        deadline: by `clock`; for `agree` and `commit` together.
        given: seconds that the program gave the join, some of which may be over; for messages.
        last_call: where ranks are assigned, seconds for which members that may still come are waited for once
            there are enough.
        cancelled: polled from another thread; True gives up. Must not block.
        more_lost: returns ranks of the request's past generation that were lost since the request was made.
        held: returns what a world of which the store knows nothing waits for before it may begin there; ""
            where it may. None: the store decides, if it is a list (see `majority.may_follow`).
        unable: why this process cannot join; `agree` tells the members that wait for it, and raises it.
        clock: monotonic seconds.
        sleep: waits that many seconds.
        probe: which endpoints accept connections; see `answers`. Members listen at theirs while they live.
    """

    def __init__(
        self,
        store: StoreLike,
        request: JoinRequest,
        *,
        deadline: float,
        given: float = 0.0,
        last_call: float = 30.0,
        cancelled: Callable[[], bool] = lambda: False,
        more_lost: Callable[[], frozenset[int]] = frozenset,
        held: Callable[[], str] | None = None,
        unable: JoinError | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        probe: Callable[[Iterable[Endpoint], float], Mapping[Endpoint, bool | None]] = answers,
    ) -> None:
        self.request = request
        self._me = secrets.token_hex(8)
        self._record = WorldRecord(store, request.world, sleep, request.run, self._me)
        may_begin: Callable[[], bool] = getattr(store, "may_begin", _always)
        self._held = held or (lambda: "" if may_begin() else refusals.MOVED)
        self._held_for = ""
        self._unable = unable
        self._deadline = deadline
        self._last_call = last_call
        self._enough_since: float | None = None
        self._silent_since: float | None = None
        self._reached_since: float | None = None
        self._cancelled = cancelled
        self._more_lost = more_lost
        self._clock = clock
        self._sleep = sleep
        self._probe = probe
        self._timeout, self._given = max(0.0, deadline - clock()), given
        self._token = secrets.token_hex(16)
        self._number = 0
        self._active = False
        self._beaten = False
        self._gone = 0
        self._next_check = 0.0
        self._doubts: dict[str, tuple[str, float]] = {}
        self._given_up = threading.Event()

    @property
    def prefix(self) -> str:
        """Prefix of the store keys of this attempt's process group; known after `agree`."""
        return f"{self._record.root}/{self._number}/pg"

    @property
    def entry(self) -> int:
        """The advance at which members enter the generation, see `Attempt.entry`; known after `commit`."""
        now = self._record.ledger.current
        return 0 if now is None or now.number != self._number else now.entry

    def agree(self) -> Roster:
        """Claim the rank, or the seat, and wait until all members are there.

        Returns:
            The roster, the same on all members but for their own rank and ``hang_timeout``.

        Raises:
            InvalidJoinError: an argument breaks a rule; raised on waiting members, too, as `unable` is.
            RankTakenError: another process claims the rank or seat, or an active generation holds it until
                the deadline.
            MismatchError: members disagree about size, backend or device.
            JoinTimeoutError: members were missing at the first deadline of a member; where ranks are
                assigned, at this member's deadline.
            StaleGenerationError: this process's rank in the current generation is taken.
            JoinAbandonedError: cancelled, here or on another member.
            StoreUnreachableError: the store fails or does not answer.
            JoinError: the store's record cannot be read.
        """
        try:
            validate(self.request)
            if self._unable is not None:
                raise self._unable
        except JoinError as error:
            self._refuse(error)
            raise
        return self._within(self._agree, max(self._deadline, self._clock()) + _SLACK)

    def check(self) -> None:
        """Raise if the attempt has failed elsewhere, was cancelled, or is out of time; else return quickly.

        At most every `CHECK_EVERY` seconds it makes one round trip.

        Raises:
            JoinError: the kind that every member of the attempt raises.
        """
        now = self._clock()
        if not self._number or self._active:
            return
        if now < self._next_check:
            self._raise_if_closed()  # as last read: what was raised once is raised again
            return
        self._next_check = now + CHECK_EVERY
        self._within(self._look, max(self._deadline, now) + _SLACK)

    def commit(
        self, check: Callable[[], None] = lambda: None, limit: Callable[[], int] | None = None
    ) -> None:
        """Report this member ready and wait until all are: the generation is then active on every member.

        Args:
            check: called often, in another thread, while this waits; raises to end the wait, as when a member
                died that was not ready. Its error is raised here; call `fail` with it.
            limit: where this member's generation still works: asked once all are ready for the advance that
                it does not pass until this returns or raises.

        Raises:
            JoinTimeoutError: not every member was ready before the first deadline.
            JoinError: the kind that every member of the attempt raises.
        """
        self._within(lambda: self._commit(check, limit), max(self._deadline, self._clock()) + _SLACK)
        self._active = True

    def fail(self, error: Exception, keys: Iterable[str] = (), *, left: bool = True) -> None:
        """Tell the others that this member cannot go on: they raise the same kind of `JoinError`.

        Does nothing if the attempt has failed already; is `over` if it has succeeded. Takes `PARTING` seconds
        at most and never raises.

        Args:
            error: why; any but a `JoinError` reaches the others as a `JoinAbandonedError`.
            keys: store keys of the attempt, to delete.
            left: whether this process will not try again: others do not wait for it where ranks are assigned.
        """
        if self._active:
            return self.over(keys)
        failure = refusals.failure_from(error, self.request)
        return self._part(lambda: self._leave(failure, left=left), keys)

    def over(self, keys: Iterable[str] = (), *, left: bool = False) -> None:
        """Report the generation ended, broken or closed, for this process, so that the next may begin.

        Takes `PARTING` seconds at most and never raises.

        Args:
            keys: store keys of the generation, of all members, to delete.
            left: whether this process will not come to the next generation.
        """
        if not self._active:
            error = JoinAbandonedError(self.request.world, "The world was closed while it was joined")
            return self.fail(error, keys, left=False)
        return self._part(
            lambda: self._record.apply(
                lambda ledger: Move(admission.over(ledger, self._number, self._me, left=left))
            ),
            keys,
        )

    def forget(self, keys: Iterable[str]) -> None:
        """Delete store keys of the generation; as `over` in time and errors."""
        if (names := list(keys)) or self._record.box.keys:
            self._part(lambda: None, names)

    # In the call's own thread.

    def _agree(self) -> Roster:
        try:
            return self._wait_for_members()
        except BaseException as error:
            # Any error: leave no claim behind. A closed attempt stays as it is.
            self._last_words(error)
            raise
        finally:
            if self._beaten:
                with contextlib.suppress(JoinError):  # a leftover counter is harmless
                    self._record.forget_beats(self.request.slot)

    def _wait_for_members(self) -> Roster:
        watch: _Watch | None = None
        self._record.read()
        news = self._clock()
        next_beat, next_seal = news + BEAT_EVERY, news
        began, next_word = news, news + MISSED_AFTER
        turn = min(self.request.turn * _SEAL_AFTER, _PROBE_EVERY)
        next_look = began + turn
        while True:
            if self._number == 0:
                watch = self._claim(watch)
            if self._number != 0:
                ledger = self._record.ledger
                state = admission.claim_state(ledger, self._number, self._me, self.request)
                attempt = state.attempt
                if attempt is None:
                    raise self._error(state.failure)
                self._number = attempt.number
                if state.phase is not Phase.OPEN:
                    if self._given_up.is_set():  # while the store was silent: the others would wait for it
                        raise self._cancel()
                    return admission.roster(attempt, self.request, self._me)
                now = self._clock()
                if self.request.working and self._nothing_due():
                    raise self._cancel()
                if self._learn_lost():
                    continue
                if attempt.missing:
                    next_seal, self._enough_since = now + _SEAL_AFTER, None
                elif assigned.expected(ledger):
                    next_seal = now + turn
                    if now >= next_look:
                        next_look = now + _PROBE_EVERY
                        if self._seal():
                            continue
                elif now >= next_seal:
                    next_seal = now + _PROBE_EVERY
                    if self._seal():
                        continue
                if now >= next_beat:
                    next_beat = now + BEAT_EVERY
                    self._beaten = True
                    self._record.beat(self.request.slot)
                if now >= next_word:
                    next_word = now + (now - began)
                    told = refusals.awaited(
                        attempt, self.request, now - began, self._deadline - now, self._held_for
                    )
                    _log.warning("%s", told)
            self._pause(news)
            if self._record.read():
                news = self._clock()
            self._keep_time(watch)

    def _learn_lost(self) -> bool:
        """Put members that were lost meanwhile into the record; return whether it changed."""
        lost = self._more_lost()
        if lost <= set(self.request.lost):
            return False
        self.request = dataclasses.replace(self.request, lost=tuple(sorted(lost | set(self.request.lost))))
        before = self._record.ledger
        move = self._record.apply(lambda ledger: Move(assigned.remembered(ledger, self.request)))
        return move.ledger is not before

    def _nothing_due(self) -> bool:
        """Whether what a working generation was to be succeeded for has gone away."""
        return not assigned.due(self._record.ledger, self.request.past_generation)

    def _claim(self, watch: _Watch | None) -> _Watch | None:
        """Claim the rank; where another process holds it, return a watch of that process."""
        waiting = self._record.ledger.waiting
        looked = self._look_at(() if waiting is None else self._of_interest(waiting))
        dead, seen = looked.gone, looked.seen
        if watch is not None and watch.verdict == "lost":
            dead |= {watch.holder}
        living = watch.holder if watch is not None and watch.verdict == "living" else ""
        begins = self._begins(looked)
        move = self._record.apply(
            lambda ledger: admission.claim(
                ledger,
                self.request,
                self._me,
                self._token,
                dead=dead,
                seen=seen,
                living=living,
                begins=begins,
            ),
            self._claim_letter,
        )
        if move.refusal is not None:
            raise self._error(move.refusal)
        if move.holder is None:
            self._number = move.attempt
            return None
        now = self._clock()
        count = self._record.beats(self.request.slot)
        if watch is None or watch.holder != move.holder.id:
            return _Watch(
                move.holder.id, refusals.contested(move.attempt, self.request, move.holder), count, now
            )
        watch.look(count, now)
        return watch

    def _claim_letter(self, ledger: Ledger) -> ClaimLetter | None:
        """What another member may write for this one, which comes again."""
        request, waiting = self.request, ledger.waiting
        if waiting is None or not request.past or request.working:
            return None
        member = dataclasses.replace(request.member, rank=0)  # it is assigned
        claim = Claim(
            self._me,
            member,
            request.last_generation,
            request.past_generation,
            request.step,
            torn=request.torn,
        )
        return ClaimLetter(waiting.number, request.terms, claim)

    def _keep_time(self, watch: _Watch | None) -> None:
        """Raise at the deadline."""
        if self._cancelled() or self._given_up.is_set():
            raise self._cancel()
        if (stale := admission.fenced(self._record.ledger, self.request)) is not None:
            self._record.apply(lambda ledger: Move(admission.withdraw(ledger, self._number, self._me)))
            raise self._error(stale)
        if self._clock() < self._deadline:
            return
        if self._number == 0:
            # The holder was found neither alive nor dead, so only this process's join fails.
            raise self._error(watch.failure if watch is not None else None)
        if not self._seal():
            self._expire()

    def _expire(self) -> None:
        """Close the attempt at its deadline and raise; return if it became active just before."""
        move = self._record.apply(
            lambda ledger: admission.expire(
                ledger,
                self._number,
                self._me,
                self.request,
                timeout=self._timeout,
                gone=self._gone,
                held=self._held_for,
                given=self._given,
            )
        )
        if move.refusal is not None:
            raise self._error(move.refusal)

    def _of_interest(self, waiting: Attempt) -> tuple[Claim, ...]:
        """Return the claims to probe first: the rank's holder; all, where the claim seals or closes."""
        if waiting.terms != self.request.terms or self._would_complete(waiting):
            return waiting.claims
        return tuple(claim for claim in waiting.claims if claim.slot == self.request.slot)

    def _would_complete(self, waiting: Attempt) -> bool:
        """Whether this member's claim may be the one that seals the attempt."""
        if not self.request.assigned:
            return set(waiting.missing) <= {self.request.rank}
        others = assigned.expected(self._record.ledger)
        return len(waiting.missing) <= 1 and all(
            each.slot == self.request.slot or each.rank in self.request.lost for each in others
        )

    def _look_at(self, claims: Iterable[Claim]) -> _Looked:
        """Look which of the claims' processes are there."""
        every = list(claims)
        others = [claim.member for claim in every if claim.member.process != self.request.process]
        found = self._probe([member.endpoint for member in others], _PROBE_WITHIN) if others else {}
        gone, doubted, silent = set[str](), set[str](), set[str]()
        for claim in every:
            answer = found.get(claim.member.endpoint, True)
            if answer is None:
                silent.add(claim.id)
            elif not answer:
                (gone if self._is_gone(claim) else doubted).add(claim.id)
        seen = frozenset(claim.id for claim in every) - gone - doubted
        return _Looked(frozenset(gone), seen, frozenset(silent))

    def _is_gone(self, claim: Claim) -> bool:
        """Whether a process is gone whose address does not answer.

        Where that address may mean another host here, its signs of life in the store decide.
        """
        if not apart(self.request.member, claim.member):
            return True
        count, now = self._record.beats(claim.slot), self._clock()
        before, since = self._doubts.setdefault(claim.id, (count, now))
        if count != before:
            raise self._refused_by(refusals.elsewhere(self.request, claim.member))
        return now - since >= LOST_AFTER

    def _refused_by(self, failure: Failure) -> JoinError:
        self._record.apply(lambda ledger: Move(admission.refuse(ledger, failure)))
        return self._error(failure)

    def _seal(self) -> bool:
        """Seal this member's open attempt, or find it no longer open; False if it stays open.

        Two things delay sealing: claims of members that died while they waited, which are dropped, and a
        generation that was not reported over, as long as one of its processes exists. Where ranks are
        assigned, members that may still come delay it, too, until the last call is over.
        """
        ledger = self._record.ledger
        now, waiting = ledger.current, ledger.waiting
        if now is not None and not admission.may_seal(ledger, self._gone):
            found = self._probe([claim.member.endpoint for claim in now.holders], _PROBE_WITHIN)
            if any(found.values()) or not self._silent_for_long(None in found.values()):
                self._silent_since = None if any(found.values()) else self._silent_since
                return False
            self._gone = now.number
        claims = waiting.claims if waiting is not None else ()
        late = assigned.expected(ledger)
        votes = majority.voters(ledger) if ledger.listed and self.request.assigned else ()
        looked = self._look_at((*claims, *late, *votes))
        gone = looked.gone
        if not {claim.id for claim in claims} <= gone | looked.seen:
            return False
        last_call, begins = self._waited_long(alone=not late), self._begins(looked)
        move = self._record.apply(
            lambda ledger: Move(self._sealed(ledger, gone, last_call=last_call, begins=begins))
        )
        return (
            admission.claim_state(move.ledger, self._number, self._me, self.request).phase is not Phase.OPEN
        )

    def _silent_for_long(self, unknown: bool) -> bool:
        """Whether processes of which none answers are gone; `unknown`: some did not refuse either.

        Where ranks are assigned, their hosts may only be cut off from here: that takes a last call's time.
        For members of a generation before it is the last call as well; a newcomer waits for another one.
        """
        if not unknown or not self.request.assigned:
            return True
        now = self._clock()
        if self._silent_since is None:
            self._silent_since = now
        enough = now - self._silent_since >= self._last_call
        if enough and self.request.past:
            self._enough_since = self._silent_since
        return enough

    def _waited_long(self, *, alone: bool) -> bool:
        """Whether the last call is over; it begins when this is asked first.

        It ends while this member has the time to build the generation. A newcomer whose time is up does not
        end it for members of the generation before: it leaves them `alone` only where none is expected.
        """
        now = self._clock()
        if self._enough_since is None:
            self._enough_since = now
        if now - self._enough_since >= self._last_call:
            return True
        late = now >= self._deadline - min(BUILDING, self._timeout / 4)
        return late and (alone or bool(self.request.past))

    def _begins(self, looked: _Looked) -> bool:
        """See `majority.may_follow`; the store is asked only where that decides something."""
        ledger, self._held_for = self._record.ledger, ""
        if not self.request.assigned or not majority.rests_on_store(ledger, looked.gone):
            return True
        if ledger.current is None and ledger.before is None:
            self._held_for = self._held()
            return not self._held_for
        now = self._clock()
        if looked.silent:
            self._reached_since = None
        elif self._reached_since is None:
            self._reached_since = now
        told = self._reached_since is not None and now - self._reached_since >= _TOLD_WITHIN
        return told and not self._held()

    def _sealed(self, ledger: Ledger, gone: frozenset[str], *, last_call: bool, begins: bool) -> Ledger:
        left = admission.drop(ledger, self._number, self._me, gone)
        return admission.seal(
            left, self._number, self._me, self._token,
            gone=self._gone, dead=gone, last_call=last_call, begins=begins,
        )  # fmt: skip

    def _look(self) -> None:
        if self._cancelled() or self._given_up.is_set():
            raise self._cancel()
        self._record.read()
        self._raise_if_closed()
        if self._clock() >= self._deadline:
            self._expire()

    def _commit(
        self, check: Callable[[], None] = lambda: None, limit: Callable[[], int] | None = None
    ) -> None:
        began = self._clock()
        self._record.apply(
            lambda ledger: Move(admission.ready(ledger, self._number, self._me)),
            lambda _: ReadyLetter(self._number, self._me),
        )
        while self._raise_if_closed() is not Phase.ACTIVE:
            if limit is not None and self._all_ready():
                self._say_limit(limit())
                limit, began = None, self._clock()
                continue
            try:
                check()
            except BaseException:
                # A member that was active already may be gone by now. Then this one is active, too, and the
                # watchdog reports the loss.
                self._record.read()
                if self._raise_if_closed() is Phase.ACTIVE:
                    return
                raise
            self._pause(began)
            self._look()

    def _all_ready(self) -> bool:
        now = self._record.ledger.current
        return now is not None and now.number == self._number and not now.unready

    def _say_limit(self, advance: int) -> None:
        after, rank = self.request.past_generation, self.request.past_rank
        self._record.apply(lambda ledger: Move(assigned.limit(ledger, after, rank, advance)))

    def _raise_if_closed(self) -> Phase:
        state = admission.claim_state(self._record.ledger, self._number, self._me, self.request)
        if state.phase is Phase.CLOSED:
            raise self._error(state.failure)
        return state.phase

    def _cancel(self) -> JoinError:
        """Close the attempt because this member gives up; return the error to raise."""
        request = self.request
        who = f"host {request.hostname}, pid {request.pid}"
        why = f"{request.place} of world {request.world!r} ({who}) gave up"
        failure = refusals.abandoned(self._number, why)
        self._leave(failure)
        return self._error(failure)

    def _leave(self, failure: Failure, *, left: bool = False) -> None:
        withdrawn = self._record.box.withdraw()
        if self._number or withdrawn:
            self._record.apply(
                lambda ledger: Move(self._closed(ledger, failure, left=left, writes=withdrawn))
            )

    def _closed(self, ledger: Ledger, failure: Failure, *, left: bool, writes: bool) -> Ledger:
        # The generation may have become active on other members meanwhile: then report it over.
        closed = admission.fail(ledger, self._number, self._me, failure, left=left)
        if closed is ledger:
            closed = admission.over(ledger, self._number, self._me)
        if writes and closed is ledger:
            # Who has read the letter before it was withdrawn finds another record than it has read.
            closed = dataclasses.replace(ledger, number=ledger.next_number)
        return closed

    def _last_words(self, error: BaseException) -> None:
        told = error if isinstance(error, Exception) else JoinAbandonedError(self.request.world, repr(error))
        with contextlib.suppress(JoinError):  # the store failed
            self._leave(refusals.failure_from(told, self.request))

    def _refuse(self, error: JoinError) -> None:
        """Tell the members that wait for this one that it cannot join.

        Repeated for a while, because they may start to wait a moment later. A refusal left in the store would
        hit the next, correct join instead.
        """
        failure = refusals.failure_from(error, self.request)
        told: list[bool] = []

        def step(ledger: Ledger) -> Move:
            refused = admission.refuse(ledger, failure)
            told.append(refused is not ledger)
            return Move(refused)

        end = min(self._clock() + REFUSING, self._deadline)
        while True:
            self._part(lambda: self._record.apply(step))
            if (told and told[-1]) or self._clock() >= end or self._cancelled():
                return
            self._sleep(0.02)

    def _error(self, failure: Failure | None) -> JoinError:
        failure = failure or refusals.abandoned(self._number, "The attempt ended and left no reason")
        return refusals.error_of(failure, self.request.world)

    # Waiting.

    def _pause(self, news: float) -> None:
        """Sleep before the next read of the record.

        0.2 ms while the last change is younger than 10 ms, then a fiftieth of its age, up to 5 ms; after 2 s
        a four-hundredth, up to 20 ms. Longer in large worlds (`least_pause`).
        """
        now = self._clock()
        age = now - news
        wait = min(max(0.0002, age / 50), max(0.005, min(age / 400, 0.02)))
        wait = max(wait, least_pause(self._size()))
        self._sleep(max(0.0, min(wait, self._deadline - now)))

    def _size(self) -> int:
        """How many members read the record, about."""
        return self._record.ledger.members if self.request.assigned else self.request.size

    def _part(self, last_words: Callable[[], object], keys: Iterable[str] = ()) -> None:
        names = [*keys, *self._record.box.keys]

        def speak() -> None:
            last_words()
            self._record.delete(names)

        # Best effort: the store may be unreachable, and the caller is leaving anyway.
        with contextlib.suppress(JoinError):
            self._within(speak, self._clock() + PARTING)

    def _within(self, function: Callable[[], T], deadline: float) -> T:
        try:
            return in_time(
                function,
                deadline=deadline,
                clock=self._clock,
                hurry=self._cancelled,
                give_up=self._given_up.set,
                parting=_SLACK,
                last_words=_LAST_WORDS,
            )
        except NoThreadError as error:
            raise error.abandoned(self.request.world) from error
        except NoAnswerError as error:
            raise StoreUnreachableError(
                self.request.world,
                f"The store of world {self.request.world!r} gave {error}",
                rule="The store has to answer as long as a world is joined",
                next_step="Check that the process that serves it (rank 0's for tcp://) runs; then join again",
            ) from error


def _always() -> bool:
    """Worlds begin at any store, but for one that is a list of addresses."""
    return True


@dataclasses.dataclass(frozen=True)
class _Looked:
    """Ids of claims whose processes are gone, that may exist, and, of those, that cannot be reached."""

    gone: frozenset[str]
    seen: frozenset[str]
    silent: frozenset[str]


class _Watch:
    """Watches the holder of a rank for signs of life."""

    def __init__(self, holder: str, failure: Failure, count: str, now: float) -> None:
        self.holder = holder
        self.failure = failure
        self.verdict = ""
        self._count = count
        self._since = now

    def look(self, count: str, now: float) -> None:
        """Compare the holder's counter with the last one."""
        if count != self._count:
            self.verdict = "living"
        elif now - self._since >= LOST_AFTER:
            self.verdict = "lost"
