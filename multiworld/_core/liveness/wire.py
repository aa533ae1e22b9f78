"""Wire format between two watchdogs: small binary frames, parsed without I/O.

A frame is a header (magic ``m8``, version, type, length of the payload: 6 bytes, big-endian) and a payload of
at most 4 KiB of fixed-width numbers and UTF-8. Nothing in it is ever executed or unpickled.

`proof` is how a member shows that it holds a world's token: an HMAC over both ends' nonces, so the token
itself never travels, an old proof opens nothing, and one end's proof cannot be handed back to it.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from multiworld.events import Cause

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "MAX_KEY",
    "MAX_PAYLOAD",
    "MAX_RANKS",
    "NONCE",
    "Asked",
    "Attach",
    "AttachEarlyClose",
    "Attached",
    "Beat",
    "Broken",
    "Close",
    "Frame",
    "Goodbye",
    "Hello",
    "Need",
    "Parser",
    "Reason",
    "Refused",
    "Told",
    "Unread",
    "encode",
    "proof",
]  # fmt: skip

MAX_PAYLOAD = 4096
MAX_KEY = 512
"""Bytes of UTF-8 in a world's key (name and generation)."""
MAX_RANKS = 512
"""Ranks that one `Broken` can name; the rest is left out."""
MAX_DETAIL = 1024
NONCE = 16
"""Bytes."""

_HEADER = struct.Struct("!2sBBH")
_MAGIC = b"m8"
_VERSION = 1
_CAUSES = (Cause.CRASHED, Cause.HUNG, Cause.UNREACHABLE, Cause.LEFT, Cause.FAILED)


class Reason(enum.IntEnum):
    """Why an `Attach` was refused."""

    STALE = 1
    """A newer generation of the world is there."""
    OVER = 2
    """This generation is over there, and no newer one is known."""
    PROOF = 3
    """The proof does not fit the token, or the rank belongs to another process."""


@dataclass(frozen=True)
class Hello:
    """First frame of each end. `process` and `to`: 32 hex digits; `nonce`: 16 random bytes."""

    process: str
    to: str
    nonce: bytes


@dataclass(frozen=True)
class Attach:
    """The sender is `rank` of the world `key`, and proves it."""

    key: str
    rank: int
    proof: bytes


@dataclass(frozen=True)
class Attached:
    """The receiver's rank of that world was accepted."""

    key: str
    rank: int


@dataclass(frozen=True)
class Refused:
    """The receiver's rank of that world was refused; `generation` is the one known there, 0 for none."""

    key: str
    rank: int
    reason: Reason
    generation: int


@dataclass(frozen=True)
class Goodbye:
    """The sender's rank left the world in good order."""

    key: str
    rank: int


@dataclass(frozen=True)
class Broken:
    """The sender holds the world to be broken, and why."""

    key: str
    cause: Cause
    ranks: tuple[int, ...]
    detail: str


@dataclass(frozen=True)
class Beat:
    """A sign of life."""

    number: int


@dataclass(frozen=True)
class Need:
    """The sender wants a sign of life at least every `interval` seconds (whole milliseconds on the wire)."""

    interval: float


@dataclass(frozen=True)
class Close:
    """The sender shares no world with the receiver any more and closes this connection in good order."""


@dataclass(frozen=True)
class AttachEarlyClose:
    """This connection is the sender's early-close connection, proved as `rank` of the world `key`.

    Accepted with `Attached`. Only `Close` may follow, before an orderly end.
    """

    key: str
    rank: int
    proof: bytes


@dataclass(frozen=True)
class Unread:
    """The sender's rank of that world waits until what it sent over the lane is read.

    Sent only in worlds with a lane, whose members all know it.
    """

    key: str
    rank: int


@dataclass(frozen=True)
class Asked:
    """The sender's rank of that world asks what the receiver's is doing; `deep`: with its threads' stacks.

    Sent only where a program, or an operation that waits for long, asks; `number` comes back in the answer.
    """

    key: str
    rank: int
    number: int
    deep: bool


@dataclass(frozen=True)
class Told:
    """A piece of the answer of the sender's rank to the question `number`; pieces come in their order."""

    key: str
    rank: int
    number: int
    piece: bytes
    last: bool


