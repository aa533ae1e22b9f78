"""Stores shared by the worlds of a process: their server, their client, and holds on them."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import os
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed

from multiworld._net.stores.connected_processes import others
from multiworld._net.stores.server import older_than
from multiworld._net.stores.tcp_client import TcpClient
from multiworld._net.stores.torchstore import AskingStore, PollingStore, TcpStore

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch._C._distributed_c10d import Store

    from multiworld._net.stores.servers import Server
    from multiworld._net.tls.credentials import Credentials

dist: Any = torch.distributed  # it exports the stores without saying so to type checkers

__all__ = ["ANSWER", "ATTEMPT", "FRESH", "Shared", "StoreHandle", "registry"]

ATTEMPT = 2.0
"""Seconds that one attempt to connect may take; other joins at the address wait for it."""

FRESH = 30.0
"""Seconds that a server has to answer the calls of `StoreHandle.fresh`'s clients, and their waits last."""

ANSWER = 1.0
"""Seconds that a server has to answer a call when the deadline of the join is over, or near."""


class StoreHandle:
    """One world's hold on a store.

    Attributes:
        store: a thread-safe torch Store for short calls (set, get, add, check, compare_set, delete_key). On
            tcp a call that the server does not answer raises at the join's deadline (`dist.DistStoreError`),
            and one whose server is gone raises at once (`dist.DistNetworkError`).
        address: for messages.
        local_host: numeric address at which other members reach this host; see
            `multiworld._net.host_address`.
    """

    def __init__(self, shared: Shared, store: Any, address: str, local_host: str) -> None:
        self._shared = shared
        self._closed = False
        self._lent: list[Any] = []
        self.store: Store = store
        self.address = address
        self.local_host = local_host

    @property
    def serves(self) -> bool:
        """Whether this process serves the store."""
        return self._shared.server is not None

    @property
    def moves(self) -> bool:
        """Whether the store is a list of addresses, and another server follows one that is lost."""
        return self._shared.moves

    def spare(self) -> bool:
        """Whether this hold can be released without ending a store that others use.

        A server is in use while another process is connected to it. Where the system does not list
        connections, it counts as in use.
        """
        server = self._shared.server
        if server is None or self._shared.client is None:
            return True
        with registry.lock:
            if self._shared.holds > 1:  # another world of this process keeps it
                return True
        return others(self._shared.client.remote[1], server.thread) is False

    @property
    def keeps_deadlines(self) -> bool:
        """Whether no call of `store` outlives its deadline."""
        return isinstance(self.store, AskingStore) and not isinstance(self.store, PollingStore)

    def fresh(self) -> Store:
        """Return a torch client with a connection of its own, for callers that block in C++ (NCCL).

        In secure mode it is implemented in Python: this hold keeps it alive, as C++ does not.

        Raises:
            RuntimeError: torch's, when the server does not answer.
            OSError: the same, in secure mode.
        """
        store: Store = self._shared.fresh()
        if _made_without_gil() or self._shared.credentials is not None:
            self._lent.append(store)
        return store

    def doubt(self, lost: Collection[str]) -> None:
        """Wait no longer for a server that one of these processes serves: it was found to be lost. Quick.

        Only a store that moves has another one.

        Args:
            lost: ids of processes, as in rosters.
        """
        self._shared.doubt(lost)

    def idle(self) -> None:
        """Release the clients that `fresh` returned, for other worlds at this address."""
        lent, self._lent = self._lent, []
        self._shared.take_back(lent)

    def close(self) -> None:
        """Release the hold; the last one of this process ends server and connection. Idempotent."""
        with registry.lock:
            closing, self._closed = not self._closed, True
        if closing:
            registry.release(self._shared)


