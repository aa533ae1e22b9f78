"""Attacks on the ports of a run: what a stranger may say to each, made from what the protocol's own clients say.

`say` gives one conversation's bytes for a kind of listener, `mutated` breaks it, and `Fuzzer` delivers many at once: whole,
drop by drop, half open, reset, or held. All of it follows one seed, and reaches the ports through a function
that connects: plainly, or through whatever stands between.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kits.portkit import Connect, Listener
from multiworld._core.lane import frames, greeting
from multiworld._core.liveness import evidence, wire
from multiworld.events import Cause

MOST_HELD = 200
"""Connections that are open at a time."""
_CHARS = "abcdefghijklmnopqrstuvwxyz/@%0123456789"


@dataclass(frozen=True)
class Facts:
    """What the attacker knows. The token serves recorded handshakes alone, as they passed on earlier connections.

    Attributes:
        key: of a world's generation, "NAME#1".
        processes: of its members, by rank.
        token: of it.
    """

    key: str
    processes: tuple[str, ...]
    token: bytes


# -- what is said


def say(dice: random.Random, kind: str, facts: Facts) -> bytes:
    """One conversation, as a client of that kind may begin it; not broken yet."""
    return _SAYS[kind](dice, facts)


def watchdog(dice: random.Random, facts: Facts) -> bytes:
    """Frames after a greeting, or without; a recorded handshake."""
    rank = dice.randrange(len(facts.processes))
    own, to = dice.choice(facts.processes), facts.processes[rank]
    nonce = dice.randbytes(wire.NONCE)
    if dice.random() < 0.3:  # recorded: the listener had another nonce
        proof = wire.proof(
            facts.token, from_dialer=True, dialer=own, listener=to, nonces=(nonce, dice.randbytes(16)),
            key=facts.key, rank=rank, early_close=dice.random() < 0.3,
        )  # fmt: skip
    else:
        proof = dice.randbytes(32)
    begin = (
        [wire.Hello(dice.choice([own, dice.randbytes(16).hex()]), to, nonce)] if dice.random() < 0.8 else []
    )
    kinds: list[Callable[[], wire.Frame]] = [
        lambda: wire.Attach(facts.key, rank, proof),
        lambda: wire.AttachEarlyClose(facts.key, rank, proof),
        lambda: wire.Attached(facts.key, rank),
        lambda: wire.Refused(facts.key, rank, dice.choice(list(wire.Reason)), dice.getrandbits(32)),
        lambda: wire.Goodbye(facts.key, rank),
        lambda: wire.Broken(facts.key, Cause.CRASHED, (rank,) * dice.randrange(513), _text(dice)),
        lambda: wire.Beat(dice.getrandbits(32)),
        lambda: wire.Need(dice.choice([0.0, 0.001, 1e6])),
        wire.Close,
        lambda: wire.Unread(_text(dice), dice.getrandbits(32)),
        lambda: wire.Asked(facts.key, rank, dice.getrandbits(32), True),
        lambda: wire.Told(facts.key, rank, dice.getrandbits(32), dice.randbytes(100), False),
    ]
    said = [*begin, *(dice.choice(kinds)() for _ in range(dice.randrange(6)))]
    return b"".join(map(wire.encode, said))


def lane(dice: random.Random, facts: Facts) -> bytes:
    """A dialer's hello and what may follow; frames without one."""
    if dice.random() < 0.2:
        return lane_frames(dice)
    hello = struct.pack(
        "<8sIII16s", b"m8d-lane", greeting.VERSION, dice.choice([1, 2, 3, 1 << 31]), dice.choice([0, 1, 2]),
        dice.randbytes(16),
    )  # fmt: skip
    return (
        hello
        + dice.randbytes(dice.choice([0, 32, 48, 96, 200]))
        + (lane_frames(dice) if dice.random() < 0.3 else b"")
    )


def lane_frames(dice: random.Random) -> bytes:
    """Some frames of the lane, each in order."""
    said = b""
    for _ in range(dice.randrange(1, 8)):
        kind = dice.randrange(1, 9)
        size = dice.choice([0, 1, 40, 5000, frames.EAGER_LIMIT, frames.CHUNK + 1, (1 << 64) - 1])
        said += frames.pack(
            kind, channel=dice.choice([0, 1, (1 << 56) - 1]), tag=dice.getrandbits(8), id=dice.randrange(4), size=size,
            address=dice.choice([0, 4096, (1 << 64) - 1]),
        )  # fmt: skip
        if kind in {frames.EAGER, frames.DATA}:
            said += bytes(min(size, 6000))
    return said


