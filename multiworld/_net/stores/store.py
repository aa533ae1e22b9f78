"""Stores of worlds: ``tcp://host:port``, a list of these, etcd, ``file:///path``, or any torch Store.

A process serves or connects to an address once, for all its worlds. The server is torch's own TCPStore (a C++
thread in this process), bound to exactly the given address (`server.py`). Calls go through `TcpClient`, whose
calls keep deadlines. A store is trusted: every process that can write to it controls the worlds that use it.

In secure mode server and clients speak mutual TLS (`tls_server.py`), and what cannot is refused
(`secure.py`). The mode is decided when a store is opened, by the settings.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from multiworld._net import host_address
from multiworld._net.stores.address import STORE_RULE, StoreAddress
from multiworld._net.stores.etcd_address import is_etcd
from multiworld._net.stores.listed import open_list
from multiworld._net.stores.resolving import resolved_targets
from multiworld._net.stores.secure import check_file, check_object
from multiworld._net.stores.servers import serve_as
from multiworld._net.stores.shared import ANSWER, ATTEMPT, Shared, StoreHandle, registry
from multiworld._net.stores.tcp_client import NotAStoreError, TcpClient
from multiworld._net.stores.torchstore import PollingStore, TcpStore
from multiworld._net.tls.credentials import current
from multiworld.errors import InvalidJoinError, StoreBindError, StoreUnreachableError, WorldError
from multiworld.logs.source import logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store

    from multiworld._net.tls.credentials import Credentials

dist: Any = torch.distributed  # it exports the stores without saying so to type checkers

__all__ = ["PollingStore", "StoreAddress", "StoreHandle", "open_store"]

_FOREIGN = 2.0
"""Seconds for which rank 0 looks for a server at an address that it cannot serve itself."""

_SILENT = 5.0
"""Seconds for the same where a listener is silent: it may be a store whose process or host is stopped."""

_OF_THE_OTHERS = 0.2
"""Seconds of an attempt kept for each address after the one that it begins with, which may be silent."""

_SERVING = 10.0
"""Seconds that torch's server may need to answer its own process; a network that is up takes milliseconds."""

_RESOLVE_AGAIN = 5.0
"""Seconds after which the name of a host that does not answer is resolved again: it may have moved."""

_UNRESOLVED = 0.25
"""Seconds for the same where it does not resolve."""

_MISSED_AFTER = 5.0
"""Seconds after which a member logs that its store has no server; the interval then doubles."""

_log = logger(__name__)


def open_store(
    store: str | Store,
    *,
    world: str,
    serve: bool,
    only: bool = True,
    known: bool = False,
    process: str = "",
    deadline: float,
    cancelled: Callable[[], bool] = lambda: False,
) -> StoreHandle:
    """Open the store of a world.

    Args:
        store: address, or a torch Store, which stays the caller's.
        world: for messages.
        serve: whether this process serves a tcp store that has no server yet; one that is a list, at an
            address of this host.
        only: whether no other process does: rank 0. Else any process of the address's host may be the one.
        known: whether its host's name is known to be right: then one that does not exist is waited for. A
            container's name often comes and goes with its process.
        process: this process's id in rosters, for `StoreHandle.doubt` of others; "" where it is in none.
        deadline: ``time.monotonic()`` seconds; other ranks try to connect until then.
        cancelled: polled between attempts; True ends the wait with StoreUnreachableError.

    Raises:
        InvalidJoinError: `store` is no store, or one that secure mode refuses.
        StoreBindError: rank 0 can neither serve it nor use the server that is there.
        StoreUnreachableError: it did not answer before the deadline, or its host's name does not exist.
        MultiworldError: of `multiworld._net.tls.credentials.current`.
    """
    credentials = current()
    if isinstance(store, dist.Store):
        if credentials is not None:
            check_object(store, world)
        here = host_address.chosen(world) or _host_of(store)
        return StoreHandle(Shared(None, store=store), store, repr(store), here)
    if not isinstance(store, str):
        raise InvalidJoinError(
            world, f"store={store!r}", rule=STORE_RULE, next_step="Give the same one to every member"
        )
    if is_etcd(store):
        from multiworld._net.stores.etcd_store import open_etcd  # noqa: PLC0415  (few use it)

        return open_etcd(
            store, world=world, secure=credentials is not None, deadline=deadline, cancelled=cancelled
        )
    addresses = StoreAddress.parse_all(store, world=world)
    if len(addresses) > 1:
        return open_list(
            addresses,
            world=world,
            serve=serve,
            process=process,
            credentials=credentials,
            deadline=deadline,
            cancelled=cancelled,
        )
    (address,) = addresses
    if address.scheme == "file":
        given = store.removeprefix("file://")  # the address has no links any more
        return _open_file(address, given, world=world, serve=serve, secure=credentials is not None)
    attempt = _Attempt(address, world=world, serve=serve, only=only, known=known, credentials=credentials)
    return _open_tcp(attempt, deadline=deadline, cancelled=cancelled)


