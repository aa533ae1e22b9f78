"""What a stranger can do at a listener, and what became of it: `visit` is one call, `judge` holds it to a table."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kits.portkit import Connect, Listener, held
from multiworld._core.lane import greeting
from multiworld._core.liveness import evidence, wire

LOOK = 0.02
"""Seconds between two looks at what came."""
MARGIN = 5.0
"""Seconds beyond a bound until a visit ends: this machine is shared and noisy."""
SPEAKS = 0.5
"""Seconds that an answer may take to begin where nothing is dropped."""
ANSWERS = 4.0
"""Seconds that the answer to a protocol's own first bytes may take, on a busy machine."""


@dataclass(frozen=True)
class Expected:
    """What is said of one kind of listener.

    Attributes:
        page: what docs/security.md calls it.
        most: seconds until a connection is dropped on which nothing is said, garbage, the first bytes of the
            protocol; None: it may stay.
        readable: whether what comes back to the first bytes may name worlds and hosts.
    """

    page: str
    most: tuple[float | None, float | None, float | None]
    readable: bool = False

    def strict(self) -> Expected:
        """What secure mode promises: nothing is readable, and no descriptor is kept for over 1 s."""
        return Expected(self.page, (1.0, 1.0, 1.0))


@dataclass
class Visit:
    """One call of a stranger.

    Attributes:
        kind, manner: what was called, and how: "nothing", "garbage", "first bytes".
        refused: whether no connection came about.
        dropped: seconds until no descriptor was held for it; None if one was to the end.
        heard: what came back.
    """

    listener: Listener
    kind: str
    manner: str
    refused: bool = False
    dropped: float | None = None
    heard: bytes = b""


MANNERS = ("nothing", "garbage", "first bytes")


def first_bytes(kind: str, listener: Listener, names: Sequence[str]) -> bytes:
    """What a client of that kind says first, as far as a stranger can know it.

    Args:
        kind: of the listener.
        listener: it.
        names: of worlds, of whose records a store is asked.
    """
    stranger, nonce = os.urandom(16).hex(), os.urandom(16)
    if kind in {"store", "store of a list", "rendezvous"}:
        return b"".join([struct.pack("=BI", 0, 0x3C85F7CE), *(_read_record(each) for each in names)])
    if kind == "watchdog":
        return wire.encode(wire.Hello(stranger, os.urandom(16).hex(), nonce)) + wire.encode(
            wire.Attach(f"{names[0]}#1", 0, bytes(32))
        )
    if kind.startswith("lane"):
        return struct.pack("<8sIII16s", b"m8d-lane", greeting.VERSION, 1, 0, nonce)
    if kind == "gloo":
        return struct.pack("=Q", 1)
    if kind == "helper":
        return evidence.question(os.urandom(16), nonce)
    if kind == "control":
        return json.dumps({"hello": "status"}).encode() + b"\n"
    path = "/metrics" if kind == "metrics" else "/api/v1/view"
    return f"GET {path} HTTP/1.1\r\nHost: {listener.host}:{listener.port}\r\n\r\n".encode()


def _read_record(name: str) -> bytes:
    """TCPStore's COMPARE_SET that cannot succeed: the value comes back."""
    bits = lambda value: struct.pack("=Q", len(value)) + value  # noqa: E731
    return struct.pack("=B", 2) + bits(f"/{name}".encode()) + 2 * bits(b"\x01nothing")