def store(dice: random.Random, _: Facts) -> bytes:
    """TCPStore's greeting, and queries about keys of the attacker's own."""
    said = struct.pack("=BI", 0, 0x3C85F7CE) if dice.random() < 0.8 else b""
    for _ in range(dice.randrange(5)):
        key = _bits(f"/fuzz/{dice.randrange(20)}".encode())
        value = _bits(dice.randbytes(dice.randrange(100)))
        number = struct.pack("=q", dice.choice([0, 1, -1, 1 << 62]))
        said += dice.choice(
            [
                b"\x01" + key + value,
                b"\x02" + key + value + value,
                b"\x03" + key,
                b"\x04" + key + number,
                b"\x05" + struct.pack("=Q", 1) + key,
                b"\x05" + struct.pack("=Q", dice.choice([0, 1 << 20, 1 << 40, (1 << 64) - 1])) + key,
                b"\x06" + struct.pack("=Q", 1) + key,
                b"\x07",
                b"\x08" + key,
                b"\x0d" + number[:4],
                b"\x01" + struct.pack("=Q", dice.choice([1 << 23, 1 << 32, 1 << 62])),
                bytes([dice.randrange(9, 256)]) + key,
            ]
        )
    return said


def control(dice: random.Random, _: Facts) -> bytes:
    """Lines to a launcher: hellos, reports, requests that no run grants."""
    one = dice.choice(
        [
            {"hello": "status"},
            {"hello": "status", "nodes": True},
            {
                "hello": "look",
                "worlds": dice.choice([None, 7, {"0": [_text(dice)]}]),
                "members": dice.choice([None, []]),
            },
            {"hello": "command", "command": dice.choice([None, {}, {_text(dice): 1}, [1]])},
            {"hello": "worker", "rank": dice.choice([4_000_000, -1, True, "0", 1e300]), "attempt": 0},
            {"hello": dice.choice([None, 1, [], _text(dice)])},
            {"ask": "worlds", "id": dice.choice([1, [], {}])},
            {"look": dice.choice([1, -1, {}, "x"]), "status": []},
            {"world": _text(dice), "state": dice.choice(["active", 1, None])},
        ]
    )
    line = json.dumps(one).encode() + b"\n"
    more = dice.choice(
        [b"", b"", b"[" * 3000 + b"\n", b"\xff\xfe\n", b"null\n", b"{}\n", b'{"a":' * 500 + b"\n"]
    )
    return (line + more) * dice.choice([1, 1, 2])


def http(dice: random.Random, _: Facts) -> bytes:
    """Requests: of all that is served, of what is not, too long, in pieces."""
    path = dice.choice(
        ["/", "/metrics", "/live", "/ready", "/api/v1/view", "/api/v1/feed", "/../../etc/passwd", "/%00"]
    )
    verb = dice.choice(["GET", "GET", "HEAD", "POST", "PUT", "OPTIONS", "CONNECT", "PRI"])
    heads = dice.sample(
        [
            "Host: 127.0.0.1", "Host: evil.example", "Content-Length: 99999999999", "Content-Length: -1",
            "Transfer-Encoding: chunked", "Connection: keep-alive", "Upgrade: websocket", "Cookie: m8d_token=x",
            "Authorization: Bearer " + _text(dice), "X: " + "y" * dice.choice([1, 9000, 70000]), "Range: bytes=0-1",
            "Expect: 100-continue",
        ],
        dice.randrange(5),
    )  # fmt: skip
    head = "".join(f"{each}\r\n" for each in heads)
    query = dice.choice(["", "", "?token=" + _text(dice), "?" + "a" * 70000])
    body = dice.choice([b"", b"", b"ffffffff\r\n", b"5\r\nhello\r\n0\r\n\r\n"])
    return f"{verb} {path}{query} HTTP/1.{dice.choice('0119')}\r\n{head}\r\n".encode() + body


def helper(dice: random.Random, facts: Facts) -> bytes:
    """A question: recorded, or without the token."""
    token, nonce = (
        (facts.token, bytes(16)) if dice.random() < 0.3 else (dice.randbytes(16), dice.randbytes(16))
    )
    return evidence.question(token, nonce)


def gloo(dice: random.Random, _: Facts) -> bytes:
    """A number, as gloo's own callers begin."""
    return struct.pack("=Q", dice.choice([0, 1, 7, 40, 1 << 63])) + dice.randbytes(dice.randrange(50))


