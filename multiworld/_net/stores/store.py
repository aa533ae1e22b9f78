"""Stores of worlds: ``tcp://host:port``, ``file:///path``, or any torch Store.

A process serves or connects to an address once, for all its worlds. The server is torch's own TCPStore (a C++
thread in this process), bound to exactly the given address (`server.py`). Calls go through `TcpClient`, whose
calls keep deadlines. A store is trusted: every process that can write to it controls the worlds that use it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import ipaddress
import logging
import os
import queue
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from multiworld._net import host_address
from multiworld._net.stores.address import STORE_RULE, StoreAddress
from multiworld._net.stores.connected_processes import others
from multiworld._net.stores.server import StoreServer, older_than
from multiworld._net.stores.tcp_client import NotAStoreError, TcpClient
from multiworld._net.stores.torchstore import PollingStore, TcpStore
from multiworld.errors import InvalidJoinError, StoreBindError, StoreUnreachableError, WorldError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store

dist: Any = torch.distributed  # it exports the stores without saying so to type checkers

__all__ = ["PollingStore", "StoreAddress", "StoreHandle", "open_store"]

_ATTEMPT = 2.0
"""Seconds that one attempt to connect may take; other joins at the address wait for it."""

_ANSWER = 1.0
"""Seconds that a server has to answer a call when the deadline of the join is over, or near."""

_FOREIGN = 2.0
"""Seconds for which rank 0 looks for a server at an address that it cannot serve itself."""

_SILENT = 5.0
"""Seconds for the same where a listener is silent: it may be a store whose process or host is stopped."""

_SERVING = 10.0
"""Seconds that torch's server may need to answer its own process; a network that is up takes milliseconds."""

_MISSED_AFTER = 5.0
"""Seconds after which a member logs that its store has no server; the interval then doubles."""

_log = logging.getLogger(__name__)


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

    def __init__(self, shared: _Shared, store: Any, address: str, local_host: str) -> None:
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

    def spare(self) -> bool:
        """Whether this hold can be released without ending a store that others use.

        A server is in use while another process is connected to it. Where the system does not list
        connections, it counts as in use.
        """
        server = self._shared.server
        if server is None or self._shared.client is None:
            return True
        with _registry.lock:
            if self._shared.holds > 1:  # another world of this process keeps it
                return True
        return others(self._shared.client.remote[1], server.thread) is False

    @property
    def keeps_deadlines(self) -> bool:
        """Whether no call of `store` outlives its deadline."""
        return isinstance(self.store, TcpStore)

    def fresh(self) -> Store:
        """Return a torch client with a connection of its own, for callers that block in C++ (NCCL).

        Raises:
            RuntimeError: torch's, when the server does not answer.
        """
        store: Store = self._shared.fresh()
        if _made_without_gil():
            self._lent.append(store)
        return store

    def idle(self) -> None:
        """Release the clients that `fresh` returned, for other worlds at this address."""
        lent, self._lent = self._lent, []
        self._shared.take_back(lent)

    def close(self) -> None:
        """Release the hold; the last one of this process ends server and connection. Idempotent."""
        with _registry.lock:
            closing, self._closed = not self._closed, True
        if closing:
            _registry.release(self._shared)


class _Shared:
    """A process's server and clients of one store; `key` is None for a store of the caller's."""

    def __init__(
        self,
        key: str | None,
        *,
        client: TcpClient | None = None,
        server: StoreServer | None = None,
        store: Any = None,
    ) -> None:
        self.key = key
        self.client = client
        self.server = server
        self.store = store
        self.holds = 0
        self._spare: list[Any] = []  # unused clients

    def alive(self) -> bool:
        return self.client is None or self.client.alive(deadline=time.monotonic() + _ANSWER)

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
            self._spare += [each for each in clients if isinstance(each, dist.TCPStore)]

    def _connected(self) -> Any:
        if self.client is not None:
            host, port = self.client.remote[:2]
            wait = dt.timedelta(seconds=30)
            return dist.TCPStore(host, port, is_master=False, timeout=wait, wait_for_workers=False)
        if isinstance(self.store, dist.TCPStore):
            wait = self.store.timeout
            return dist.TCPStore(self.store.host, self.store.port, timeout=wait, wait_for_workers=False)
        if isinstance(self.store, dist.FileStore) and self.key is not None:
            return dist.FileStore(self.store.path)
        return self.store

    def close(self) -> None:
        if self.client is not None:
            self.client.close()
        self._spare.clear()
        if self.server is not None:
            self.server.close()
        self.server = self.store = None


