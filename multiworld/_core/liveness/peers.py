"""The fault plane of one process, decided: its worlds, the processes they share, and who has to hear what.

`Peers` is fed with what happened (a world was added, a connection opened, frames came, time passed) and collects
what is to be done about it as `Action` records; the watchdog's thread carries them out. It owns no socket, no
thread and no clock, so whole groups of processes can be run in a test, in any order of events.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from multiworld._core.liveness.actions import Action, Ask, Broke, Busy, Dial, Drop, Ready, Refusal, Send, Why
from multiworld._core.liveness.attached import World, Worlds
from multiworld._core.liveness.connection import Link, Place
from multiworld._core.liveness.detector import Detector, Ending, Probe, WorldId, names, world_id
from multiworld._core.liveness.dialing import Dialing
from multiworld._core.liveness.early_close import Tethers
from multiworld._core.liveness.ended import Past
from multiworld._core.liveness.wire import (
    Attach,
    Attached,
    Beat,
    Broken,
    Close,
    Frame,
    Goodbye,
    Hello,
    Need,
    Reason,
    Refused,
    Tether,
)  # fmt: skip
from multiworld.events import Breakage, Cause

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from multiworld._core.liveness.evidence import Evidence
    from multiworld._core.membership.roster import Roster

__all__ = ["MAX_STRANGERS", "Peers"]

MAX_STRANGERS = 256
"""Connections that may be waiting for their proof at a time, at most; the oldest makes room."""

_MAX_WAITING = 64  # proofs for unknown worlds, of a stranger
_MAX_WAITING_TRUSTED = 1024
_SLOWEST_BEAT = 1.0
_FASTEST_BEAT = 0.02


class Peers:
    """See the module.

    Args:
        own: this process's id, 32 hex digits.
        nonce: gives 16 fresh random bytes.
        channel: gives a fresh number for a connection.
        tethers: whether this process dials tethers; can be changed (`tethers.own_wanted`).
        busy: seconds of silence after which a process that runs counts as hung all the same; 0: all silence counts.
        strangers: connections that may be waiting for their proof at a time.
    """

    def __init__(
        self,
        own: str,
        *,
        nonce: Callable[[], bytes],
        channel: Callable[[], int],
        tethers: bool = False,
        busy: float = 0.0,
        strangers: int = MAX_STRANGERS,
    ) -> None:
        self.own = own
        self._nonce = nonce
        self._channel = channel
        self._strangers = strangers
        self._worlds = Worlds(own)
        self._past = Past()
        self._links: dict[int, Link] = {}
        self._trusted: dict[str, Link] = {}
        self._untrusted: dict[int, Link] = {}  # oldest first
        self._dialing = Dialing(own)
        self._detector = Detector(own, busy)
        self._actions: list[Action] = []
        self.tethers = Tethers(
            own, nonce=nonce, channel=channel, act=self._actions.append, pledge=self._worlds.pledge
        )
        self.tethers.own_wanted = tethers

    # -- worlds

    def add(self, roster: Roster, now: float) -> None:
        """Attach a world: connect to its members, answer those that were early."""
        self._worlds.add(roster)
        self._past.revive(roster)
        self._detector.add(roster, now)
        for process in self._worlds.processes(roster):
            link = self._trusted.get(process)
            if link is None:
                self._dialing.want(process, now)
            else:
                self._offer(link)
                self._ask(link, now)
        for link in tuple(self._links.values()):
            # Those for other generations of the name too: they may be refused now.
            for place in [each for each in link.waiting if each[0].rpartition("/")[0] == roster.world]:
                self._consider(link, place, link.waiting.pop(place), now)
        self._check(roster.key, now)

    def remove(self, world: WorldId, *, goodbye: bool, now: float, failure: str = "") -> None:
        """Detach a world; with `goodbye` the members are told that this one left, or that `failure` ended it."""
        state = self._worlds.pop(world)
        if state is None:
            return
        roster = state.roster
        self._detector.remove(world)
        self._past.bury(roster)
        others = self._worlds.of(roster.key)
        word: Frame = Goodbye(*world)
        if failure:
            # As members of all versions understand it.
            detail = f"{names([roster.members[roster.rank]])}: {failure}"
            word = Broken(roster.key, Cause.FAILED, (roster.rank,), detail)
        if goodbye:
            for other in others:
                if isinstance(word, Broken):
                    self._detector.fell(other, roster.rank, word.detail)
                else:
                    self._detector.left(other, roster.rank)
        for process in self._worlds.processes(roster):
            for link in [each for each in self._links.values() if each.peer == process]:
                if goodbye and world in link.offered:
                    self._send(link, word)
                link.offered.discard(world)
                link.accepted.discard(world)
                if not others:
                    link.proven = {place for place in link.proven if place[0] != roster.key}
                self._ask(link, now)
            if not self._worlds.shared(process):
                self._dialing.drop(process)
                for link in [each for each in self._links.values() if each.peer == process]:
                    self._part(link)

    def report(self, world: WorldId, ranks: Iterable[int], detail: str, now: float) -> None:
        """An operation of `world` failed."""
        self._detector.failed(world, ranks, detail, now)

    def missing(self, world: WorldId) -> dict[int, str]:
        """Return the ranks that are not attached yet, each with what is known about why ("" for nothing)."""
        state = self._worlds.get(world)
        if state is None:
            return {}
        absent = (member.rank for member in state.roster.members if not self._there(state, member.rank))
        return {rank: state.notes.get(rank, "") for rank in absent}

    # -- what happened to connections

    def accepted(self, channel: int, now: float) -> None:
        """Somebody connected."""
        strangers = [link for link in self._untrusted.values() if not link.dialed]
        if len(strangers) >= self._strangers:
            self._forget(strangers[0])
            self._actions.append(Drop(strangers[0].channel, orderly=False))
        self._links[channel] = self._untrusted[channel] = Link(
            channel, self.own, self._nonce(), dialed=False, since=now
        )

    def connected(self, channel: int, now: float) -> None:
        """A dialed connection is established."""
        self.tethers.connected(channel, now)
        link = self._links.get(channel)
        if link is not None:
            link.established = True
            link.since = now
            self._dialing.connected(link.peer)
            self._send(link, link.hello())

    def received(
        self, channel: int, frames: Iterable[Frame], now: float, *, error: str | None = None
    ) -> None:
        """Frames came; `error`: what came after them is none."""
        left = deque(frames)
        while left and (link := self._links.get(channel)) is not None:
            if link.trusted:
                self._detector.heard(link.peer, now)
            self._take(link, left.popleft(), now)
        link = self._links.get(channel)
        if link is None and (left or error is not None):
            self.tethers.received(channel, left, error=error)  # it is one, maybe since the frame before
        elif link is not None and error is not None:
            self._reject(link, now)

    def closed(
        self, channel: int, ending: Ending, now: float, *, refused: bool = False, plain: bool = False
    ) -> None:
        """A connection ended; `refused`: it never came about, nobody listens there; `plain`: it was not reset."""
        link = self._links.get(channel)
        if link is None:
            self.tethers.closed(channel, plain=plain)
            return
        self._forget(link)
        if link.trusted:
            self._detector.closed(link.peer, ending)
            self._again(link.peer, now)
        elif link.dialed:
            self._dialing.ended(link.peer, now, refused=refused)
            self._worlds.note(link.peer, "nobody listens there" if refused else "it closed the connection")

    # -- time

    def stalled(self, seconds: float, now: float) -> None:
        """This process did not run for `seconds`, until now."""
        self._detector.stalled(seconds, now)

    def answered(self, process: str, evidence: Evidence, now: float) -> None:
        """A host was asked what `process` does, and answered."""
        self._detector.answered(process, evidence, now)

    def suspects(self, now: float) -> list[tuple[str, int]]:
        """Return processes that were silent for too long, with the connection that is to be probed."""
        return [
            (process, self._trusted[process].channel)
            for process in self._detector.suspects(now)
            if process in self._trusted
        ]

    def settle(self, now: float, probes: Mapping[str, Probe]) -> None:
        """Judge, after all that happened was fed; dial, beat and time out what is due."""
        for link in self.tethers.ended():
            # Its process has died, and its kernel has not come to this connection yet.
            self._actions.append(Drop(link.channel, orderly=False))
            self.closed(link.channel, Ending.LOST, now)
        while verdicts := self._detector.settle(now, probes):
            for verdict in verdicts:
                self._tell(verdict.world, verdict.breakage, verdict.tell)
                self._actions.append(Broke(verdict.world, verdict.breakage))
            # What was told to other ranks of this very process is settled in the next round.
        self._actions += [Busy(each.world, each.ranks, each.busy) for each in self._detector.notices()]
        for process in self._detector.questions(now):
            shared = [self._worlds[each] for each in self._worlds.shared(process) if self._worlds[each].ready]
            if shared:
                roster = shared[-1].roster
                self._actions.append(
                    Ask(process, roster.members[shared[-1].ranks(process)[0]].endpoint, roster.token)
                )
        for link in tuple(self._untrusted.values()):
            if link.since + link.patience <= now:
                self._expire(link, now)
        for process in self._dialing.gone(now):
            for world in self._worlds.shared(process):
                rank = self._worlds[world].ranks(process)[0]
                self._refuse(world, Why.GONE, f"rank {rank} is gone: nobody listens where it listened")
            self._dialing.drop(process)
        for process, attempt in self._dialing.due(now):
            self._dial(process, attempt, now)
        self.tethers.settle(now)
        for link in self._trusted.values():
            if link.beat_at <= now:
                self._send(link, Beat(link.beats))
                link.beats += 1
                # On a grid: connections with the same interval beat together, one wake-up for all.
                link.beat_at = (now // link.interval + 1) * link.interval
                if link.beat_at <= now:  # the division was rounded down to this very moment
                    link.beat_at = now + link.interval

    def wake(self) -> float:
        """When `settle` has to be called again if nothing happens before; infinite for never."""
        return min(
            self._detector.wake(),
            self._dialing.wake(),
            self.tethers.wake(),
            min((link.since + link.patience for link in self._untrusted.values()), default=math.inf),
            min((link.beat_at for link in self._trusted.values()), default=math.inf),
        )

    def take(self) -> list[Action]:
        """Return what is to be done, in order, and forget it."""
        actions = self._actions.copy()
        self._actions.clear()
        return actions

    def bear(self, busy: float) -> None:
        """Set for how many seconds a silent process that runs counts as busy."""
        self._detector.bear(busy)

    @property
    def links(self) -> int:
        """How many connections there are, trusted or not; tethers are not counted."""
        return len(self._links)

    # -- frames

    def _take(self, link: Link, frame: Frame, now: float) -> None:
        if isinstance(frame, Beat):
            if not link.greeted:
                self._reject(link, now)
        elif isinstance(frame, Hello):
            self._greeted(link, frame, now)
        elif not link.greeted:
            self._reject(link, now)
        elif isinstance(frame, Attach):
            self._consider(link, (frame.key, frame.rank), frame.proof, now)
        elif isinstance(frame, Tether):
            self._consider_tether(link, (frame.key, frame.rank), frame.proof, now)
        elif isinstance(frame, Close):
            self._parted(link, now)
        elif isinstance(frame, Refused):
            if link.trusted or link.dialed:
                self._refused(link, frame)
        elif isinstance(frame, Goodbye):
            self._left(link, (frame.key, frame.rank))
        elif not link.trusted:
            return
        elif isinstance(frame, Attached):
            link.accepted.add((frame.key, frame.rank))
            self._check(frame.key, now)
        elif isinstance(frame, Broken):
            self._told(link, frame)
        else:
            link.wanted = min(max(frame.interval, _FASTEST_BEAT), _SLOWEST_BEAT)
            link.beat_at = min(link.beat_at, now + link.interval)

    def _greeted(self, link: Link, frame: Hello, now: float) -> None:
        if not link.greet(frame):
            self._reject(link, now)
        elif link.dialed:
            self._offer(link)
        else:
            self._send(link, link.hello())

    def _consider(self, link: Link, place: Place, given: bytes, now: float) -> None:
        """The other end says that it is `place`."""
        key, rank = place
        local = self._worlds.of(key)
        if not local:
            self._consider_unknown(link, place, given, now)
            return
        roster = self._worlds[local[0]].roster
        theirs = rank < roster.size and roster.members[rank].process == link.peer
        if not theirs or not link.holds(roster.token, place, given):
            self._send(link, Refused(key, rank, Reason.PROOF, roster.generation))
            if not link.trusted:
                self._expire(link, now)
        elif not link.knocking:
            link.proven.add(place)
            if not link.trusted:
                self._trust(link, now)
            self._send(link, Attached(key, rank))
            self._check(key, now)

    def _consider_unknown(self, link: Link, place: Place, given: bytes, now: float) -> None:
        key, rank = place
        verdict = self._past.judge(key, self._worlds.rosters(), lambda token: link.holds(token, place, given))
        if verdict is not None:
            self._send(link, Refused(key, rank, *verdict))
        elif len(link.waiting) >= (_MAX_WAITING_TRUSTED if link.trusted else _MAX_WAITING):
            self._reject(link, now)
        else:
            # Its join is a few milliseconds ahead of this process's.
            link.waiting[place] = given

    def _consider_tether(self, link: Link, place: Place, given: bytes, now: float) -> None:
        """The other end says that this connection is the tether of `place`."""
        if link.dialed or link.trusted:
            self._reject(link, now)
            return
        main = self._trusted.get(link.peer)
        if main is not None and place in main.proven:
            token = self._worlds[self._worlds.of(place[0])[0]].roster.token
            if link.holds(token, place, given, tether=True):
                self._forget(link)
                self.tethers.adopt(main, link, place)
                return
        self._expire(link, now)

    def _trust(self, link: Link, now: float) -> None:
        old = self._trusted.get(link.peer)
        link.trusted = True
        del self._untrusted[link.channel]
        self._dialing.drop(link.peer)
        if old is not None:
            # The other process gave the old connection up, or it would not have dialed again.
            self._claim(old, Cause.UNREACHABLE, "it gave its connection up and made another")
            self._forget(old)
            self._actions.append(Drop(old.channel, orderly=False))
        self._trusted[link.peer] = link
        self._detector.connected(link.peer, now)
        # The proof first: the other end takes nothing else from this one before.
        self._offer(link)
        self._ask(link, now)

    def _refused(self, link: Link, frame: Refused) -> None:
        world = (frame.key, frame.rank)
        state = self._worlds.get(world)
        if state is None or world not in link.offered:
            return
        link.offered.discard(world)
        ranks = state.ranks(link.peer)
        if frame.reason is Reason.STALE:
            said = f"rank {ranks[0]} is in generation {frame.generation}"
            self._refuse(world, Why.STALE, said)
        elif frame.reason is Reason.OVER:
            self._refuse(world, Why.GONE, f"rank {ranks[0]} gave up generation {state.roster.generation}")
        else:
            state.notes.update(dict.fromkeys(ranks, "it refused this process's proof: its token is another"))

    def _left(self, link: Link, place: Place) -> None:
        link.waiting.pop(place, None)
        if place in link.proven:
            link.proven.discard(place)
            for world in self._worlds.of(place[0]):
                self._detector.left(world, place[1])

    def _told(self, link: Link, frame: Broken) -> None:
        """The other end holds a world to be broken."""
        if not any(key == frame.key for key, _ in link.proven):
            return
        own = [(frame.key, rank) for rank in frame.ranks]
        itself = frame.cause is Cause.FAILED and len(own) == 1 and own[0] in link.proven
        if itself:
            link.proven.discard(own[0])  # it says no goodbye
        for world in self._worlds.of(frame.key):
            if itself:
                self._detector.fell(world, frame.ranks[0], frame.detail)
            else:
                self._detector.told(world, frame.cause, frame.ranks, frame.detail)

    def _parted(self, link: Link, now: float) -> None:
        """The other end closes the connection in good order."""
        self._forget(link)
        self._actions.append(Drop(link.channel, orderly=True))
        if link.trusted:
            self._detector.disconnected(link.peer)
            for key, rank in sorted(link.proven):
                for world in self._worlds.of(key):
                    if self._worlds[world].ready:
                        self._detector.left(world, rank)
            self._again(link.peer, now)
        elif link.dialed:
            self._dialing.ended(link.peer, now, refused=False)

    # -- doing

    def _reject(self, link: Link, now: float) -> None:
        """What came is not what a member sends."""
        self._actions.append(Drop(link.channel, orderly=False))
        self.closed(link.channel, Ending.GARBAGE, now)

    def _expire(self, link: Link, now: float) -> None:
        """The handshake came to nothing."""
        if link.greeted:
            self._send(link, Close())
        self._forget(link)
        self._actions.append(Drop(link.channel, orderly=link.greeted))
        if link.dialed:
            self._dialing.ended(link.peer, now, refused=False)
            self._worlds.note(
                link.peer, "it does not know this generation" if link.greeted else "it does not answer"
            )

    def _part(self, link: Link) -> None:
        """No world needs this connection any more."""
        if link.greeted:
            self._send(link, Close())
        self._forget(link)
        self._actions.append(Drop(link.channel, orderly=link.greeted))
        if link.trusted:
            self._detector.disconnected(link.peer)

    def _forget(self, link: Link) -> None:
        del self._links[link.channel]
        self._untrusted.pop(link.channel, None)
        if self._trusted.get(link.peer) is link:
            del self._trusted[link.peer]
            self.tethers.forget(link)

    def _again(self, process: str, now: float) -> None:
        """The connection is gone; worlds that are still being attached need another."""
        if self._worlds.awaits(process):
            self._dialing.want(process, now)

    def _dial(self, process: str, attempt: int, now: float) -> None:
        known = self._worlds.endpoints(process)
        channel = self._channel()
        link = Link(channel, self.own, self._nonce(), dialed=True, since=now, peer=process, established=False)
        link.knocking = self.own > process
        self._links[channel] = self._untrusted[channel] = link
        self._actions.append(Dial(channel, known[attempt % len(known)]))

    def _offer(self, link: Link) -> None:
        """Prove every world shared with the other end; to a stranger only as many as it may hold waiting."""
        open_ = [each for each in self._worlds.shared(link.peer) if each not in link.offered]
        for world in open_ if link.trusted else open_[:_MAX_WAITING]:
            self._send(link, link.offer(self._worlds[world].roster.token, world))

    def _ask(self, link: Link, now: float) -> None:
        """Tell the other end how often it has to be heard."""
        interval = min(max(self._detector.shortest(link.peer) / 5, _FASTEST_BEAT), _SLOWEST_BEAT)
        if link.trusted and link.asked != interval:
            link.asked = interval
            self._send(link, Need(interval))
            link.beat_at = min(link.beat_at, now + link.interval) if link.beats else now

    def _tell(self, world: WorldId, breakage: Breakage, ranks: Iterable[int]) -> None:
        roster = self._worlds[world].roster
        frame = Broken(roster.key, breakage.cause, breakage.ranks, breakage.detail)
        for process in dict.fromkeys(roster.members[rank].process for rank in ranks):
            link = self._trusted.get(process)
            if link is not None:
                self._send(link, frame)
                self._ask(link, breakage.at)
        for other in self._worlds.of(roster.key):
            self._detector.told(other, breakage.cause, breakage.ranks, breakage.detail)

    def _claim(self, link: Link, cause: Cause, detail: str) -> None:
        """Break the worlds that were attached over this connection."""
        for key, rank in sorted(link.proven):
            for world in self._worlds.of(key):
                self._detector.told(world, cause, (rank,), f"rank {rank}: {detail}")

    def _check(self, key: str, now: float) -> None:
        for world in self._worlds.of(key):
            state = self._worlds[world]
            if not state.ready and all(self._there(state, rank) for rank in range(state.roster.size)):
                state.ready = True
                self._actions.append(Ready(world))
                for process in self._worlds.processes(state.roster):
                    self.tethers.want(self._trusted[process], now)

    def _there(self, state: World, rank: int) -> bool:
        roster = state.roster
        process = roster.members[rank].process
        if process == self.own:
            return (roster.key, rank) in self._worlds
        link = self._trusted.get(process)
        return link is not None and (roster.key, rank) in link.proven and world_id(roster) in link.accepted

    def _refuse(self, world: WorldId, why: Why, detail: str) -> None:
        if not self._worlds[world].ready:
            self._actions.append(Refusal(world, why, detail))

    def _send(self, link: Link, frame: Frame) -> None:
        self._actions.append(Send(link.channel, frame))