def _open_file(address: StoreAddress, given: str, *, world: str, serve: bool, secure: bool) -> StoreHandle:
    key = str(address)
    here = host_address.chosen(world) or host_address.outward()
    with registry.slot(key):
        # torch opens the file again for each call: the store held may be of one that was removed.
        shared = None if secure else registry.hold(key)
        if shared is None:
            try:
                # torch tries again and again to open a file that cannot be made.
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
                opened = os.open(address.path, flags, 0o600 if secure else 0o644)
                try:
                    if secure:
                        check_file(given, opened, world)
                finally:
                    os.close(opened)
            except OSError as error:
                kind: type[WorldError] = StoreBindError if serve else StoreUnreachableError
                raise kind(
                    world,
                    f"store={key}: {error.strerror}",
                    rule="A file store is a file in a folder that exists and can be written",
                    next_step=f"Make {Path(address.path).parent} writable, or give another path",
                ) from error
            shared = registry.hold(key) or registry.put(key, Shared(key, store=dist.FileStore(address.path)))
    return StoreHandle(shared, shared.store, key, here)


def _open_tcp(attempt: _Attempt, *, deadline: float, cancelled: Callable[[], bool]) -> StoreHandle:
    address, world = attempt.address, attempt.world
    key = str(address)
    here = host_address.chosen(world)
    server = "rank 0" if attempt.only else f"a member on {address.host}"
    pause = 0.01
    began = time.monotonic()
    next_word = began + _MISSED_AFTER
    while True:
        attempt.resolve(deadline)
        slot = registry.slot(key)
        if slot.acquire(timeout=max(0.001, deadline - time.monotonic())):
            try:
                shared = registry.hold(key)
                if shared is None and (made := attempt.make(deadline)) is not None:
                    shared = registry.put(key, made)
            finally:
                slot.release()
            if shared is not None and shared.client is not None:
                view = TcpStore(shared.client, deadline=deadline, answer=ANSWER)
                return StoreHandle(shared, view, key, here or shared.client.local[0])
        if cancelled() or time.monotonic() + pause >= deadline:
            raise StoreUnreachableError(
                world,
                f"{key} does not answer: {attempt.last}",
                rule=f"The store is served there by {server}, and every member reaches it before its timeout",
                next_step=attempt.next_step
                or f"See that {server} runs, and that address and port are the same everywhere",
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
        *,
        world: str,
        serve: bool,
        only: bool,
        known: bool,
        credentials: Credentials | None,
    ) -> None:
        self.address, self.world, self.serve, self.only = address, world, serve, only
        self.known = known
        self.credentials = credentials
        self.targets: list[tuple[int, tuple[str, int]]] = []
        self.last = "no address was tried"
        self.next_step = ""
        self._made = 0  # attempts
        self._resolve_at = 0.0
        self._foreign_since: float | None = None

    def resolve(self, deadline: float) -> None:
        """Resolve the host's name, where that is due.

        Raises:
            StoreUnreachableError: it does not exist, and is not known to be right.
        """
        now = time.monotonic()
        if now < self._resolve_at:
            return
        until = min(deadline, now + ATTEMPT) if self.targets else deadline
        try:
            self.targets = resolved_targets(self.address, world=self.world, deadline=until)
        except StoreUnreachableError as error:
            if not self.targets:
                cause = error.__cause__
                passes = isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_AGAIN
                if not self.known and not passes:
                    raise
                self.last = f"its name does not resolve: {cause}"
                self.next_step = "Check the name, or give the numeric address"
        self._resolve_at = time.monotonic() + (_RESOLVE_AGAIN if self.targets else _UNRESOLVED)

    def make(self, deadline: float) -> Shared | None:
        """Serve or connect, once."""
        refused = self._bind_error(deadline) if self.serve else None
        if isinstance(refused, Shared):
            return refused
        now = time.monotonic()  # serving may take seconds
        end, count = min(deadline, now + ATTEMPT), len(self.targets)
        rest = min(_OF_THE_OTHERS, (end - now) / max(count, 1))
        order = [self.targets[(self._made + place) % count] for place in range(count)]
        self._made += 1  # the one that has most of the time is another one in the next attempt
        for place, (family, target) in enumerate(order):
            until = end - (count - 1 - place) * rest
            try:
                client = TcpClient.connect_as(self.credentials, family, target, deadline=until)
            except NotAStoreError as error:
                timed_out = isinstance(error.__cause__, TimeoutError)
                # An attempt that the deadline cuts short says less than the one before it.
                if not (timed_out and self.next_step and deadline < now + ATTEMPT):
                    self.last, self.next_step = str(error), error.next_step
                # A server that was just killed looks the same for a moment: its listener exists and accepts
                # nothing.
                self._foreign_since = self._foreign_since or now
                patience = _SILENT if timed_out else _FOREIGN
                # Where others may serve it, a stopped one is waited for: it may go on, or end.
                silent = patience == _SILENT and not self.only
                if refused is not None and not silent and time.monotonic() - self._foreign_since > patience:
                    raise self._cannot(self.last) from error
            except OSError as error:
                self.last, self.next_step = str(error), ""
            else:
                return Shared(str(self.address), client=client, credentials=self.credentials)
        if refused is not None and refused.errno == errno.EADDRNOTAVAIL and self.only:
            self._foreign_since = self._foreign_since or now
            if time.monotonic() - self._foreign_since > _FOREIGN:
                raise self._cannot(
                    f"it is no address of this host, and no server answers there ({self.last})"
                )
        return None

    def _bind_error(self, deadline: float) -> Shared | OSError | None:
        """Serve at the first address that belongs to this host; return the error where that fails."""
        error: OSError | None = None
        for family, target in self.targets:
            try:
                patience = min(_SERVING, max(2.0, deadline - time.monotonic()))
                server = serve_as(self.credentials, family, target, timeout=patience)
            except dist.DistError as failure:  # no way from this host to itself: its network is down
                raise self._cannot(str(failure).splitlines()[0]) from failure
            except OSError as failure:
                if failure.errno not in {errno.EADDRINUSE, errno.EADDRNOTAVAIL}:
                    raise self._cannot(failure.strerror or str(failure)) from failure
                if error is None or failure.errno == errno.EADDRINUSE:
                    error = failure.with_traceback(None)  # which holds this frame, and its caller's
                continue
            try:
                client = TcpClient.connect_as(
                    self.credentials, family, target, deadline=max(deadline, time.monotonic() + ANSWER)
                )  # ourselves
            except OSError as failure:
                raise self._cannot(str(failure)) from failure
            return Shared(str(self.address), client=client, server=server, credentials=self.credentials)
        return error

    def _cannot(self, why: str) -> StoreBindError:
        return StoreBindError(
            self.world,
            f"{'Rank 0' if self.only else 'This member'} cannot serve the store at {self.address}: {why}",
            rule="The address is one of rank 0's host, and its port is free or a TCPStore's"
            if self.only
            else "The address is one of a member's host, and its port is free or a TCPStore's",
            next_step=self.next_step or "Give an address of such a host and a free port",
        )


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