class _Registry:
    """This process's stores by address. A slot's lock is held during an attempt, `lock` never during I/O."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pid = os.getpid()
        self.shared: dict[str, _Shared] = {}
        self.slots: dict[str, threading.Lock] = {}

    def slot(self, key: str) -> threading.Lock:
        with self.lock:
            if self.pid != os.getpid():
                # A forked child must neither use its parent's connections nor end its server: kept, never
                # used.
                _inherited.append(dict(self.shared))
                self.pid = os.getpid()
                self.shared, self.slots = {}, {}
            return self.slots.setdefault(key, threading.Lock())

    def hold(self, key: str) -> _Shared | None:
        """Hold the address's store, if it is alive."""
        with self.lock:
            shared = self.shared.get(key)
            if shared is not None:
                shared.holds += 1
        if shared is None or shared.alive():
            return shared
        self.release(shared, inside=True)
        return None

    def put(self, key: str, shared: _Shared) -> _Shared:
        with self.lock:
            shared.holds += 1
            self.shared[key] = shared  # a dead one that stood here ends with its own holds
        return shared

    def release(self, shared: _Shared, *, inside: bool = False) -> None:
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
            taken = slot.acquire(timeout=2 * _ATTEMPT)
            try:
                shared.close()
            finally:
                if taken:
                    slot.release()
        elif last:
            shared.close()


_registry = _Registry()
_inherited: list[dict[str, _Shared]] = []


def open_store(
    store: str | Store,
    *,
    world: str,
    serve: bool,
    only: bool = True,
    deadline: float,
    cancelled: Callable[[], bool] = lambda: False,
) -> StoreHandle:
    """Open the store of a world.

    Args:
        store: address, or a torch Store, which stays the caller's.
        world: for messages.
        serve: whether this process serves a tcp store that has no server yet.
        only: whether no other process does: rank 0. Else any process of the address's host may be the one.
        deadline: ``time.monotonic()`` seconds; other ranks try to connect until then.
        cancelled: polled between attempts; True ends the wait with StoreUnreachableError.

    Raises:
        InvalidJoinError: `store` is no store.
        StoreBindError: rank 0 can neither serve it nor use the server that is there.
        StoreUnreachableError: it did not answer before the deadline.
    """
    if isinstance(store, dist.Store):
        here = host_address.chosen(world) or _host_of(store)
        return StoreHandle(_Shared(None, store=store), store, repr(store), here)
    if not isinstance(store, str):
        raise InvalidJoinError(
            world, f"store={store!r}", rule=STORE_RULE, next_step="Give the same one to every member"
        )
    address = StoreAddress.parse(store, world=world)
    if address.scheme == "file":
        return _open_file(address, world=world, serve=serve)
    return _open_tcp(address, world=world, serve=serve, only=only, deadline=deadline, cancelled=cancelled)


def _open_file(address: StoreAddress, *, world: str, serve: bool) -> StoreHandle:
    key = str(address)
    here = host_address.chosen(world) or host_address.outward()
    with _registry.slot(key):
        shared = _registry.hold(key)
        if shared is None:
            try:
                # torch tries again and again to open a file that cannot be made.
                os.close(os.open(address.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644))
            except OSError as error:
                kind: type[WorldError] = StoreBindError if serve else StoreUnreachableError
                raise kind(
                    world,
                    f"store={key}: {error.strerror}",
                    rule="A file store is a file in a folder that exists and can be written",
                    next_step=f"Make {Path(address.path).parent} writable, or give another path",
                ) from error
            shared = _registry.put(key, _Shared(key, store=dist.FileStore(address.path)))
    return StoreHandle(shared, shared.store, key, here)


