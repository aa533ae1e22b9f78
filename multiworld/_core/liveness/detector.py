"""Failure detector: signs of life in, verdicts out.

Signs of life belong to a pair of processes: worlds that share a peer share its state, so a heartbeat costs
the same for one world and for a hundred. Verdicts belong to worlds. The first verdict of a world is final.
The others in a broken world are judged on until it is removed: those that make its next generation must
not wait for one that was lost in the same moment, and whose silence is known a moment later.

The detector uses no sockets and no clock. The driver reads every socket until it is empty, feeds the events,
and then calls `settle` once: peers that ended in the same batch are named in one verdict, and data that
already waited in the kernel counts before silence is judged.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from multiworld._core.liveness.busy_or_hung import BusyTracker
from multiworld._core.liveness.earliest import Earliest
from multiworld._core.liveness.evidence import Activity
from multiworld.events import Breakage, Cause

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from multiworld._core.liveness.evidence import Evidence
    from multiworld._core.membership.roster import Member, Roster

__all__ = [
    "GRACE",
    "SIGN_GRACE",
    "ConnectionEnd",
    "Detector",
    "Loss",
    "Notice",
    "Probe",
    "Verdict",
    "WorldId",
    "names",
    "world_id",
]

WorldId = tuple[str, int]
"""A world of this process: the roster's key, and the rank (two ranks of a world may live in one process)."""

GRACE = 0.5
"""Seconds that a failed operation waits for a more specific cause; half of ``hang_timeout`` where that is
less."""

SIGN_GRACE = 3.0
"""Seconds that it waits at most for each member to give a sign of life; ``hang_timeout`` where that is less.

A killed process closes its connections one after the other: on a busy machine its watchdog's was seen to end
more than `GRACE` after the one of an operation.
"""

_STALL_LEAST = 0.25
_STALL_SHARE = 0.4
# Of hang_timeout: two beats. After a stall of this process, a live peer is heard within one.


def world_id(roster: Roster) -> WorldId:
    """Return the id of the roster's world."""
    return roster.key, roster.rank


class ConnectionEnd(enum.Enum):
    """How an authenticated connection ended, other than in good order."""

    LOST = "its connection was closed by its kernel"
    DEAD = "this host's kernel gave the connection up: its host does not answer"
    GARBAGE = "it sent what no member sends"
    STUCK = "it does not read what it is sent"


_CAUSE_OF = {
    ConnectionEnd.LOST: Cause.CRASHED,
    ConnectionEnd.DEAD: Cause.UNREACHABLE,
    ConnectionEnd.GARBAGE: Cause.FAILED,
    ConnectionEnd.STUCK: Cause.HUNG,
}


@dataclass(frozen=True)
class Probe:
    """Kernel state of a connection.

    Attributes:
        unacknowledged: whether something sent still waits for its acknowledgement.
        last_ack: seconds since the other host acknowledged anything.
    """

    unacknowledged: bool
    last_ack: float


@dataclass(frozen=True)
class Verdict:
    """A world broke.

    Attributes:
        world: which.
        breakage: why.
        tell: ranks of the members that should hear of it.
    """

    world: WorldId
    breakage: Breakage
    tell: tuple[int, ...]


@dataclass(frozen=True)
class Notice:
    """A member runs, but does not answer; or it answers again.

    Attributes:
        world: which.
        ranks: of the members.
        busy: which of the two.
    """

    world: WorldId
    ranks: tuple[int, ...]
    busy: bool


@dataclass(frozen=True)
class Loss:
    """More members of a broken world are lost: they crashed, hang, or cannot be reached.

    Attributes:
        world: which.
        ranks: of the members.
    """

    world: WorldId
    ranks: tuple[int, ...]


@dataclass
class _Claim:
    """A possible cause in the current batch."""

    cause: Cause
    ranks: tuple[int, ...]
    detail: str
    itself: bool = False  # reported by the member itself


_OF_ITSELF = frozenset({Cause.FAILED, Cause.LEFT})
"""Causes that a member tells of itself; the others it has found out."""


@dataclass(frozen=True)
class _FailedOperation:
    """An operation failed at `since`: what it claims is the verdict between `earliest` and `latest`."""

    claim: _Claim
    since: float
    earliest: float
    latest: float


@dataclass
class _World:
    roster: Roster
    claims: list[_Claim] = field(default_factory=list)
    broken: bool = False
    judged: set[int] = field(default_factory=set)  # ranks of which nothing more is to be found out


