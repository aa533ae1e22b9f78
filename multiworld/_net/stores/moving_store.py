"""A torch Store over whichever server of a list is the one to use.

A call whose server is gone, or silent, is made again at the next server. Before that each user of the store
has brought there what it knows (`on_move`): nothing that a call would miss.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as _dist

from multiworld._net.stores.tcp_client import TcpClient
from multiworld._net.stores.torchstore import AskingStore, TcpStore, octets
from multiworld.errors import JoinError, StoreUnreachableError

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable

    from multiworld._core.membership.serving import Found

__all__ = ["PATIENCE", "MovingStore", "Servers"]

PATIENCE = 0.6
"""Seconds without an answer after which a server counts as silent, and another one is looked for."""

_ANSWER = 2.0
"""Seconds for a call, a move included, when the deadline of the join is over, or near."""


class Servers(Protocol):
    """The list: a `ListedServer`."""

    def current(
        self, lost: TcpClient | None, *, deadline: float, cancelled: Callable[[], bool]
    ) -> tuple[TcpClient, Found]:
        """Return the client of the server to use, which is not `lost`, and what was found of that.

        Raises:
            OSError: there is none before the deadline.
        """

    @property
    def began(self) -> bool:
        """See `MovingStore.may_begin`."""


class MovingStore(AskingStore):
    """One world's view of a store that is a list of addresses.

    Args:
        servers: of the list, shared by the worlds of this process; one is open.
        deadline: ``time.monotonic()`` seconds until which a call waits for a server; when it is over, or
            near, a call still has two seconds.
        cancelled: asked while a server is looked for; True gives the call up.

    Attributes:
        epoch: of the server that this view has moved to; see `multiworld._core.membership.serving`.
    """

    appends = True  # as of `TcpStore`

    def __init__(
        self, servers: Servers, *, deadline: float, cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        super().__init__(max(_ANSWER, deadline - time.monotonic()))
        self._servers = servers
        self._deadline = deadline
        self._cancelled = cancelled
        self._lock = threading.Lock()
        self._users: list[weakref.WeakMethod[Any]] = []
        self._at, found = servers.current(None, deadline=deadline, cancelled=cancelled)
        self.epoch, self._mark = found.epoch, found.mark

    def on_move(self, bring: weakref.WeakMethod[Any]) -> None:
        """Have a method called with each further server and its epoch, before any other call there."""
        self._users = [each for each in self._users if each() is not None]
        self._users.append(bring)

    def may_begin(self) -> bool:
        """Whether a world of which nothing is known may begin at the present server.

        Members of worlds that were at another one have had the time to bring what they know, and a majority
        of the hosts is seen.
        """
        return self._servers.began

    def keep_up(self, client: TcpClient, deadline: float) -> None:
        """Move to the server of `client`, if this view is at another one, and if it can in time."""
        if client is not self._at:
            with contextlib.suppress(_dist.DistError, JoinError):  # the next call does it
                self._ask(TcpClient.ping, until=deadline)

    def set(self, key: str, value: str | bytes) -> None:
        # The server does not answer to it: whether it has come is known when something else is answered.
        self._ask(_set, key, octets(value))

    def get(self, key: str) -> bytes:
        """Return the value, waiting until it exists."""
        value = self._ask(TcpClient.get, key)
        while value is None:  # again if it was deleted in between
            self.wait([key])
            value = self._ask(TcpClient.get, key)
        return bytes(value)

    def add(self, key: str, value: int) -> int:
        return int(self._ask(TcpClient.add, key, value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return bytes(self._ask(TcpClient.compare_set, key, octets(expected_value), octets(desired_value)))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(TcpClient.delete, key))

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(TcpClient.append, key, octets(value))

    def num_keys(self) -> int:
        return int(self._ask(TcpClient.count))

    def _turn(self) -> None:
        if self._cancelled():
            raise _dist.DistStoreError("the wait was given up")

    def _check(self, keys: list[str]) -> bool:
        return bool(self._ask(TcpClient.check, keys))

    def _ask(self, call: Callable[..., Any], *args: Any, until: float | None = None) -> Any:
        deadline = max(self._deadline, time.monotonic() + _ANSWER) if until is None else until
        lost: TcpClient | None = None
        while True:
            try:
                client, found = self._servers.current(lost, deadline=deadline, cancelled=self._cancelled)
                lost = client
                self._move(client, found, deadline)
                return call(client, *args, deadline=min(deadline, time.monotonic() + PATIENCE))
            except (OSError, StoreUnreachableError, _dist.DistError) as error:  # noqa: PERF203  (few tries)
                if time.monotonic() >= deadline or self._cancelled() or lost is None:
                    kind = _dist.DistStoreError if isinstance(error, TimeoutError) else _dist.DistNetworkError
                    raise kind(str(error)) from error

    def _move(self, client: TcpClient, found: Found, deadline: float) -> None:
        if client is self._at:
            return
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimeoutError("the store's server does not answer")
        try:
            if client is self._at:
                return
            server = TcpStore(client, deadline=time.monotonic() + PATIENCE, answer=PATIENCE)
            for each in list(self._users) if found.mark != self._mark else ():
                if (bring := each()) is not None:
                    bring(server, found.epoch)
            self._at, self.epoch, self._mark = client, found.epoch, found.mark
        finally:
            self._lock.release()


def _set(client: TcpClient, key: str, value: bytes, *, deadline: float) -> None:
    client.set(key, value, deadline=deadline)
    client.ping(deadline=deadline)