def _open_tcp(
    address: StoreAddress,
    *,
    world: str,
    serve: bool,
    only: bool,
    deadline: float,
    cancelled: Callable[[], bool],
) -> StoreHandle:
    key = str(address)
    here = host_address.chosen(world)
    targets = _resolve(address, world=world, deadline=deadline)
    attempt = _Attempt(address, targets, world=world, serve=serve, only=only)
    server = "rank 0" if only else f"a member on {address.host}"
    pause = 0.01
    began = time.monotonic()
    next_word = began + _MISSED_AFTER
    while True:
        slot = _registry.slot(key)
        if slot.acquire(timeout=max(0.001, deadline - time.monotonic())):
            try:
                shared = _registry.hold(key)
                if shared is None and (made := attempt.make(deadline)) is not None:
                    shared = _registry.put(key, made)
            finally:
                slot.release()
            if shared is not None and shared.client is not None:
                view = TcpStore(shared.client, deadline=deadline, answer=_ANSWER)
                return StoreHandle(shared, view, key, here or shared.client.local[0])
        if cancelled() or time.monotonic() + pause >= deadline:
            raise StoreUnreachableError(
                world,
                f"{key} does not answer: {attempt.last}",
                rule=f"The store is served there by {server}, and every member reaches it before its timeout",
                next_step=f"See that {server} runs, and that address and port are the same everywhere",
            )
        if (now := time.monotonic()) >= next_word:
            next_word = now + (now - began)
            _log.warning(
                "world %r waits for %s, which serves %s: %s; %.0f s so far, %.0f s are left",
                world, server, key, attempt.last, now - began, deadline - now,
            )  # fmt: skip
        time.sleep(pause)
        pause = min(0.1, pause * 1.5)


class _Attempt:
    """Repeated attempts to serve or to connect, with the last error."""

    def __init__(
        self,
        address: StoreAddress,
        targets: list[tuple[int, tuple[str, int]]],
        *,
        world: str,
        serve: bool,
        only: bool,
    ) -> None:
        self.address, self.targets, self.world, self.serve, self.only = address, targets, world, serve, only
        self.last = "no address was tried"
        self._foreign_since: float | None = None

    def make(self, deadline: float) -> _Shared | None:
        """Serve or connect, once."""
        now = time.monotonic()
        refused = self._bind_error(deadline) if self.serve else None
        if isinstance(refused, _Shared):
            return refused
        for family, target in self.targets:
            try:
                client = TcpClient.connect(family, target, deadline=min(deadline, now + _ATTEMPT))
            except NotAStoreError as error:  # noqa: PERF203  (one or two addresses)
                self.last = str(error)
                # A server that was just killed looks the same for a moment: its listener exists and accepts
                # nothing.
                self._foreign_since = self._foreign_since or now
                patience = _SILENT if isinstance(error.__cause__, TimeoutError) else _FOREIGN
                # Where others may serve it, a stopped one is waited for: it may go on, or end.
                silent = patience == _SILENT and not self.only
                if refused is not None and not silent and time.monotonic() - self._foreign_since > patience:
                    raise self._cannot(self.last) from error
            except OSError as error:
                self.last = str(error)
            else:
                return _Shared(str(self.address), client=client)
        if refused is not None and refused.errno == errno.EADDRNOTAVAIL and self.only:
            self._foreign_since = self._foreign_since or now
            if time.monotonic() - self._foreign_since > _FOREIGN:
                raise self._cannot(
                    f"it is no address of this host, and no server answers there ({self.last})"
                )
        return None

    def _bind_error(self, deadline: float) -> _Shared | OSError | None:
        """Serve at the first address that belongs to this host; return the error where that fails."""
        error: OSError | None = None
        for family, target in self.targets:
            try:
                server = StoreServer(
                    family, target, timeout=min(_SERVING, max(2.0, deadline - time.monotonic()))
                )
            except dist.DistError as failure:  # no way from this host to itself: its network is down
                raise self._cannot(str(failure).splitlines()[0]) from failure
            except OSError as failure:
                if failure.errno not in {errno.EADDRINUSE, errno.EADDRNOTAVAIL}:
                    raise self._cannot(failure.strerror or str(failure)) from failure
                if error is None or failure.errno == errno.EADDRINUSE:
                    error = failure.with_traceback(None)  # which holds this frame, and its caller's
                continue
            try:
                client = TcpClient.connect(
                    family, target, deadline=max(deadline, time.monotonic() + _ANSWER)
                )  # ourselves
            except OSError as failure:
                raise self._cannot(str(failure)) from failure
            return _Shared(str(self.address), client=client, server=server)
        return error

    def _cannot(self, why: str) -> StoreBindError:
        return StoreBindError(
            self.world,
            f"{'Rank 0' if self.only else 'This member'} cannot serve the store at {self.address}: {why}",
            rule="The address is one of rank 0's host, and its port is free or a TCPStore's"
            if self.only
            else "The address is one of a member's host, and its port is free or a TCPStore's",
            next_step="Give an address of such a host and a free port",
        )