class Shared:
    """A process's server and clients of one store; `key` is None for a store of the caller's.

    `credentials`: with which its connections are TLS; None: they are not.
    """

    moves = False
    """See `StoreHandle.moves`."""

    def __init__(
        self,
        key: str | None,
        *,
        client: TcpClient | None = None,
        server: Server | None = None,
        store: Any = None,
        credentials: Credentials | None = None,
    ) -> None:
        _know_forks()
        self.key = key
        self.client = client
        self.server = server
        self.credentials = credentials
        self.store = store
        self.holds = 0
        self._spare: list[Any] = []  # unused clients
        self._former: list[TcpClient] = []  # those of other worlds, which may be slow only

    def alive(self) -> bool:
        return self.client is None or self.client.alive(deadline=time.monotonic() + ANSWER)

    def use(self, client: TcpClient | None) -> None:
        """Use another client from now on."""
        if self.client is not None:
            self._former.append(self.client)
        self.client = client

    def doubt(self, lost: Collection[str]) -> None:
        """See `StoreHandle.doubt`."""

    def fresh(self) -> Any:
        """Return an unused client, or a new one.

        Up to 2.6 torch enters a new TCPStore into pybind11's table without the GIL (pytorch #143598). If
        another thread uses the table meanwhile, an entry is lost, and destroying its object ends the process.
        So clients are reused.
        """
        while self._spare:
            with contextlib.suppress(
                IndexError, RuntimeError
            ):  # another thread was first; its server is gone
                spare = self._spare.pop()
                spare.check(["m8d-none"])
                return spare
        return self._connected()

    def take_back(self, clients: list[Any]) -> None:
        if self.key is not None:
            self._spare += [each for each in clients if isinstance(each, (dist.TCPStore, TcpStore))]

    def _beside(self, client: TcpClient) -> Any:
        """Return a torch client of the server that `client` is connected to."""
        host, port = client.remote[:2]
        if self.credentials is not None:
            return _over_tls(self.credentials, host, port)
        wait = dt.timedelta(seconds=FRESH)
        return dist.TCPStore(host, port, is_master=False, timeout=wait, wait_for_workers=False)

    def _connected(self) -> Any:
        if self.client is not None:
            return self._beside(self.client)
        if isinstance(self.store, dist.TCPStore):
            wait = self.store.timeout
            return dist.TCPStore(self.store.host, self.store.port, timeout=wait, wait_for_workers=False)
        if isinstance(self.store, dist.FileStore) and self.key is not None:
            return dist.FileStore(self.store.path)
        return self.store

    def close(self) -> None:
        for client in (self.client, *self._former):
            if client is not None:
                client.close()
        self._spare.clear()
        if self.server is not None:
            self.server.close()
        self.server = self.store = None


class Registry:
    """This process's stores by address. A slot's lock is held during an attempt, `lock` never during I/O."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.shared: dict[str, Shared] = {}
        self.slots: dict[str, threading.Lock] = {}

    def slot(self, key: str) -> threading.Lock:
        _know_forks()
        with self.lock:
            return self.slots.setdefault(key, threading.Lock())

    def forked(self) -> None:
        """In a forked child: the stores are the parent's."""
        self.lock = threading.Lock()  # another thread may have held it
        # The child must neither use its parent's connections nor end its server: kept, never used.
        _inherited.append(self.shared)
        self.shared, self.slots = {}, {}

    def hold(self, key: str) -> Shared | None:
        """Hold the address's store, if it is alive."""
        with self.lock:
            shared = self.shared.get(key)
            if shared is not None:
                shared.holds += 1
        if shared is None or shared.alive():
            return shared
        self.release(shared, inside=True)
        return None

    def put(self, key: str, shared: Shared) -> Shared:
        """Hold a store that was opened and return it; where this process serves there, that one."""
        with self.lock:
            there = self.shared.get(key)
            if there is not None and there.server is not None and shared.server is None:
                # The server was only slow: it is to end with its last hold, not with those before this one.
                there.use(shared.client)
                shared = there
            shared.holds += 1
            self.shared[key] = shared  # a dead one that stood here ends with its own holds
        return shared

    def release(self, shared: Shared, *, inside: bool = False) -> None:
        """Release a hold; `inside`: the caller holds the slot's lock."""
        with self.lock:
            shared.holds -= 1
            last = shared.holds == 0 and shared.key is not None
            slot = self.slots.get(shared.key) if shared.key is not None else None
            if last and shared.key is not None and self.shared.get(shared.key) is shared:
                del self.shared[shared.key]
        if last and not inside and slot is not None:
            # Under the slot's lock, so that no join connects to a server that is about to end. An attempt is
            # short.
            taken = slot.acquire(timeout=2 * ATTEMPT)
            try:
                shared.close()
            finally:
                if taken:
                    slot.release()
        elif last:
            shared.close()


registry = Registry()
_inherited: list[dict[str, Shared]] = []


@functools.cache
def _know_forks() -> None:
    os.register_at_fork(after_in_child=registry.forked)


def _over_tls(credentials: Credentials, host: str, port: int) -> TcpStore:
    """Return a torch Store with a connection of its own, which ends with it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    client = TcpClient.connect_as(credentials, family, (host, port), deadline=time.monotonic() + FRESH)
    store = TcpStore(client, deadline=time.monotonic(), answer=FRESH)
    weakref.finalize(store, _close, client, os.getpid()).atexit = False
    return store


def _close(client: TcpClient, pid: int) -> None:
    if os.getpid() == pid:  # a forked child's copy is of its parent's connection
        client.close()


def _made_without_gil() -> bool:
    """Whether torch enters new stores into pybind11's table without holding the GIL."""
    return older_than(2, 7)
