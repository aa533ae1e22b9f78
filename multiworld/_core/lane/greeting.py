"""Handshake of one lane connection: both ends authenticate, then find out whether they can read memory.

The member of higher rank dials. The messages have fixed sizes and take turns, so an end never reads more than
the handshake: the lane's frames follow its last byte directly.

| | dialer says | acceptor says |
|---|---|---|
| 1 | hello: magic, version, both ranks, nonce | |
| 2 | | nonce, MAC |
| 3 | MAC, offer | |
| 4 | | offer, answer |
| 5 | answer, verdict | |
| 6 | | verdict |

A MAC is an HMAC-SHA256 with the generation's token over who says it, the generation's key and all bytes that
passed before it in either direction. Both nonces are among them, so an old MAC opens nothing; the ends' MACs
differ, so none can be handed back. A verdict is a MAC too, of whether the other end may read this one's
memory: if any byte was changed on the way, an end reads a MAC that does not fit.
"""

from __future__ import annotations

import hmac
import struct
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Generator

    from multiworld._core.membership.roster import Roster

__all__ = [
    "ANSWER_SIZE", "COLLECTIVES", "CROWDS", "LATE_GROUP", "NONCE_SIZE", "OFFER_SIZE", "VERSION", "Greeting",
    "GreetingError", "MemoryProof",
]  # fmt: skip

VERSION = 4
"""Of the lane's protocol: this handshake, the frames after it, and what members agree to do by it."""

COLLECTIVES = 2
"""The first version that has collectives; 1 are messages alone."""

LATE_GROUP = 3
"""The first version whose members make gloo's group when one of them needs it, not while they join."""

CROWDS = 4
"""The first version whose small collectives go over the lane among any number of members."""

NONCE_SIZE = 16
"""Bytes."""

OFFER_SIZE = 16
"""Bytes."""

ANSWER_SIZE = 32
"""Bytes."""

_MAGIC = b"m8d-lane"
_HELLO = struct.Struct(f"<8sIII{NONCE_SIZE}s")  # magic, version, from, to, nonce
_MAC_SIZE = 32


class GreetingError(ConnectionError):
    """The other end is no member of this generation, or not the one it should be: close the connection."""


class MemoryProof(Protocol):
    """Finds out whether memory can be read; `multiworld._net.lane.memory.Proof` is one."""

    def offer(self) -> bytes:
        """Return what the other end needs for its answer: `OFFER_SIZE` bytes."""

    def answer(self, offer: bytes) -> bytes:
        """Return the answer to the other end's offer: `ANSWER_SIZE` bytes."""

    def accepts(self, answer: bytes) -> bool:
        """Whether the answer to this end's offer shows that the other end can read its memory."""


