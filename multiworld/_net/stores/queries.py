"""The server's side of TCPStore's protocol: queries in, replies out, as bytes. Pure.

It answers the queries that `TcpClient` makes, by TCPStore's rules and within its bounds. Numbers lie as in
this machine's memory, as torch's do.
"""

from __future__ import annotations

import re
import struct
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

__all__ = ["MOST_KEY", "MOST_KEYS", "MOST_VALUE", "Dialogue", "MalformedQueryError"]

MOST_KEY = 8 * 1024
"""Bytes of a key."""

MOST_KEYS = 128 * 1024
"""Keys of one query."""

MOST_VALUE = 8 * 1024 * 1024
"""Bytes of a value."""

_VALIDATE, _SET, _COMPARE_SET, _ADD, _CHECK, _COUNT, _DELETE, _APPEND = 0, 1, 2, 4, 5, 7, 8, 9
_MAGIC = struct.pack("=I", 0x3C85F7CE)
_READY, _NOT_READY = b"\0", b"\1"
_ORDER = sys.byteorder
_NUMBER = re.compile(rb"\s*([+-]?[0-9]{1,19})(?![0-9])")  # what C's strtoll reads of a value
_HALF = 1 << 63


class MalformedQueryError(ValueError):
    """What came is no query, or one beyond the bounds: nothing that follows can be read."""


class Dialogue:
    """One connection's queries, answered from the values that all connections share.

    Its first query has to be VALIDATE, as TCPStore's clients send it.

    Args:
        values: by key; read and replaced.
    """

    def __init__(self, values: dict[bytes, bytes]) -> None:
        self._values = values
        self._arrived = bytearray()
        self._replies = bytearray()
        self._steps = self._converse()
        self._needed = next(self._steps)

    def take(self, arrived: bytes) -> None:
        """Add what has come: parts of queries, or several."""
        self._arrived += arrived

    def answers(self, most: int) -> bytes:
        """Answer the queries that have come whole, until the replies have more than `most` bytes.

        Returns:
            The replies, in order: those to the rest follow at the next call; none: there is no rest.

        Raises:
            MalformedQueryError: the connection is to be ended.
        """
        at = 0
        try:
            while len(self._replies) <= most and len(self._arrived) - at >= self._needed:
                piece = bytes(memoryview(self._arrived)[at : at + self._needed])
                at += self._needed
                self._needed = self._steps.send(piece)
        finally:
            del self._arrived[:at]
        replies = bytes(self._replies)
        self._replies.clear()
        return replies

    # Generators: they yield how many bytes they need next, and are sent these.

    def _converse(self) -> Generator[int, bytes, None]:
        if (yield 1)[0] != _VALIDATE or (yield 4) != _MAGIC:
            raise MalformedQueryError("it does not begin as TCPStore's clients do")
        queries: dict[int, Callable[[], Generator[int, bytes, None]]] = {
            _SET: self._set,
            _COMPARE_SET: self._compare_set,
            _ADD: self._add,
            _CHECK: self._check,
            _COUNT: self._count,
            _DELETE: self._delete,
            _APPEND: self._append,
        }
        while True:
            kind = (yield 1)[0]
            if kind not in queries:
                raise MalformedQueryError(f"no query has the number {kind}")
            yield from queries[kind]()

    def _set(self) -> Generator[int, bytes, None]:
        key = yield from _bits(MOST_KEY)
        self._values[key] = yield from _bits(MOST_VALUE)

    def _append(self) -> Generator[int, bytes, None]:
        key = yield from _bits(MOST_KEY)
        more = yield from _bits(MOST_VALUE)
        value = self._values.get(key, b"") + more  # as it is now: others append while this one arrives
        if len(value) > MOST_VALUE:
            raise MalformedQueryError(f"a value of {len(value)} bytes is more than {MOST_VALUE}")
        self._values[key] = value

    def _compare_set(self) -> Generator[int, bytes, None]:
        key = yield from _bits(MOST_KEY)
        expected = yield from _bits(MOST_VALUE)
        desired = yield from _bits(MOST_VALUE)
        value = self._values.get(key)
        if value == expected or (value is None and not expected):
            value = self._values[key] = desired
        elif value is None:
            value = expected
        self._replies += struct.pack("=Q", len(value)) + value

    def _add(self) -> Generator[int, bytes, None]:
        key = yield from _bits(MOST_KEY)
        amount = int.from_bytes((yield 8), _ORDER, signed=True)
        found = _NUMBER.match(self._values.get(key, b"0"))
        value = int(found[1]) if found else _HALF
        if not -_HALF <= value < _HALF:
            raise MalformedQueryError("the value to add to is no number of 64 bits")
        total = (value + amount + _HALF) % (2 * _HALF) - _HALF  # it wraps around
        self._values[key] = b"%d" % total
        self._replies += struct.pack("=q", total)

    def _check(self) -> Generator[int, bytes, None]:
        count = yield from _number(MOST_KEYS)
        ready = True
        for _ in range(count):
            key = yield from _bits(MOST_KEY)
            ready = ready and key in self._values
        self._replies += _READY if ready else _NOT_READY

    def _count(self) -> Generator[int, bytes, None]:
        self._replies += struct.pack("=q", len(self._values))
        return
        yield  # a generator, as the others

    def _delete(self) -> Generator[int, bytes, None]:
        key = yield from _bits(MOST_KEY)
        found = self._values.pop(key, None) is not None
        self._replies += struct.pack("=q", found)


def _number(most: int) -> Generator[int, bytes, int]:
    number = int.from_bytes((yield 8), _ORDER)
    if number > most:
        raise MalformedQueryError(f"{number} is more than {most}")
    return number


def _bits(most: int) -> Generator[int, bytes, bytes]:
    size = yield from _number(most)
    return (yield size)