def visit(
    listener: Listener,
    kind: str,
    manner: str,
    names: Sequence[str],
    connect: Connect,
    most: float | None,
    *,
    named: bool = False,
) -> Visit:
    """Call, say it, and wait until it is dropped; at most for `most` seconds and `MARGIN`.

    `named`: until one of the names has come back, at most `ANSWERS`.
    """
    made = Visit(listener, kind, manner)
    try:
        sock = connect(listener)
    except OSError:
        made.refused, made.dropped = True, 0.0
        return made
    with sock:
        began = time.monotonic()
        with contextlib.suppress(OSError):  # it may be dropped while we speak
            if manner == "garbage":
                sock.sendall(os.urandom(300))
            elif manner == "first bytes":
                sock.sendall(first_bytes(kind, listener, names))
        sock.settimeout(LOOK)
        datagrams, taken, ended = listener.type == socket.SOCK_DGRAM, False, False
        until = began + (SPEAKS if datagrams or most is None else most + MARGIN)
        if named:
            until = max(until, began + ANSWERS)
        answers = began + ANSWERS if manner == "first bytes" else began
        while (now := time.monotonic()) < until and not ended and (made.dropped is None or now < answers):
            ended = _hear(sock, made)
            if named and any(name.encode() in made.heard for name in names):
                named, until = False, min(until, max(time.monotonic(), began + SPEAKS))
            has = listener.family == socket.AF_UNIX or held(listener, sock)
            taken = taken or has
            # Over TCP what was not accepted takes no descriptor; it may still be accepted.
            late = time.monotonic() - began > SPEAKS
            if taken:
                answers = began
            if datagrams:
                continue
            if not (ended or (not has and (taken or late) and not _readable(sock))):
                made.dropped = None  # it was accepted after all
            elif made.dropped is None:
                made.dropped = time.monotonic() - began
    if datagrams:
        made.dropped = 0.0
    return made


def _hear(sock: socket.socket, made: Visit) -> bool:
    """Take what came; return whether the other end is over."""
    try:
        part = sock.recv(1 << 16)
    except TimeoutError:
        return False
    except OSError:  # reset
        return True
    made.heard += part
    return not part


def _readable(sock: socket.socket) -> bool:
    try:
        return bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except (OSError, ValueError):  # nothing; and over TLS there is no looking ahead
        return False


def visit_all(
    found: Iterable[tuple[Listener, str]],
    expected: Callable[[str], Expected],
    names: Sequence[str],
    connect: Connect,
) -> list[Visit]:
    """Visit all of them in each manner, at the same time."""
    visits: list[Visit] = []

    def one(listener: Listener, kind: str, number: int) -> None:
        bound = expected(kind).most[number]
        manner = MANNERS[number]
        named = expected(kind).readable and manner == "first bytes" and bound is None
        visits.append(visit(listener, kind, manner, names, connect, bound, named=named))

    threads = [
        threading.Thread(target=one, args=(listener, kind, number), daemon=True)
        for listener, kind in found
        for number in range(len(MANNERS))
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join(120)
        assert not each.is_alive()
    return visits


def judge(made: Visit, expected: Expected, names: Sequence[str], *, slack: float) -> list[str]:
    """Say what is wrong with a visit; nothing, if all is as the table says.

    Args:
        made: the visit.
        expected: of its kind.
        names: texts that name a world or a host.
        slack: seconds added to each bound, as machines are shared.
    """
    where = f"{made.kind} ({made.listener}), {made.manner}"
    most = expected.most[MANNERS.index(made.manner)]
    wrong = []
    if most is not None and (made.dropped is None or made.dropped > most + slack):
        said = "never" if made.dropped is None else f"after {made.dropped:.1f} s"
        wrong.append(f"{where}: dropped {said}, and the table says {most:g} s")
    told = [each for each in names if each.encode() in made.heard]
    if told and not (expected.readable and made.manner == "first bytes"):
        wrong.append(f"{where}: {', '.join(told)} came back in {made.heard[:200]!r}")
    return wrong


def reads(visits: Iterable[Visit], names: Sequence[str]) -> set[str]:
    """Kinds of which a stranger read a name."""
    return {each.kind for each in visits if any(name.encode() in each.heard for name in names)}


__all__ = [
    "MANNERS", "Expected", "Visit", "first_bytes", "judge", "reads", "visit", "visit_all",
]  # fmt: skip
