"""One connection between two processes: handshake and authentication.

The dialer sends `Hello` to a named process and the listener answers with its own. From then on each end may
prove, world by world, that it is a member (`Attach`). An end trusts the connection when the first proof of
the other end is valid. Until then the other end's frames affect only this connection.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

from multiworld._core.liveness.wire import Attach, AttachEarlyClose, Hello, proof

__all__ = ["HANDSHAKE", "PeerConnection", "Place"]

HANDSHAKE = 0.9
"""Seconds that an accepted connection has to prove membership (the contract promises 1 s)."""

# Longer than the listener's: the dialer must not give up what the listener has just accepted.
_DIALER_HANDSHAKE = 1.5
_CONNECT = 3.0

Place = tuple[str, int]
"""A member of a generation: key and rank."""


@dataclass
class PeerConnection:
    """The state of one connection.

    Attributes:
        channel: its number among this process's connections.
        own: this process's id.
        nonce: this end's.
        dialed: whether this end dialed.
        since: when it was dialed or accepted; once established, when that was.
        peer: id of the process at the other end; only a claim until the connection is trusted.
        host: of the other end, as its certificate names it; "" without TLS, or where it names none.
        established: whether the TCP handshake is done.
        refused: why this end refuses a proof that the token allows; "" for no such reason.
        trusted: whether the other end proved to be a member of a world that it shares with this process.
        knocking: dialed by the end that is not the dialer of this pair: only to learn of a refusal; never
            trusted.
        proven: members that the other end proved to be.
        ended: those of them whose world the other end holds to be broken.
        accepted: members of this process that the other end accepted.
        offered: members of this process that were offered to the other end.
        waiting: proofs for worlds that this process does not know (yet).
        wanted: seconds between signs of life that the other end wants.
        asked: the same, as this end asked for it; 0 before it did.
        beat_at: when the next sign of life is due.
        beats: how many were sent.
    """

    channel: int
    own: str
    nonce: bytes
    dialed: bool
    since: float
    peer: str = ""
    host: str = ""
    refused: str = ""
    established: bool = True
    trusted: bool = False
    knocking: bool = False
    their_nonce: bytes = b""
    proven: set[Place] = field(default_factory=set)
    ended: set[Place] = field(default_factory=set)
    accepted: set[Place] = field(default_factory=set)
    offered: set[Place] = field(default_factory=set)
    waiting: dict[Place, bytes] = field(default_factory=dict)
    wanted: float = 1.0
    asked: float = 0.0
    beat_at: float = 0.0
    beats: int = 0

    @property
    def greeted(self) -> bool:
        """Whether the other end said `Hello`."""
        return bool(self.their_nonce)

    @property
    def patience(self) -> float:
        """Seconds that the connection may take, since `since`, to be established, and then to be trusted."""
        if not self.dialed:
            return HANDSHAKE
        return _DIALER_HANDSHAKE if self.established else _CONNECT

    @property
    def interval(self) -> float:
        """Seconds between two signs of life: what the more impatient end wants.

        Also where that is this end: its own beats are what the other host acknowledges, or not.
        """
        return min(self.wanted, self.asked)

    def may_be_on(self, host: str) -> bool:
        """Whether the other end may be a process of the host of that name, by its certificate."""
        return not self.host or self.host == host

    def hello(self) -> Hello:
        """Return this end's greeting."""
        return Hello(self.own, self.peer, self.nonce)

    def greet(self, frame: Hello) -> bool:
        """Take the other end's greeting; False where it is not one for this process, or not the first."""
        if self.greeted or frame.to != self.own or frame.process == self.own:
            return False
        if self.dialed and frame.process != self.peer:
            return False
        self.peer = frame.process
        self.their_nonce = frame.nonce
        if not self.dialed:
            # The process with the smaller id dials. The other way round it is only a question.
            self.knocking = frame.process > self.own
        return True

    def offer(self, token: bytes, place: Place) -> Attach:
        """Return the proof that this process is a member."""
        self.offered.add(place)
        return Attach(*place, self._proof(token, place, mine=True))

    def offer_early_close(self, token: bytes, place: Place) -> AttachEarlyClose:
        """Return the frame that marks this connection as this process's early-close connection."""
        return AttachEarlyClose(*place, self._proof(token, place, mine=True, early_close=True))

    def holds(self, token: bytes, place: Place, given: bytes, *, early_close: bool = False) -> bool:
        """Whether `given`, of an `Attach` or `AttachEarlyClose`, proves that the other end is that member."""
        return hmac.compare_digest(self._proof(token, place, mine=False, early_close=early_close), given)

    def _proof(self, token: bytes, place: Place, *, mine: bool, early_close: bool = False) -> bytes:
        ends = ((self.own, self.nonce), (self.peer, self.their_nonce))
        dialer, listener = ends if self.dialed else ends[::-1]
        return proof(
            token, from_dialer=mine is self.dialed, dialer=dialer[0], listener=listener[0],
            nonces=(dialer[1], listener[1]), key=place[0], rank=place[1], early_close=early_close,
        )  # fmt: skip