@dataclass
class _Peer:
    """One process, as long as a world that is not removed has a member there that is not judged."""

    worlds: dict[WorldId, tuple[int, ...]] = field(default_factory=dict)  # which ranks it has in each
    shortest: float = math.inf
    heard: float | None = None  # None: not connected
    since: float = 0.0  # start of the silence: `heard`, or later after a stall of this process
    granted: float = 0.0  # seconds for such stalls since `heard`
    spared: dict[WorldId, None] = field(default_factory=dict)  # worlds that count it as busy
    look: float = -math.inf  # not judged before: it is known to run


class Detector:
    """Decides which members failed.

    Args:
        own: this process's id; its own members are never suspected.
        busy: seconds of silence after which a process that runs counts as hung all the same; 0: all silence
            counts.

    Attributes:
        silence_due: when a silent process is to be judged, or asked about.
    """

    def __init__(self, own: str, busy: float = 0.0) -> None:
        self._own = own
        self._busy = BusyTracker(busy)
        self._notices: list[Notice] = []
        self._losses: list[Loss] = []
        self._worlds: dict[WorldId, _World] = {}
        self._peers: dict[str, _Peer] = {}
        self._ended: dict[str, ConnectionEnd] = {}
        self._urgent: dict[WorldId, None] = {}  # worlds with claims, in order
        self._failed: dict[WorldId, _FailedOperation] = {}
        self.silence_due = Earliest(self._silence_due)

    # -- what there is to watch

    def add(self, roster: Roster, now: float = 0.0) -> None:
        """Watch a world.

        Connected peers keep the time at which they were last heard, except those with a longer interval than
        this world needs: they count as heard `now`, because they have not been told of the shorter one.
        """
        world = world_id(roster)
        self._worlds[world] = _World(roster)
        for member in roster.members:
            if member.process == self._own:
                continue
            peer = self._peers.setdefault(member.process, _Peer())
            peer.worlds[world] = (*peer.worlds.get(world, ()), member.rank)
            peer.look = -math.inf
            if roster.hang_timeout < peer.shortest:
                peer.shortest = roster.hang_timeout
                peer.since = max(peer.since, now)
            self._due_sooner(member.process, peer)

    def remove(self, world: WorldId) -> None:
        """Stop watching a world."""
        state = self._worlds.pop(world, None)
        if state is None:
            return
        self._urgent.pop(world, None)
        self._failed.pop(world, None)
        for process in {member.process for member in state.roster.members} - {self._own}:
            self._unwatch(process, state)

    def _unwatch(self, process: str, state: _World) -> None:
        """Judge a process no more for a world."""
        peer, world = self._peers.get(process), world_id(state.roster)
        if peer is None or peer.worlds.pop(world, None) is None:
            return
        peer.spared.pop(world, None)
        if not peer.worlds:
            # What is connected stays known: another world may come for it.
            peer.shortest = math.inf
            if peer.heard is None:
                del self._peers[process]
        elif peer.shortest >= state.roster.hang_timeout:
            peer.shortest = min(self._worlds[each].roster.hang_timeout for each in peer.worlds)

    def watches(self, world: WorldId) -> bool:
        """Whether the world is watched and not broken."""
        return self._unbroken(world) is not None

    def _unbroken(self, world: WorldId) -> _World | None:
        state = self._worlds.get(world)
        return None if state is None or state.broken else state

    def shortest(self, process: str) -> float:
        """Return the smallest hang_timeout of the worlds shared with `process`; infinite without any."""
        peer = self._peers.get(process)
        return math.inf if peer is None else peer.shortest

    def silence(self, process: str, now: float) -> float:
        """Return the seconds since something came from `process`; infinite without a connection."""
        peer = self._peers.get(process)
        return math.inf if peer is None or peer.heard is None else now - peer.heard

    # -- signs

    def connected(self, process: str, now: float) -> None:
        """An authenticated connection to `process` exists."""
        peer = self._peers.setdefault(process, _Peer())
        peer.heard = peer.since = now
        peer.granted = 0.0
        self._busy.forget(process)
        self._due_sooner(process, peer)

    def heard(self, process: str, now: float) -> None:
        """A frame of `process` arrived."""
        peer = self._peers.get(process)
        if peer is not None and peer.heard is not None:
            peer.heard = peer.since = now
            peer.granted = 0.0
            self._busy.forget(process)
            for world in peer.spared:
                self._notices.append(Notice(world, peer.worlds[world], busy=False))
            peer.spared.clear()

    def disconnected(self, process: str) -> None:
        """The connection was closed in good order."""
        peer = self._peers.get(process)
        self._busy.forget(process)
        if peer is not None:
            peer.heard = None
            if not peer.worlds:
                del self._peers[process]

    def closed(self, process: str, ending: ConnectionEnd) -> None:
        """The connection ended, but not in good order."""
        self._ended[process] = ending
        self.disconnected(process)

    def left(self, world: WorldId, rank: int) -> None:
        """A member said goodbye to a world."""
        state = self._unbroken(world)
        if state is not None:
            detail = f"{names([state.roster.members[rank]])}: it closed the world in good order"
            self._claim(state, _Claim(Cause.LEFT, (rank,), detail))

    def fell(self, world: WorldId, rank: int, detail: str) -> None:
        """A member reported a fault of its own that ends it."""
        state = self._unbroken(world)
        if state is not None and 0 <= rank < state.roster.size:
            self._claim(state, _Claim(Cause.FAILED, (rank,), detail, itself=True))

    def told(self, world: WorldId, cause: Cause, ranks: Iterable[int], detail: str) -> None:
        """A member reported that the world is broken. Ranks that the world does not have are left out."""
        state = self._unbroken(world)
        if state is not None:
            known = tuple(sorted({rank for rank in ranks if 0 <= rank < state.roster.size}))
            self._claim(state, _Claim(cause, known, detail))

    def failed(self, world: WorldId, ranks: Iterable[int], detail: str, now: float) -> None:
        """An operation failed: the verdict, unless a more specific cause arrives first.

        It has `GRACE` to arrive, and longer, `SIGN_GRACE` at most, while a member gives no sign of life: that
        one may be dead, be it named or not, as a survivor's end of a connection closes after a death as well.
        """
        state = self._unbroken(world)
        if state is not None and world not in self._failed:
            claim = _Claim(Cause.FAILED, tuple(sorted(set(ranks))), detail)
            limit = state.roster.hang_timeout
            self._failed[world] = _FailedOperation(
                claim, now, now + min(GRACE, limit / 2), now + min(SIGN_GRACE, limit)
            )

    def questions(self, now: float) -> tuple[str, ...]:
        """Return the silent processes whose hosts are to be asked now."""
        if not self.silence_due.passed(now):
            return ()
        due = tuple(
            process
            for process, peer in self._peers.items()
            if peer.heard is not None and now >= self._ask_at(process, peer)
        )
        for process in due:
            self._busy.ask(process, now)
        self.silence_due.changed()
        return due

    def answered(self, process: str, evidence: Evidence, now: float) -> None:
        """The host of `process` answered a question."""
        self._busy.answered(process, evidence.activity, now)
        peer = self._peers.get(process)
        if peer is not None:
            peer.look = -math.inf
            self._due_sooner(process, peer)

    def bear(self, busy: float) -> None:
        """Set for how many seconds a silent process that runs counts as busy; 0: all silence counts."""
        self._busy.bound = busy
        self.silence_due.changed()

    def losses(self) -> list[Loss]:
        """Return the members of broken worlds that were lost since the last call, not those of verdicts."""
        losses, self._losses = self._losses, []
        return losses

    def notices(self) -> list[Notice]:
        """Return the members that became busy, or answer again, since the last call."""
        notices, self._notices = self._notices, []
        return notices

    def stalled(self, seconds: float, now: float) -> None:
        """Grant the peers extra time: this process itself did not run for `seconds`, until now.

        Data that arrived meanwhile is read before peers are judged, so a stall matters only where the peers
        stalled too (the whole machine did), and only if it was longer than a heartbeat's interval. Silence is
        then judged after two more intervals (at most the stall's length). A peer is granted at most one
        hang_timeout in all, so that a process which always stalls still detects failures.
        """
        self.silence_due.changed()
        for peer in self._peers.values():
            limit = peer.shortest
            if peer.heard is None or not peer.worlds or seconds < _STALL_LEAST * limit:
                continue
            due = max(peer.since + limit, now)
            grant = min(now + min(seconds, _STALL_SHARE * limit) - due, limit - peer.granted)
            if grant > 0:
                peer.granted += grant
                peer.since = due + grant - limit

    # -- decisions

    def wake(self) -> float:
        """Return when `settle` is due next without further events; infinite for never."""
        if self._ended or self._urgent:
            return -math.inf
        failed = (self._verdict_at(world, each) for world, each in self._failed.items())
        return min(self.silence_due.time, min(failed, default=math.inf))

    def suspects(self, now: float) -> tuple[str, ...]:
        """Return the processes that were silent for too long for a world; `settle` takes their probes."""
        if not self.silence_due.passed(now):
            return ()
        return tuple(
            process
            for process, peer in self._peers.items()
            if peer.heard is not None and now >= self._due(peer)
        )

    def settle(self, now: float, probes: Mapping[str, Probe]) -> list[Verdict]:
        """Judge the events that were fed.

        Args:
            now: time.
            probes: of the `suspects`; one without a probe counts as a host that answers.
        """
        verdicts: list[Verdict] = []
        if self._ended:
            self._settle_ended(now, verdicts)
        for world in tuple(self._urgent):
            claims = self._worlds[world].claims
            # Of the causes in one batch, "an operation failed" is the least specific.
            best = next((each for each in claims if each.itself or each.cause is not Cause.FAILED), claims[0])
            self._break(world, best.cause, best.ranks, best.detail, now, verdicts)
        for process in self.suspects(now):
            self._settle_silent(process, now, probes, verdicts)
        if self.silence_due.time <= now:
            self.silence_due.changed()
        for world, failed in tuple(self._failed.items()):
            if self._verdict_at(world, failed) <= now:
                claim = failed.claim
                self._break(world, claim.cause, claim.ranks, claim.detail, now, verdicts)
        return verdicts

    def _verdict_at(self, world: WorldId, failed: _FailedOperation) -> float:
        """Return when a failed operation is the verdict, if nothing else happens."""
        processes = {member.process for member in self._worlds[world].roster.members} - {self._own}
        heard = (self._peers[each].heard for each in processes)
        # A process that is not connected is waited for no longer: it closed its connection in good order.
        alive = all(each is None or each > failed.since for each in heard)
        return failed.earliest if alive else max(failed.earliest, failed.latest)

    def _settle_ended(self, now: float, verdicts: list[Verdict]) -> None:
        ended, self._ended = self._ended, {}
        hit = {world for process in ended if process in self._peers for world in self._peers[process].worlds}
        for world in sorted(hit):
            state = self._worlds[world]
            # A member that said goodbye before its process ended has left, or said why it did not.
            left = {
                rank
                for claim in state.claims
                if claim.cause is Cause.LEFT or claim.itself
                for rank in claim.ranks
            }
            members = [
                each
                for each in state.roster.members
                if each.process in ended and each.rank not in left | state.judged
            ]
            if not members:
                continue
            if not state.broken:
                # Who tells why the world broke and dies after that is not why.
                told = next((each for each in state.claims if each.cause not in _OF_ITSELF), None)
                # A crash explains the rest: a crashed process ends others' connections, not the reverse.
                crashed = [each for each in members if ended[each.process] is ConnectionEnd.LOST]
                chosen = crashed or [
                    each for each in members if ended[each.process] is ended[members[0].process]
                ]
                ending = ended[chosen[0].process]
                seen = _Claim(_CAUSE_OF[ending], _ranks(chosen), f"{names(chosen)}: {ending.value}")
                claim = told or seen
                self._break(world, claim.cause, claim.ranks, claim.detail, now, verdicts)
            self._lose(
                state, [each for each in members if _CAUSE_OF[ended[each.process]] is not Cause.FAILED]
            )

    def _settle_silent(
        self, process: str, now: float, probes: Mapping[str, Probe], verdicts: list[Verdict]
    ) -> None:
        for world in sorted(self._peers[process].worlds):
            roster, judged = self._worlds[world].roster, self._worlds[world].judged
            limit = roster.hang_timeout
            silent = [
                each
                for each in roster.members
                if each.rank not in judged and now >= self._since(each.process) + limit
            ]
            runs = [each for each in silent if now < self._until(each.process, limit)]
            for each in runs:
                self._spare(world, each)
            silent = [each for each in silent if each not in runs]
            if not silent:
                continue
            if self._worlds[world].broken:
                self._lose(self._worlds[world], silent)
                continue
            mute = [each for each in silent if not _answers(probes.get(each.process), limit)]
            if mute:
                cause, chosen = Cause.UNREACHABLE, mute
                detail = f"{names(mute)}: its host acknowledged nothing for {limit:g} s"
            else:
                cause, chosen = Cause.HUNG, silent
                quiet = max(now - self._since(each.process) for each in silent)
                detail = (
                    f"{names(silent)}: its host answers, the process gave no sign of life for "
                    f"{limit if quiet < 2 * limit else quiet:.3g} s{self._seen(silent[0].process)}"
                )
            self._break(world, cause, _ranks(chosen), detail, now, verdicts)
        peer = self._peers.get(process)
        if peer is not None and peer.worlds:
            limits = [self._worlds[world].roster.hang_timeout for world in peer.worlds]
            peer.look = min(self._until(process, each) for each in limits)

    def _spare(self, world: WorldId, member: Member) -> None:
        peer = self._peers[member.process]
        if world not in peer.spared:
            peer.spared[world] = None
            self._notices.append(Notice(world, peer.worlds[world], busy=True))

    def _seen(self, process: str) -> str:
        activity = self._busy.activity(process)
        return "" if activity is Activity.UNKNOWN else f"; {activity.value}"

    def _silence_due(self) -> float:
        return min(
            (
                min(self._due(peer), self._ask_at(process, peer))
                for process, peer in self._peers.items()
                if peer.heard is not None
            ),
            default=math.inf,
        )

    def _due_sooner(self, process: str, peer: _Peer) -> None:
        """A process may be due sooner than it was."""
        if peer.heard is not None:
            self.silence_due.by(min(self._due(peer), self._ask_at(process, peer)))

    def _due(self, peer: _Peer) -> float:
        return max(peer.since + peer.shortest, peer.look)

    def _ask_at(self, process: str, peer: _Peer) -> float:
        return self._busy.wake(process, peer.since, peer.shortest) if peer.worlds else math.inf

    def _until(self, process: str, limit: float) -> float:
        since = self._since(process)
        return since if since == math.inf else self._busy.until(process, since, limit)

    def _since(self, process: str) -> float:
        peer = self._peers.get(process)
        return math.inf if peer is None or peer.heard is None else peer.since

    def _claim(self, state: _World, claim: _Claim) -> None:
        state.claims.append(claim)
        self._urgent[world_id(state.roster)] = None

    def _break(
        self,
        world: WorldId,
        cause: Cause,
        ranks: tuple[int, ...],
        detail: str,
        now: float,
        verdicts: list[Verdict],
    ) -> None:
        state = self._worlds[world]
        roster = state.roster
        # Crashed and departed members cannot be told. Hung and unreachable ones may still receive it.
        deaf = ranks if cause in {Cause.CRASHED, Cause.LEFT} else ()
        tell = tuple(rank for rank in range(roster.size) if rank != roster.rank and rank not in deaf)
        verdicts.append(Verdict(world, Breakage(cause, ranks, detail, now), tell))
        state.broken = True
        state.claims.clear()
        self._urgent.pop(world, None)
        self._failed.pop(world, None)
        if cause is not Cause.FAILED:
            self._judge(state, ranks)

    def _lose(self, state: _World, members: list[Member]) -> None:
        """More members of a broken world are lost."""
        ranks = tuple(rank for rank in _ranks(members) if rank not in state.judged)
        if ranks:
            self._losses.append(Loss(world_id(state.roster), ranks))
            self._judge(state, ranks)

    def _judge(self, state: _World, ranks: Iterable[int]) -> None:
        """Find out nothing more about members of a broken world."""
        state.judged.update(ranks)
        processes = {state.roster.members[rank].process for rank in ranks}
        for process in processes - {self._own}:
            if all(each.rank in state.judged for each in state.roster.members if each.process == process):
                self._unwatch(process, state)


def _answers(probe: Probe | None, limit: float) -> bool:
    """Whether the host acknowledges data: beats go out every fifth of `limit`, so half of it is long."""
    return probe is None or not probe.unacknowledged or probe.last_ack < limit / 2


def _ranks(members: list[Member]) -> tuple[int, ...]:
    return tuple(sorted(member.rank for member in members))


def names(members: list[Member]) -> str:
    """Return ranks, pids and hosts of members, for messages."""
    named = ", ".join(f"{member.rank} (pid {member.pid} on {member.hostname})" for member in members)
    return f"rank {named}" if len(members) == 1 else f"ranks {named}"