def _made_without_gil() -> bool:
    """Whether torch enters new stores into pybind11's table without holding the GIL."""
    return older_than(2, 7)


def _resolve(address: StoreAddress, *, world: str, deadline: float) -> list[tuple[int, tuple[str, int]]]:
    """Return the host's numeric addresses, each once, with their family, within the deadline."""
    with contextlib.suppress(ValueError):  # a name
        version = ipaddress.ip_address(address.host).version
        return [(socket.AF_INET6 if version == 6 else socket.AF_INET, (address.host, address.port))]
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM))
        except OSError as error:
            answers.put(error)

    threading.Thread(target=ask, name="m8d-resolve", daemon=True).start()
    try:
        found = answers.get(timeout=max(0.001, deadline - time.monotonic()))
    except queue.Empty:
        found = TimeoutError("the name server does not answer")
    if isinstance(found, OSError):
        raise StoreUnreachableError(
            world,
            f"{address}: {found.strerror or found}",
            rule="The host is a name that resolves here, or a numeric address",
            next_step="Check the name, or give the numeric address",
        ) from found
    targets = list(dict.fromkeys((int(family), (str(to[0]), int(to[1]))) for family, _, _, _, to in found))
    if address.host != "localhost" and all(host_address.is_loopback(target[0]) for _, target in targets):
        # A host's own name, which /etc/hosts often gives to loopback (127.0.1.1); the others resolve it
        # otherwise.
        outside = (host_address.outward(), address.port)
        targets.insert(0, (int(socket.AF_INET6 if ":" in outside[0] else socket.AF_INET), outside))
    return list(dict.fromkeys(targets))


def _host_of(store: Store) -> str:
    """Return the local address that leads to the host of a torch Store; without one, outward, or loopback."""
    inner: Any = store
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    if isinstance(inner, dist.HashStore):  # this process's own
        return host_address.LOOPBACK
    host = getattr(inner, "host", None)
    if not isinstance(host, str) or not host:
        return host_address.outward()
    with contextlib.suppress(OSError):  # no route, no name: the address that leads outward serves as well
        for family, kind, _, _, to in socket.getaddrinfo(
            host, getattr(inner, "port", 1) or 1, type=socket.SOCK_DGRAM
        ):
            with socket.socket(family, kind) as probe:
                probe.connect(to)  # UDP: nothing is sent, the kernel picks the interface
                found = str(probe.getsockname()[0])
                # Its server listens on every interface; members on other hosts use another address.
                return host_address.outward() if host_address.is_loopback(found) else found
    return host_address.outward()