def tls(dice: random.Random, facts: Facts) -> bytes:
    """A client's hello of TLS 1.3, and records that may follow; records without one. Their keys are none."""
    said = _record(22, client_hello(dice)) if dice.random() < 0.8 else b""
    kinds: list[Callable[[], bytes]] = [
        lambda: _record(20, b"\x01"),  # change_cipher_spec, as clients send it
        lambda: _record(23, dice.randbytes(dice.choice([0, 17, 74, 1000, 16640]))),  # encrypted, as it seems
        lambda: _record(22, client_hello(dice)),  # a second one
        lambda: _record(22, _handshake(11, bytes(4))),  # a certificate: none
        lambda: _record(22, _handshake(15, dice.randbytes(80))),  # its proof
        lambda: _record(22, _handshake(20, dice.randbytes(32))),  # finished
        lambda: _record(22, _handshake(24, b"\x01")),  # new keys
        lambda: _record(21, bytes([dice.choice([1, 2]), dice.choice([0, 10, 40, 48, 90, 255])])),
        lambda: struct.pack(
            "!BHH", dice.choice([20, 21, 22, 23, 24]), 0x0303, dice.choice([0, 16641, 65535])
        ),
        lambda: say(dice, "store", facts),  # no record
    ]
    return said + b"".join(dice.choice(kinds)() for _ in range(dice.randrange(6)))


def client_hello(dice: random.Random) -> bytes:
    """The message (RFC 8446, 4.1.2), with extensions in any order, at times one twice, long, or not there."""
    extensions = [
        _extension(43, b"\x02\x03\x04"),  # supported_versions: TLS 1.3
        _extension(10, struct.pack("!HH", 2, 0x001D)),  # supported_groups: x25519
        _extension(13, struct.pack("!HHH", 4, 0x0403, 0x0804)),  # signature_algorithms: ECDSA, RSA-PSS
        _extension(51, struct.pack("!HHH", 36, 0x001D, 32) + dice.randbytes(32)),  # key_share
    ]
    more = [
        _extension(0, struct.pack("!HBH", 12, 0, 9) + b"localhost"),  # server_name
        _extension(42, b""),  # early_data
        _extension(45, b"\x01\x01"),  # psk_key_exchange_modes
        _extension(dice.getrandbits(16), dice.randbytes(dice.choice([0, 3, 9000]))),
        dice.choice(extensions),
    ]
    extensions += dice.sample(more, dice.choice([0, 0, 1, 3]))
    if dice.random() < 0.1:
        extensions.pop(dice.randrange(len(extensions)))
    dice.shuffle(extensions)
    every = b"".join(extensions)
    return _handshake(
        1,
        struct.pack("!H", 0x0303) + dice.randbytes(32) + b"\x20" + dice.randbytes(32)
        + struct.pack("!HHHHBB", 6, 0x1301, 0x1302, 0x1303, 1, 0) + struct.pack("!H", len(every)) + every,
    )  # fmt: skip


def _record(kind: int, data: bytes) -> bytes:
    return struct.pack("!BHH", kind, 0x0303, len(data)) + data


def _handshake(kind: int, data: bytes) -> bytes:
    return struct.pack("!I", kind << 24 | len(data)) + data


def _extension(kind: int, data: bytes) -> bytes:
    return struct.pack("!HH", kind, len(data)) + data


_SAYS: dict[str, Callable[[random.Random, Facts], bytes]] = {
    "watchdog": watchdog, "lane": lane, "lane (unix)": lane, "store": store, "rendezvous": store,
    "control": control, "page": http, "metrics": http, "helper": helper, "gloo": gloo, "tls": tls,
}  # fmt: skip


def _bits(value: bytes) -> bytes:
    return struct.pack("=Q", len(value)) + value


def _text(dice: random.Random) -> str:
    return "".join(dice.choices(_CHARS, k=dice.randrange(1, 30)))


# -- what is broken


def mutated(dice: random.Random, data: bytes) -> bytes:
    """Break it in one to three ways."""
    octets = bytearray(data)
    for _ in range(dice.randrange(1, 4)):
        dice.choice(_BREAKS)(dice, octets)
    return bytes(octets)


def _flip(dice: random.Random, octets: bytearray) -> None:
    for _ in range(dice.choice([1, 1, 2, 8])):
        if octets:
            octets[dice.randrange(len(octets))] ^= 1 << dice.randrange(8)


def _cut(dice: random.Random, octets: bytearray) -> None:
    del octets[dice.randrange(len(octets) + 1) :]


def _drop(dice: random.Random, octets: bytearray) -> None:
    at = dice.randrange(len(octets) + 1)
    del octets[at : at + dice.randrange(1, 40)]


def _repeat(dice: random.Random, octets: bytearray) -> None:
    at = dice.randrange(len(octets) + 1)
    octets[at:at] = octets[at : at + dice.randrange(1, 200)] * dice.choice([1, 2, 20])