Frame = (
    Hello | Attach | Attached | Refused | Goodbye | Broken | Beat | Need | Close | AttachEarlyClose | Unread
    | Asked | Told
)  # fmt: skip


def proof(
    token: bytes,
    *,
    from_dialer: bool,
    dialer: str,
    listener: str,
    nonces: tuple[bytes, bytes],
    key: str,
    rank: int,
    early_close: bool = False,
) -> bytes:
    """Return the 32 bytes that prove to hold `token` on this connection.

    Args:
        token: of the world's generation.
        from_dialer: whether the prover dialed; the two ends' proofs differ.
        dialer: process id of the end that dialed.
        listener: process id of the other end.
        nonces: the dialer's and the listener's.
        key: of the world.
        rank: the prover's.
        early_close: for an `AttachEarlyClose`; the two kinds of proof differ.
    """
    # The wire format keeps the name of its first version.
    kind = b"m8d-tether-1" if early_close else b"m8d-attach-1"
    side = b"dialer" if from_dialer else b"listener"
    parts = (
        kind, side, bytes.fromhex(dialer), bytes.fromhex(listener), *nonces, struct.pack("!I", rank),
        key.encode(),
    )  # fmt: skip
    # Each part with its length in front: no two lists of parts give the same bytes.
    message = b"".join(struct.pack("!H", len(part)) + part for part in parts)
    return hmac.new(token, message, hashlib.sha256).digest()


def encode(frame: Frame) -> bytes:
    """Return the bytes of `frame`.

    Raises:
        ValueError: a field does not fit (a key over 512 bytes, a process id that is not 32 hex digits, ...).
    """
    code, payload = _payload(frame)
    return _HEADER.pack(_MAGIC, _VERSION, code, len(payload)) + payload


class Parser:
    """Bytes in, frames out.

    Attributes:
        error: what was wrong with the bytes, once something was; nothing is parsed after that.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.error: str | None = None

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that `data` completes, in order; those before a fault are still returned."""
        frames: list[Frame] = []
        if self.error is not None:
            return frames
        self._buffer += data
        while self.error is None and len(self._buffer) >= _HEADER.size:
            magic, version, code, length = _HEADER.unpack_from(self._buffer)
            if magic != _MAGIC or version != _VERSION or code not in _DECODERS or length > MAX_PAYLOAD:
                self._fail(f"no frame begins with {bytes(self._buffer[: _HEADER.size]).hex()}")
                break
            if len(self._buffer) < _HEADER.size + length:
                break
            payload = bytes(self._buffer[_HEADER.size : _HEADER.size + length])
            del self._buffer[: _HEADER.size + length]
            try:
                frames.append(_DECODERS[code](payload))
            except (ValueError, struct.error) as error:
                self._fail(f"a frame of type {code} cannot be read: {error}")
        return frames

    def _fail(self, error: str) -> None:
        self.error = error
        self._buffer.clear()


def _payload(frame: Frame) -> tuple[int, bytes]:
    if isinstance(frame, Beat):
        return 7, struct.pack("!I", frame.number & 0xFFFFFFFF)
    if isinstance(frame, Hello):
        return 1, _process(frame.process) + _process(frame.to) + _exactly(frame.nonce, NONCE)
    if isinstance(frame, Attach):
        return 2, _key(frame.key, frame.rank) + _exactly(frame.proof, 32)
    if isinstance(frame, Attached):
        return 3, _key(frame.key, frame.rank)
    if isinstance(frame, Refused):
        return 4, _key(frame.key, frame.rank) + struct.pack("!BI", frame.reason, frame.generation)
    if isinstance(frame, Goodbye):
        return 5, _key(frame.key, frame.rank)
    if isinstance(frame, Broken):
        ranks = frame.ranks[:MAX_RANKS]
        # Cut by bytes: a character that loses its tail is dropped, the text before it stays.
        detail = frame.detail.encode(errors="replace")[:MAX_DETAIL].decode(errors="ignore").encode()
        head = struct.pack("!BH", _CAUSES.index(frame.cause), len(ranks))
        return 6, _key(frame.key, 0) + head + struct.pack(f"!{len(ranks)}I", *ranks) + detail
    if isinstance(frame, Need):
        return 8, struct.pack("!I", min(max(round(frame.interval * 1000), 1), 0xFFFFFFFF))
    if isinstance(frame, AttachEarlyClose):
        return 10, _key(frame.key, frame.rank) + _exactly(frame.proof, 32)
    if isinstance(frame, Unread):
        return 11, _key(frame.key, frame.rank)
    if isinstance(frame, Asked):
        return 12, _key(frame.key, frame.rank) + struct.pack("!I?", frame.number & 0xFFFFFFFF, frame.deep)
    if isinstance(frame, Told):
        head = struct.pack("!I?", frame.number & 0xFFFFFFFF, frame.last)
        return 13, _key(frame.key, frame.rank) + head + frame.piece
    return 9, b""


