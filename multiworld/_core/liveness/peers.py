"""Peer protocol of one process: connections to the processes that share its worlds, and their verdicts.

`Peers` takes events (a world was added, a connection opened, frames arrived, time passed) and collects
`Action` records, which the watchdog's thread carries out. It owns no socket, thread or clock, so tests run
whole groups of processes in any order of events.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from multiworld._core.liveness.actions import (
    Action,
    Break,
    BusyReport,
    Dial,
    Drop,
    Lost,
    Ready,
    Refusal,
    Send,
    Why,
)
from multiworld._core.liveness.attached import AttachedWorlds
from multiworld._core.liveness.connections import (
    FASTEST_BEAT,
    MAX_UNAUTHENTICATED,
    SLOWEST_BEAT,
    Connections,
)
from multiworld._core.liveness.detector import ConnectionEnd, Detector, Probe, WorldId
from multiworld._core.liveness.dialing import Dialing
from multiworld._core.liveness.early_close import EarlyClose
from multiworld._core.liveness.ended import EndedGenerations
from multiworld._core.liveness.proofs import Judgement, Proofs
from multiworld._core.liveness.questions import Questions
from multiworld._core.liveness.unread_messages import UnreadMessages
from multiworld._core.liveness.wire import (
    Asked,
    Attach,
    AttachEarlyClose,
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
    Told,
    Unread,
)  # fmt: skip
from multiworld.events import Breakage, Cause

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from multiworld._core.liveness.connection import PeerConnection, Place
    from multiworld._core.liveness.evidence import Evidence
    from multiworld._core.membership.roster import Roster

__all__ = ["MAX_UNAUTHENTICATED", "Peers"]


class Peers:
    """Events in, actions out.

    Args:
        own: this process's id, 32 hex digits.
        nonce: gives 16 fresh random bytes.
        channel: gives a fresh number for a connection.
        early_close: whether this process dials early-close connections; `early_close.own_wanted` changes it.
        busy: seconds of silence after which a process that runs counts as hung all the same; 0: all silence
            counts.
        unauthenticated: connections that may be waiting for their proof at a time.
    """

    def __init__(
        self,
        own: str,
        *,
        nonce: Callable[[], bytes],
        channel: Callable[[], int],
        early_close: bool = False,
        busy: float = 0.0,
        unauthenticated: int = MAX_UNAUTHENTICATED,
    ) -> None:
        self.own = own
        self._worlds = AttachedWorlds(own)
        self._ended_generations = EndedGenerations()
        self._connections = Connections(own, nonce=nonce, channel=channel, unauthenticated=unauthenticated)
        self._trusted = self._connections.trusted
        self._proofs = Proofs(own, self._worlds, self._ended_generations, self._trusted)
        self._dialing = Dialing(own)
        self._detector = Detector(own, busy)
        self._actions: list[Action] = []
        self.early_close = EarlyClose(
            own, nonce=nonce, channel=channel, act=self._actions.append, credentials=self._worlds.credentials
        )
        self.early_close.own_wanted = early_close
        self.unread_messages = UnreadMessages(own, self._worlds, self._trusted, self._actions.append)
        self.questions = Questions(self._worlds, self._trusted, self._actions.append)

    # -- worlds

    def add(self, roster: Roster, now: float) -> None:
        """Attach a world: connect to its members, and answer proofs that arrived early."""
        self._part_silent(roster, now)
        self._worlds.add(roster)
        self._ended_generations.remove(roster)
        self._detector.add(roster, now)
        for process in self._worlds.processes(roster):
            connection = self._trusted.get(process)
            if connection is None:
                self._dialing.want(process, now)
            else:
                self._offer(connection)
                self._ask(connection, now)
        for connection in self._connections.everyone():
            # Proofs for other generations of the name, too: they may be refused now.
            for place in [each for each in connection.waiting if each[0].rpartition("/")[0] == roster.world]:
                if connection.channel not in self._connections.by_channel:
                    break  # the proof before was wrong
                self._consider(connection, place, connection.waiting.pop(place), now)
        self._check(roster.key, now)

    def _part_silent(self, roster: Roster, now: float) -> None:
        """Close connections on which half of `hang_timeout` nothing came: a new one may do better.

        Not those that another world needs.
        """
        for process in self._worlds.processes(roster):
            connection = self._trusted.get(process)
            if (
                connection is not None
                and self._detector.silence(process, now) > roster.hang_timeout / 2
                and not any(map(self._detector.watches, self._worlds.shared(process)))
            ):
                self._part(connection)

    def remove(self, world: WorldId, *, goodbye: bool, now: float, failure: str = "") -> None:
        """Detach a world; with `goodbye`, tell the members that this one left, or its `failure`."""
        state = self._worlds.pop(world)
        if state is None:
            return
        roster = state.roster
        self._detector.remove(world)
        self._ended_generations.add(roster)
        others = self._worlds.of(roster.key)
        word = state.last_word(failure)
        if goodbye:
            for other in others:
                if isinstance(word, Broken):
                    self._detector.fell(other, roster.rank, word.detail)
                else:
                    self._detector.left(other, roster.rank)
        for process in self._worlds.processes(roster):
            for connection in self._connections.to(process):
                if goodbye and world in connection.offered:
                    self._send(connection, word)
                connection.offered.discard(world)
                connection.accepted.discard(world)
                if not others:
                    connection.proven = {place for place in connection.proven if place[0] != roster.key}
                    connection.ended = {place for place in connection.ended if place[0] != roster.key}
                self._ask(connection, now)
            if not self._worlds.shared(process):
                self._dialing.drop(process)
                for connection in self._connections.to(process):
                    self._part(connection)

    def report(self, world: WorldId, ranks: Iterable[int], detail: str, now: float) -> None:
        """An operation of `world` failed."""
        self._detector.failed(world, ranks, detail, now)

    def missing(self, world: WorldId) -> dict[int, str]:
        """Return the ranks that are not attached yet, each with the known reason or ""."""
        state = self._worlds.get(world)
        if state is None:
            return {}
        return {rank: state.notes.get(rank, "") for rank in self._proofs.missing(state)}

    # -- what happened to connections

    def accepted(self, channel: int, now: float) -> None:
        """A connection was accepted."""
        surplus = self._connections.surplus()
        if surplus is not None:
            self._forget(surplus)
            self._actions.append(Drop(surplus.channel, orderly=False))
        self._connections.accept(channel, now)

    def connected(self, channel: int, now: float) -> None:
        """A dialed connection is established."""
        self.early_close.connected(channel, now)
        connection = self._connections.get(channel)
        if connection is not None:
            connection.established = True
            connection.since = now
            self._dialing.connected(connection.peer)
            self._send(connection, connection.hello())

    def received(
        self, channel: int, frames: Iterable[Frame], now: float, *, error: str | None = None, host: str = ""
    ) -> None:
        """Frames arrived; `error`: why the bytes after them do not parse; `host`: by the certificate."""
        left = deque(frames)
        if (connection := self._connections.get(channel)) is not None:
            connection.host = host
        while left and (connection := self._connections.get(channel)) is not None:
            if connection.trusted:
                self._detector.heard(connection.peer, now)
            self._take(connection, left.popleft(), now)
        connection = self._connections.get(channel)
        if connection is None and (left or error is not None):
            self.early_close.received(channel, left, now, error=error)  # perhaps since the previous frame
        elif connection is not None and error is not None:
            self._reject(connection, now)
            if connection.dialed or connection.trusted:  # else the peer is only what a stranger said
                self._worlds.note(connection.peer, error)

    def closed(
        self, channel: int, ending: ConnectionEnd, now: float, *, refused: bool = False, plain: bool = False
    ) -> None:
        """A connection ended; `refused`: the port was closed; `plain`: by end of file."""
        connection = self._connections.get(channel)
        if connection is None:
            self.early_close.closed(channel, now, plain=plain)
            return
        self._forget(connection)
        if connection.trusted:
            self._detector.closed(connection.peer, ending)
            self._again(connection.peer, now)
        elif connection.dialed:
            self._dialing.ended(connection.peer, now, refused=refused)
            self._worlds.note(
                connection.peer, "its port is closed" if refused else "it closed the connection"
            )

    # -- time

    def stalled(self, seconds: float, now: float) -> None:
        """This process itself did not run for `seconds`, until now."""
        self._detector.stalled(seconds, now)

    def answered(self, process: str, evidence: Evidence, now: float) -> None:
        """The host of `process` answered a question about it."""
        self._detector.answered(process, evidence, now)

    def suspects(self, now: float) -> list[tuple[str, int]]:
        """Return processes that were silent for too long, each with the connection to probe."""
        return [
            (process, self._trusted[process].channel)
            for process in self._detector.suspects(now)
            if process in self._trusted
        ]

    def settle(self, now: float, probes: Mapping[str, Probe]) -> None:
        """Judge the events that were fed; dial, send heartbeats and time out what is due."""
        for connection in self.early_close.ended():
            # The process died; its kernel has not closed this connection yet.
            self._actions.append(Drop(connection.channel, orderly=False))
            self.closed(connection.channel, ConnectionEnd.LOST, now)
        while verdicts := self._detector.settle(now, probes):
            for verdict in verdicts:
                self._tell(verdict.world, verdict.breakage, verdict.tell)
                self._actions.append(Break(verdict.world, verdict.breakage))
            # Verdicts told to other ranks of this process are settled in the next round.
        self._actions += [BusyReport(each.world, each.ranks, each.busy) for each in self._detector.notices()]
        self._actions += [Lost(each.world, each.ranks) for each in self._detector.losses()]
        for process in self._detector.questions(now):
            if (question := self._worlds.question(process)) is not None:
                self._actions.append(question)
        for connection in self._connections.expired(now):
            self._expire(connection, now)
        for process in self._dialing.gone(now):
            for world in self._worlds.shared(process):
                rank = self._worlds[world].ranks(process)[0]
                self._refuse(world, Why.GONE, f"rank {rank} is gone: its port is closed")
            self._dialing.drop(process)
        for process, attempt in self._dialing.due(now):
            self._dial(process, attempt, now)
        self.early_close.settle(now)
        for connection, number in self._connections.due(now):
            self._send(connection, Beat(number))

    def wake(self) -> float:
        """Return when `settle` is due next without further events; infinite for never."""
        return min(
            self._detector.wake(),
            self._dialing.wake(),
            self.early_close.wake(),
            self._connections.wake(),
        )

    def take(self) -> list[Action]:
        """Return the collected actions, in order, and clear them."""
        actions = self._actions.copy()
        self._actions.clear()
        return actions

    def bear(self, busy: float) -> None:
        """Set the seconds for which a silent process that runs counts as busy."""
        self._detector.bear(busy)

    @property
    def looks(self) -> int:
        """How often so far all peers were looked at, for what may be due."""
        tables = (self._detector.silence_due, self._connections.beats_due, self.early_close.due)
        return sum(each.looks for each in tables)

    @property
    def connections(self) -> int:
        """Number of connections, trusted or not, without early-close connections."""
        return len(self._connections)

    # -- frames

    def _take(self, connection: PeerConnection, frame: Frame, now: float) -> None:
        if isinstance(frame, Beat):
            if not connection.greeted:
                self._reject(connection, now)
        elif isinstance(frame, Hello):
            self._greeted(connection, frame, now)
        elif not connection.greeted:
            self._reject(connection, now)
        elif isinstance(frame, Attach):
            self._consider(connection, (frame.key, frame.rank), frame.proof, now)
        elif isinstance(frame, AttachEarlyClose):
            self._consider_early_close(connection, (frame.key, frame.rank), frame.proof, now)
        elif isinstance(frame, Close):
            self._parted(connection, now)
        elif isinstance(frame, Refused):
            if connection.trusted or connection.dialed:
                self._refused(connection, frame)
        elif isinstance(frame, Goodbye):
            self._left(connection, (frame.key, frame.rank))
        elif not connection.trusted:
            return
        elif isinstance(frame, Attached):
            connection.accepted.add((frame.key, frame.rank))
            self._check(frame.key, now)
        elif isinstance(frame, Broken):
            self._told(connection, frame)
        elif isinstance(frame, Unread):
            self.unread_messages.asked(connection, frame)
        elif isinstance(frame, Asked):
            self.questions.asked(connection, frame)
        elif isinstance(frame, Told):
            self.questions.told(connection, frame)
        else:
            connection.wanted = min(max(frame.interval, FASTEST_BEAT), SLOWEST_BEAT)
            self._connections.beat_by(connection, now + connection.interval)

    def _greeted(self, connection: PeerConnection, frame: Hello, now: float) -> None:
        if not connection.greet(frame):
            self._reject(connection, now)
        elif connection.dialed:
            self._offer(connection)
        else:
            self._send(connection, connection.hello())

    def _consider(self, connection: PeerConnection, place: Place, given: bytes, now: float) -> None:
        """Check the other end's claim to be `place`."""
        judgement = self._proofs.judge(connection, place, given)
        if isinstance(judgement, Refused):
            self._send(connection, judgement)
            if judgement.reason is Reason.PROOF and not connection.trusted:
                self._expire(connection, now)
        elif judgement is Judgement.EXCESS:
            self._reject(connection, now)
        elif judgement is Judgement.VALID and not connection.knocking:
            connection.proven.add(place)
            if not connection.trusted:
                self._trust(connection, now)
            self._send(connection, Attached(*place))
            self._check(place[0], now)

    def _consider_early_close(
        self, connection: PeerConnection, place: Place, given: bytes, now: float
    ) -> None:
        """Check the other end's claim that this is the early-close connection of `place`."""
        if connection.dialed or connection.trusted:
            self._reject(connection, now)
        elif (main := self._proofs.early_close_of(connection, place, given)) is not None:
            self._forget(connection)
            self.early_close.adopt(main, connection, place)
        else:
            self._expire(connection, now)

    def _trust(self, connection: PeerConnection, now: float) -> None:
        old = self._trusted.get(connection.peer)
        self._dialing.drop(connection.peer)
        if old is not None:
            # The other process gave the old connection up; otherwise it would not dial again.
            self._claim(old, Cause.UNREACHABLE, "it gave its connection up and made another")
            self._forget(old)
            self._actions.append(Drop(old.channel, orderly=False))
        self._connections.trust(connection)
        self._detector.connected(connection.peer, now)
        # The proof first: until then the other end accepts nothing else.
        self._offer(connection)
        self._ask(connection, now)

    def _refused(self, connection: PeerConnection, frame: Refused) -> None:
        world = (frame.key, frame.rank)
        state = self._worlds.get(world)
        if state is None or world not in connection.offered:
            return
        connection.offered.discard(world)
        ranks = state.ranks(connection.peer)
        if frame.reason is Reason.STALE:
            said = f"rank {ranks[0]} is in generation {frame.generation}"
            self._refuse(world, Why.STALE, said)
        elif frame.reason is Reason.OVER:
            self._refuse(world, Why.GONE, f"rank {ranks[0]} gave up generation {state.roster.generation}")
        else:
            why = "its token is another" + ", or this process's certificate of another host" * bool(
                connection.host
            )
            state.notes.update(dict.fromkeys(ranks, f"it refused this process's proof: {why}"))

    def _left(self, connection: PeerConnection, place: Place) -> None:
        connection.waiting.pop(place, None)
        if place in connection.proven:
            connection.proven.discard(place)
            for world in self._worlds.of(place[0]):
                self._detector.left(world, place[1])

    def _told(self, connection: PeerConnection, frame: Broken) -> None:
        """The other end reports a broken world."""
        if not any(key == frame.key for key, _ in connection.proven):
            return
        own = [(frame.key, rank) for rank in frame.ranks]
        itself = frame.cause is Cause.FAILED and len(own) == 1 and own[0] in connection.proven
        # It is done with this world: it says no goodbye, and that its connection closes is no news.
        connection.ended |= (done := {place for place in connection.proven if place[0] == frame.key})
        connection.proven -= done
        for world in self._worlds.of(frame.key):
            if itself:
                self._detector.fell(world, frame.ranks[0], frame.detail)
            else:
                self._detector.told(world, frame.cause, frame.ranks, frame.detail)

    def _parted(self, connection: PeerConnection, now: float) -> None:
        """The other end closes the connection in good order."""
        self._forget(connection)
        self._actions.append(Drop(connection.channel, orderly=True))
        if connection.trusted:
            self._detector.disconnected(connection.peer)
            for key, rank in sorted(connection.proven):
                for world in self._worlds.of(key):
                    if self._worlds[world].ready:
                        self._detector.left(world, rank)
            self._again(connection.peer, now)
        elif connection.dialed:
            self._dialing.ended(connection.peer, now, refused=False)

    # -- doing

    def _reject(self, connection: PeerConnection, now: float) -> None:
        """Drop a connection that violates the protocol."""
        self._actions.append(Drop(connection.channel, orderly=False))
        self.closed(connection.channel, ConnectionEnd.GARBAGE, now)

    def _expire(self, connection: PeerConnection, now: float) -> None:
        """Drop a connection whose handshake failed or timed out."""
        if connection.greeted:
            self._send(connection, Close())
        self._forget(connection)
        self._actions.append(Drop(connection.channel, orderly=connection.greeted))
        if connection.dialed:
            self._dialing.ended(connection.peer, now, refused=False)
            said = "it does not know this generation" if connection.greeted else "it does not answer"
            self._worlds.note(connection.peer, connection.refused or said)

    def _part(self, connection: PeerConnection) -> None:
        """Close a connection that no world needs any more."""
        if connection.greeted:
            self._send(connection, Close())
        self._forget(connection)
        self._actions.append(Drop(connection.channel, orderly=connection.greeted))
        if connection.trusted:
            self._detector.disconnected(connection.peer)

    def _forget(self, connection: PeerConnection) -> None:
        if self._connections.remove(connection):
            self.early_close.forget(connection)

    def _again(self, process: str, now: float) -> None:
        """Dial again if a world that is being attached needs the process."""
        if self._worlds.awaits(process):
            self._dialing.want(process, now)

    def _dial(self, process: str, attempt: int, now: float) -> None:
        known = self._worlds.endpoints(process)
        connection = self._connections.dial(process, now)
        self._actions.append(Dial(connection.channel, known[attempt % len(known)]))

    def _offer(self, connection: PeerConnection) -> None:
        """Prove the worlds that are shared with the other end."""
        for attach in self._proofs.offers(connection):
            self._send(connection, attach)

    def _ask(self, connection: PeerConnection, now: float) -> None:
        """Tell the other end the heartbeat interval that this one needs."""
        interval = min(max(self._detector.shortest(connection.peer) / 5, FASTEST_BEAT), SLOWEST_BEAT)
        if connection.trusted and connection.asked != interval:
            connection.asked = interval
            self._send(connection, Need(interval))
            self._connections.beat_by(connection, now + connection.interval if connection.beats else now)

    def _tell(self, world: WorldId, breakage: Breakage, ranks: Iterable[int]) -> None:
        roster = self._worlds[world].roster
        frame = Broken(roster.key, breakage.cause, breakage.ranks, breakage.detail)
        for process in dict.fromkeys(roster.members[rank].process for rank in ranks):
            connection = self._trusted.get(process)
            if connection is not None:
                self._send(connection, frame)
                self._ask(connection, breakage.at)
        for other in self._worlds.of(roster.key):
            self._detector.told(other, breakage.cause, breakage.ranks, breakage.detail)

    def _claim(self, connection: PeerConnection, cause: Cause, detail: str) -> None:
        """Report a cause to the worlds that are attached over this connection."""
        for key, rank in sorted(connection.proven):
            for world in self._worlds.of(key):
                self._detector.told(world, cause, (rank,), f"rank {rank}: {detail}")

    def _check(self, key: str, now: float) -> None:
        for world in self._worlds.of(key):
            state = self._worlds[world]
            if not state.ready and self._proofs.complete(state):
                state.ready = True
                self._actions.append(Ready(world))
                for process in self._worlds.processes(state.roster):
                    self.early_close.want(self._trusted[process], now)

    def _refuse(self, world: WorldId, why: Why, detail: str) -> None:
        if not self._worlds[world].ready:
            self._actions.append(Refusal(world, why, detail))

    def _send(self, connection: PeerConnection, frame: Frame) -> None:
        self._actions.append(Send(connection.channel, frame))