def _length(dice: random.Random, octets: bytearray) -> None:
    """An extreme number in the place of 1, 2, 4 or 8 bytes: most often it meets a length."""
    size = dice.choice([1, 2, 4, 8])
    if len(octets) >= size:
        at = dice.randrange(len(octets) - size + 1)
        value = dice.choice([0, 1, (1 << 8 * size) - 1, 1 << (8 * size - 1), dice.getrandbits(8 * size)])
        octets[at : at + size] = value.to_bytes(size, dice.choice(["little", "big"]))


def _noise(dice: random.Random, octets: bytearray) -> None:
    at = dice.randrange(len(octets) + 1)
    octets[at:at] = dice.randbytes(dice.choice([1, 3, 8, 100, 5000]))


_BREAKS = (_flip, _flip, _cut, _drop, _repeat, _length, _length, _noise)


# -- how it is delivered


@dataclass
class _Open:
    sock: socket.socket
    unsent: bytes
    slow: bool
    kind: str


@dataclass
class Fuzzer:
    """Attacks until it is told to stop. For one thread.

    Attributes:
        seed: of all that it does; the order in which ports answer is not of it.
        targets: gives listeners with their kinds, as they are now; looked at again and again.
        facts: what it knows.
        connect: how it reaches a listener; any OSError is "not reached".
        secure: whether TLS is spoken there: then half of what is said are its records ("tls" in `calls`, too).
        calls: connections and datagrams so far, by kind.
        heard: bytes that came back, by kind.
    """

    seed: int
    targets: Callable[[], Mapping[Listener, str]]
    facts: Facts
    connect: Connect
    secure: bool = False
    calls: Counter[str] = field(default_factory=Counter)
    heard: Counter[str] = field(default_factory=Counter)
    _held: list[_Open] = field(default_factory=list)

    def run(self, until: float) -> None:
        """Attack until then (``time.monotonic()`` seconds), each target at least once, and hang up."""
        dice, first = random.Random(self.seed), True  # noqa: S311  (to be repeated)
        try:
            while first or time.monotonic() < until:
                targets = sorted(self.targets().items(), key=lambda each: str(each[0]))
                for listener, kind in dice.sample(targets, len(targets)):
                    if kind in _SAYS and (first or time.monotonic() < until):
                        self._call(dice, listener, kind)
                self._go_on(dice)
                first = False
        finally:
            for each in self._held:
                each.sock.close()
            self._held.clear()

    def _call(self, dice: random.Random, listener: Listener, kind: str) -> None:
        # The number of draws does not depend on what is reached: the seed says what is said next.
        plan = random.Random(dice.getrandbits(64))  # noqa: S311
        for _ in range(plan.choice([1, 2, 8])):
            records = self.secure and listener.type == socket.SOCK_STREAM and plan.random() < 0.5
            data = say(plan, "tls" if records else kind, self.facts)
            data = plan.choice(
                [data, mutated(plan, data), mutated(plan, data), plan.randbytes(plan.randrange(5000))]
            )
            slow, reset, half = plan.random() < 0.2, plan.random() < 0.1, plan.random() < 0.1
            try:
                sock = self.connect(listener)
            except OSError:  # gloo's ports, and full queues
                continue
            self.calls[kind] += 1
            self.calls["tls"] += records
            sock.setblocking(False)
            made = _Open(sock, data, slow, kind)
            self._send(made, 1 if slow else len(data))
            with contextlib.suppress(OSError):
                if half:
                    socket.socket.shutdown(
                        sock, socket.SHUT_WR
                    )  # of the connection: a TLS one would end its TLS
                if reset and listener.family != socket.AF_UNIX:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if reset or listener.type == socket.SOCK_DGRAM:
                sock.close()
            else:
                self._held.append(made)

    def _send(self, made: _Open, most: int) -> None:
        with contextlib.suppress(OSError, ValueError):  # dropped, or full
            sent = made.sock.send(made.unsent[:most])
            made.unsent = made.unsent[sent:]

    def _go_on(self, dice: random.Random) -> None:
        """Say one byte more where it is said slowly; read a little; hang up on some."""
        for each in self._held:
            if each.unsent:
                self._send(each, 1 if each.slow else len(each.unsent))
            with contextlib.suppress(OSError, ValueError):
                self.heard[each.kind] += len(each.sock.recv(dice.choice([1, 1 << 16])))
        most = dice.choice([0, MOST_HELD // 2, MOST_HELD, MOST_HELD])
        dice.shuffle(self._held)
        while len(self._held) > most:
            self._held.pop().sock.close()