def _process(text: str) -> bytes:
    return _exactly(bytes.fromhex(text), 16)


def _exactly(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise ValueError(f"{len(data)} bytes where {size} are needed")
    return data


def _key(key: str, rank: int) -> bytes:
    raw = key.encode()
    if len(raw) > MAX_KEY or not 0 <= rank <= 0xFFFFFFFF:
        raise ValueError(f"a key of {len(raw)} bytes and rank {rank}; at most {MAX_KEY}, and at least 0")
    return struct.pack("!IH", rank, len(raw)) + raw


def _split(payload: bytes) -> tuple[str, int, bytes]:
    """Take key and rank off the front."""
    rank, size = struct.unpack_from("!IH", payload)
    if size > MAX_KEY:
        raise ValueError(f"a key of {size} bytes")
    return _exactly(payload[6 : 6 + size], size).decode(), rank, payload[6 + size :]


def _hello(payload: bytes) -> Hello:
    _exactly(payload, 32 + NONCE)
    return Hello(payload[:16].hex(), payload[16:32].hex(), payload[32:])


def _attach(payload: bytes) -> Attach:
    key, rank, rest = _split(payload)
    return Attach(key, rank, _exactly(rest, 32))


def _attach_early_close(payload: bytes) -> AttachEarlyClose:
    key, rank, rest = _split(payload)
    return AttachEarlyClose(key, rank, _exactly(rest, 32))


def _attached(payload: bytes) -> Attached:
    key, rank, rest = _split(payload)
    _exactly(rest, 0)
    return Attached(key, rank)


def _refused(payload: bytes) -> Refused:
    key, rank, rest = _split(payload)
    reason, generation = struct.unpack("!BI", rest)
    return Refused(key, rank, Reason(reason), generation)


def _goodbye(payload: bytes) -> Goodbye:
    key, rank, rest = _split(payload)
    _exactly(rest, 0)
    return Goodbye(key, rank)


def _unread(payload: bytes) -> Unread:
    key, rank, rest = _split(payload)
    _exactly(rest, 0)
    return Unread(key, rank)


def _asked(payload: bytes) -> Asked:
    key, rank, rest = _split(payload)
    number, deep = struct.unpack("!I?", rest)
    return Asked(key, rank, number, deep)


def _told(payload: bytes) -> Told:
    key, rank, rest = _split(payload)
    number, last = struct.unpack_from("!I?", rest)
    return Told(key, rank, number, rest[5:], last)


def _broken(payload: bytes) -> Broken:
    key, _, rest = _split(payload)
    cause, count = struct.unpack_from("!BH", rest)
    if cause >= len(_CAUSES) or count > MAX_RANKS:
        raise ValueError(f"cause {cause}, {count} ranks")
    ranks = struct.unpack_from(f"!{count}I", rest, 3)
    return Broken(key, _CAUSES[cause], ranks, rest[3 + 4 * count :].decode())


def _beat(payload: bytes) -> Beat:
    return Beat(*struct.unpack("!I", payload))


def _need(payload: bytes) -> Need:
    (milliseconds,) = struct.unpack("!I", payload)
    return Need(milliseconds / 1000)


def _close(payload: bytes) -> Close:
    _exactly(payload, 0)
    return Close()


_DECODERS: dict[int, Callable[[bytes], Frame]] = {
    1: _hello, 2: _attach, 3: _attached, 4: _refused, 5: _goodbye, 6: _broken, 7: _beat, 8: _need, 9: _close,
    10: _attach_early_close, 11: _unread, 12: _asked, 13: _told,
}  # fmt: skip
