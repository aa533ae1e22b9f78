"""Exchange of gloo's addresses over the lane, when a world's group is made late.

Keys and values, as in a store, but that each member tells every other what it sets. So no server is needed,
which may be gone by then.

Each value travels as two messages: the sizes of key and value, then both. A member's last key is `_BUILT`.
"""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING

import torch.distributed as _dist

from multiworld._c10d.lane.p2p_dispatch import number_of
from multiworld._core.reraise import as_new
from multiworld._net.lane.background import background
from multiworld._net.stores.torchstore import PollingStore

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from torch._C._distributed_c10d import Store

    from multiworld._core.lane.operations import Receive
    from multiworld._net.lane.endpoint import Endpoint
else:  # torch exports it without saying so to type checkers
    Store = _dist.Store

__all__ = ["CHANNEL", "Exchange"]

CHANNEL = number_of("m8d:gloo")
"""Of the exchange's messages."""

_BUILT = "m8d:built"
_CALL = "m8d:call"
_SIZES = struct.Struct("<II")
_LONGEST = 16 << 20
"""Bytes of a key and its value: gloo's take 8 for each member, and some hundred more."""

_ASK_FIRST, _ASK_LAST = 0.01, 0.5
"""Seconds until members that have said nothing are asked again, at first and at most."""


class Exchange(Store):
    """See the module.

    Args:
        endpoint: of the world's lane.
        others: ranks of the other members.
        ask: called with ranks of members to have them read what was sent to them.
        check: raises to give up.
        asking: whether they do not know yet that the group is to be made.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        others: Collection[int],
        ask: Callable[[tuple[int, ...]], None],
        check: Callable[[], None],
        *,
        asking: bool,
    ) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._ask = ask
        self._check_over = check
        self._values: dict[str, bytes] = {}
        self._silent = set(others)
        self._heard: dict[int, _Ear] = {rank: _Ear(endpoint, rank) for rank in others}
        self._pause = _ASK_FIRST
        self._ask_at = time.monotonic() + (0.0 if asking else _ASK_LAST)
        self._tell(_CALL, b"")

    def set(self, key: str, value: str | bytes) -> None:
        """Tell all members."""
        octets = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = octets
        self._tell(key, octets)

    def get(self, key: str) -> bytes:
        """Return what `check` has found."""
        return self._values[key]

    def check(self, keys: Iterable[str]) -> bool:
        """Whether all of these were told; reads what has come, where they were not yet.

        Raises:
            ConnectionError: the lane has ended.
        """
        wanted = list(keys)
        if all(key in self._values for key in wanted):
            return True
        for rank, ear in self._heard.items():
            for key, value in ear.listen():
                self._silent.discard(rank)
                self._values[f"{key}/{rank}" if key == _BUILT else key] = value
        if self._silent and time.monotonic() >= self._ask_at:
            self._ask_at, self._pause = time.monotonic() + self._pause, min(_ASK_LAST, 4 * self._pause)
            self._ask(tuple(self._silent))
        return all(key in self._values for key in wanted)

    def say_built(self) -> None:
        """Tell all members that this one's group stands; it says nothing after that."""
        self._tell(_BUILT, b"")

    def await_built(self, timeout: float) -> None:
        """Wait until all other members' groups stand.

        Raises:
            torch.distributed.DistStoreError: some do not after `timeout` seconds.
            Exception: what `check` raised.
        """
        waiting = PollingStore(self, check_cancelled=self._check_over, timeout=timeout)
        waiting.wait([f"{_BUILT}/{rank}" for rank in self._heard])

    def close(self) -> None:
        """Take back the receives that are left, if any."""
        for ear in self._heard.values():
            ear.close()

    def _tell(self, key: str, value: bytes) -> None:
        body = key.encode() + value
        sizes = _SIZES.pack(len(body) - len(value), len(value))
        for rank in self._heard:
            for tag, said in enumerate((sizes, body)):
                send = self._endpoint.post_send(rank, CHANNEL, tag, memoryview(said), 0, said)
                if not send.done:
                    background.take_on(self._endpoint, send)


class _Ear:
    """What one other member says."""

    def __init__(self, endpoint: Endpoint, rank: int) -> None:
        self._endpoint = endpoint
        self._rank = rank
        self._key_size = 0
        self._last = False
        self._buffer = bytearray(_SIZES.size)
        self._receive: Receive | None = self._next(0)

    def listen(self) -> list[tuple[str, bytes]]:
        """Return what it has said since the last call."""
        said: list[tuple[str, bytes]] = []
        if self._receive is not None and not self._receive.done:
            self._endpoint.ready(self._rank)
        while self._receive is not None and self._receive.done:
            if self._receive.error is not None:
                raise as_new(self._receive.error)
            if self._receive.tag == 0:
                self._key_size, size = _SIZES.unpack(self._buffer)
                if self._key_size + size > _LONGEST:
                    raise ConnectionError(f"rank {self._rank} announced {size} bytes of addresses")
                self._buffer = bytearray(self._key_size + size)
                self._receive = self._next(1)
                continue
            key = self._buffer[: self._key_size].decode()
            said.append((key, bytes(self._buffer[self._key_size :])))
            self._buffer = bytearray(_SIZES.size)
            # A receive that stays would keep the lane from its short way.
            self._receive = None if key == _BUILT else self._next(0)
        return said

    def close(self) -> None:
        if self._receive is not None:
            self._endpoint.cancel(self._receive)

    def _next(self, tag: int) -> Receive:
        return self._endpoint.post_receive(self._rank, CHANNEL, tag, memoryview(self._buffer), self._buffer)