class Greeting:
    """One end of the handshake: write `unsent`, read into `want()`, until it is `over`.

    Args:
        roster: the generation, as this end's member knows it.
        proof: of this connection alone. It is asked only after the other end has authenticated itself.
        nonce: 16 random bytes, fresh for each connection.
        peer: rank of the member that this end dials, lower than its own; None for the end that accepts.

    Attributes:
        peer: rank of the other end; None until it says so, and not to be trusted before the end is `over`.
        may_read: whether this end can read the other's memory, by `proof`; meaningful once it is `over`.
    """

    def __init__(self, roster: Roster, proof: MemoryProof, nonce: bytes, peer: int | None = None) -> None:
        self.peer = peer
        self.may_read = False
        self._roster = roster
        self._proof = proof
        self._nonce = nonce
        key = roster.key.encode()
        # All bytes that have passed, in both directions; the key in front is known to both.
        self._passed = bytearray(struct.pack("<I", len(key)) + key)
        self._unsent = bytearray()
        self._done = False
        self._steps = self._accept() if peer is None else self._dial(peer)
        self._buffer = memoryview(bytearray(next(self._steps)))
        self._have = 0

    @property
    def over(self) -> bool:
        """Whether both ends are authenticated, nothing is to be read any more and all is written."""
        return self._done and not self._unsent

    @property
    def unsent(self) -> bytes:
        """What is to be written; empty if the other end has the next turn, and after an error."""
        return bytes(self._unsent)

    def wrote(self, count: int) -> None:
        """The first `count` bytes of `unsent` are written."""
        del self._unsent[:count]

    def want(self) -> memoryview:
        """Return where the next bytes go, as many as may be read; empty if none may be."""
        return self._buffer[self._have :]

    def got(self, count: int) -> None:
        """`count` bytes are in what `want` returned last.

        Raises:
            GreetingError: they are not what a member says here. Nothing is read or written any more.
        """
        if not self._buffer:
            raise GreetingError("nothing is to be read here")
        self._have += count
        if self._have < len(self._buffer):
            return
        said = bytes(self._buffer)
        self._buffer, self._have = memoryview(bytearray()), 0
        try:
            self._buffer = memoryview(bytearray(self._steps.send(said)))
        except StopIteration:
            self._done = True
        except BaseException:
            self._unsent.clear()
            raise

    # -- the two ends ----------------------------------------------------------------------------------------

    def _dial(self, peer: int) -> Generator[int, bytes, None]:
        self._say(_HELLO.pack(_MAGIC, self._roster.lane_version, self._roster.rank, peer, self._nonce))
        yield from self._hear(NONCE_SIZE)
        yield from self._hear_mac(b"acceptor")
        self._say_mac(b"dialer")
        self._say(self._proof.offer())
        offer = yield from self._hear(OFFER_SIZE)
        answer = yield from self._hear(ANSWER_SIZE)
        self._say(self._proof.answer(offer))
        self._say_mac(b"dialer accepts" if self._proof.accepts(answer) else b"dialer refuses")
        verdict = yield from self._hear_mac(b"acceptor accepts", b"acceptor refuses")
        self.may_read = verdict == b"acceptor accepts"

    def _accept(self) -> Generator[int, bytes, None]:
        hello = yield from self._hear(_HELLO.size)
        self.peer = self._checked(hello)
        self._say(self._nonce)
        self._say_mac(b"acceptor")
        yield from self._hear_mac(b"dialer")
        offer = yield from self._hear(OFFER_SIZE)
        self._say(self._proof.offer())
        self._say(self._proof.answer(offer))
        answer = yield from self._hear(ANSWER_SIZE)
        verdict = yield from self._hear_mac(b"dialer accepts", b"dialer refuses")
        self.may_read = verdict == b"dialer accepts"
        self._say_mac(b"acceptor accepts" if self._proof.accepts(answer) else b"acceptor refuses")

    def _checked(self, hello: bytes) -> int:
        magic, version, dialer, acceptor, _ = _HELLO.unpack(hello)
        if magic != _MAGIC:
            raise GreetingError(f"it begins with {magic.hex()}: it is no lane")
        if version != self._roster.lane_version:
            raise GreetingError(f"it speaks version {version}, the generation {self._roster.lane_version}")
        if acceptor != self._roster.rank or not acceptor < dialer < self._roster.size:
            raise GreetingError(f"rank {dialer} dials rank {acceptor}, and this is rank {self._roster.rank}")
        return int(dialer)

    # -- what is said and heard ------------------------------------------------------------------------------

    def _say(self, data: bytes) -> None:
        self._passed += data
        self._unsent += data

    def _hear(self, size: int) -> Generator[int, bytes, bytes]:
        data = yield size
        self._passed += data
        return data

    def _say_mac(self, claim: bytes) -> None:
        self._say(self._mac(claim))

    def _hear_mac(self, *claims: bytes) -> Generator[int, bytes, bytes]:
        macs = [(claim, self._mac(claim)) for claim in claims]  # of what has passed before them
        given = yield from self._hear(_MAC_SIZE)
        for claim, mac in macs:
            if hmac.compare_digest(given, mac):
                return claim
        raise GreetingError(f"the MAC of the {claims[0].decode()} does not fit: it does not hold the token")

    def _mac(self, claim: bytes) -> bytes:
        # The watchdogs' proofs hold the same token and never begin like this.
        head = b"m8d-lane " + bytes([len(claim)]) + claim
        return hmac.digest(self._roster.token, head + self._passed, "sha256")
