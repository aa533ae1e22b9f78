"""A store that is a list of addresses: this process's client of its server, and the server where it is here.

`multiworld._core.membership.serving` decides; this looks, binds and ends. The server is an ordinary one
(`server.py`) with a key that says what it is. While the process holds the store, a thread sees five times a
second that it has a server, and that no newer one has come.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed

from multiworld._core.membership import serving
from multiworld._core.membership.serving import AddressState, Found, Verdict
from multiworld._net import host_address
from multiworld._net.stores.address import list_text
from multiworld._net.stores.looking import BUSY, LOOK, PROCESS, STATE, Addresses
from multiworld._net.stores.moving_store import PATIENCE, MovingStore
from multiworld._net.stores.servers import serve_as
from multiworld._net.stores.shared import ANSWER, FRESH, Shared, StoreHandle, registry
from multiworld._net.stores.tcp_client import TcpClient
from multiworld.errors import StoreUnreachableError
from multiworld.logs.source import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from multiworld._net.stores.address import StoreAddress
    from multiworld._net.tls.credentials import Credentials

dist: Any = torch.distributed  # it exports its errors without saying so to type checkers

__all__ = ["open_list"]

_KEEP_EVERY = 0.2
"""Seconds between two looks of the thread."""

_RIVALS_EVERY = 0.5
"""Seconds between two looks of a server for newer ones."""

_STAGGER = 0.1
"""Seconds by which hosts later in the list give those before them the time to serve first, each."""

_SETTLED = 1.0
"""Seconds for which a server waits for what members of running worlds bring, before others begin there.

They count from when it sees more than half of the addresses: one that was cut off is brought nothing before.
"""

_CANDIDATE = 2.0
"""Seconds that a candidate gives another one, later in the list, to give way."""

_BRIEFLY = 5.0
"""Seconds of a search, and between two looks that wait, in which an address that did not answer at the last
look is hardly waited for."""

_SERVING = 10.0
"""Seconds that torch's server may need to answer its own process; a network that is up takes milliseconds."""

_MISSED_AFTER = 5.0
"""Seconds after which a member logs that its store has no server; the interval then doubles."""

_NEWER, _BEGAN = "m8d/newer", "m8d/began"

_log = logger(__name__)
_known: dict[str, int] = {}
"""The highest epoch of each list that this process knows, for its whole life."""


def open_list(
    addresses: tuple[StoreAddress, ...],
    *,
    world: str,
    serve: bool,
    process: str = "",
    credentials: Credentials | None = None,
    deadline: float,
    cancelled: Callable[[], bool],
) -> StoreHandle:
    """Open a store that is a list of addresses; see `multiworld._net.stores.store.open_store`.

    Raises:
        StoreUnreachableError: no process of these hosts serves it before the deadline.
    """
    key = list_text(addresses)
    here = host_address.chosen(world)
    with registry.slot(key):
        shared = registry.hold(key)
        if shared is None:
            shared = registry.put(key, ListedServer(key, addresses, credentials))
    assert isinstance(shared, ListedServer)  # noqa: S101  (the key is a list's)
    try:
        if serve:
            shared.serves = True
        if process:
            shared.process = process
        view = MovingStore(shared, deadline=deadline, cancelled=cancelled)
        shared.keep(view)
    except OSError as error:
        registry.release(shared)
        raise StoreUnreachableError(
            world,
            f"{key} does not answer: {shared.last}",
            rule="The store is served by a member on the first of these hosts that has one",
            next_step="See that a member runs on one of them, and that all members give the same list",
        ) from error
    except BaseException:
        registry.release(shared)
        raise
    client = shared.client
    return StoreHandle(shared, view, key, here or (client.local[0] if client else host_address.outward()))


class ListedServer(Shared):
    """This process's client of the server of a list, and that server where this process serves.

    Args:
        key: the list's text.
        addresses: of the list, in its order.
        credentials: with which all connections are TLS; None: they are not.

    Attributes:
        found: what was found of the server.
        serves: whether this process may serve.
        process: this process's id in rosters; "" where it is in none.
        began: see `MovingStore.may_begin`.
        last: why there was no server at the last look.
    """

    moves = True

    def __init__(
        self, key: str, addresses: tuple[StoreAddress, ...], credentials: Credentials | None = None
    ) -> None:
        super().__init__(key, credentials=credentials)
        self._addresses = Addresses(addresses, credentials)
        self._lock = threading.Lock()  # held for one look
        self._at = 0
        self._now: tuple[TcpClient, Found] | None = None
        self._searching_since: float | None = None
        self._slow: frozenset[int] = frozenset()  # positions, as seen last, or doubted
        self._briefly_until = 0.0
        self._settles: float | None = None  # since when the server here sees enough addresses
        self._looked = 0.0
        self._views: weakref.WeakSet[MovingStore] = weakref.WeakSet()
        self._ended = threading.Event()
        self._keeper: threading.Thread | None = None
        self.found = Found(AddressState.SILENT)
        self.serves = False
        self.process = ""
        self.last = "no address was tried"

    # -- for the views ---------------------------------------------------------------------------------------

    def current(
        self, lost: TcpClient | None, *, deadline: float, cancelled: Callable[[], bool]
    ) -> tuple[TcpClient, Found]:
        """Return the client of the server to use, which is not `lost`, and what was found of that.

        Raises:
            OSError: there is none before the deadline.
        """
        began = time.monotonic()
        pause, next_word = 0.005, began + _MISSED_AFTER
        while True:
            now_at = self._now
            if now_at is not None and now_at[0] is not lost:
                return now_at
            if self._lock.acquire(timeout=max(0.001, deadline - time.monotonic())):
                try:
                    if self._now is not None and self._now[0] is not lost:
                        return self._now
                    self._lose()
                    if self._search():
                        continue
                finally:
                    self._release()
            now = time.monotonic()
            if cancelled() or self._ended.is_set() or now + pause >= deadline:
                raise TimeoutError(f"{self.key} does not answer: {self.last}")
            if now >= next_word:
                next_word = now + (now - began)
                _log.warning(
                    "no member serves %s: %s; %.0f s so far, %.0f s are left",
                    self.key, self.last, now - began, deadline - now,
                )  # fmt: skip
            time.sleep(pause)
            pause = min(0.1, pause * 1.5)

    @property
    def began(self) -> bool:
        """See `MovingStore.may_begin`."""
        client = self.client
        if client is None:
            return False
        with contextlib.suppress(OSError):
            return client.get(_BEGAN, deadline=time.monotonic() + PATIENCE) == b"1"
        return False

    def doubt(self, lost: Collection[str]) -> None:
        """See `Shared.doubt`: calls of the server go to another one, or to the same if it does answer."""
        now_at = self._now
        if now_at is not None and now_at[1].process in lost:
            self._slow |= {self._at}
            now_at[0].close()

    def keep(self, view: MovingStore) -> None:
        """Keep a view up to date, as long as it is used."""
        with registry.lock:
            self._views.add(view)
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._keep, daemon=True, name="m8d-store")
                self._keeper.start()

    def _connected(self) -> Any:
        """Return a torch client of the server that answers now.

        Raises:
            TimeoutError: none does within `FRESH`.
        """
        until = time.monotonic() + FRESH
        client, _ = self.current(self._silent(), deadline=until, cancelled=self._ended.is_set)
        return self._beside(client)

    # -- for the registry ------------------------------------------------------------------------------------

    def alive(self) -> bool:
        """True: a server that is gone is followed by another."""
        return True

    def close(self) -> None:
        """End the server that is here, the client and the thread; a look under way does it afterwards."""
        self._ended.set()
        if self._lock.acquire(timeout=LOOK):
            self._end()

    # -- looking, with the lock ------------------------------------------------------------------------------

    def _release(self) -> None:
        """Release the lock, and end what was closed meanwhile; a thread that has the lock by then does so."""
        self._lock.release()
        if self._ended.is_set() and self._lock.acquire(blocking=False):
            self._end()

    def _end(self) -> None:
        """End the server that is here and the client, then release the lock."""
        try:
            super().close()
            self.client = self._now = None
        finally:
            self._lock.release()

    def _lose(self) -> None:
        """Let go of a server that does not answer; one that is here may still do."""
        if self.client is not None:
            self.client.close()
            self.client = self._now = None
            self._spare.clear()
            self._searching_since = None

    def _end_server(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None

    def _search(self) -> bool:
        """Look for the server once, or become it; returns whether there is one."""
        now = time.monotonic()
        if self._ended.is_set():
            return False
        if self._searching_since is None:
            self._searching_since, self._briefly_until = now, now + _BRIEFLY
        since = self._searching_since
        found, clients = self._look()
        try:
            at = serving.best(found, self._known)
            if at is not None:
                self._use(at, found[at], clients.pop(at))
                return True
            for outdated in serving.outdated(found, self._known):
                with contextlib.suppress(OSError):
                    until = time.monotonic() + PATIENCE
                    clients[outdated].set(_NEWER, b"%d" % self._known, deadline=until)
        finally:
            for client in clients.values():
                client.close()
        self.last = self._addresses.told(found)
        own = [self._addresses.is_own(each) for each in range(len(found))]
        place = serving.to_serve(found, own) if self.serves else None
        if place is None or now - since < _STAGGER * own[:place].count(False):
            return False
        return self._serve(place)

    def _look(self) -> tuple[list[Found], dict[int, TcpClient]]:
        """Look at all addresses; wait for those that are slow where it is not known who has the server."""
        brief = self._slow if time.monotonic() < self._briefly_until else frozenset()
        found, clients = self._addresses.look(busy=LOOK, brief=brief)
        best = serving.best(found, self._known)
        # Where it is the one that was lost just now, or this process has known none, it may be an outdated
        # one that stood still.
        newer = best is not None and found[best].mark != self.found.mark and self._known != serving.NEVER
        if not newer and _slow(found) - brief:
            for client in clients.values():
                client.close()
            found, clients = self._addresses.look(busy=BUSY if best is None else PATIENCE, brief=brief)
            self._briefly_until = time.monotonic() + _BRIEFLY
        self._slow = _slow(found)
        return found, clients

    @property
    def _known(self) -> int:
        return _known.get(str(self.key), serving.NEVER)

    def _use(self, at: int, found: Found, client: TcpClient) -> None:
        if found.mark != self.found.mark:
            self._end_server()
            self._settles = None
            _log.info(
                "the store %s is served at %s, epoch %d", self.key, self._addresses.all[at], found.epoch
            )
        _known[str(self.key)] = max(found.epoch, self._known)
        self._at, self.found = at, found
        self._searching_since = None
        self.client, self._now = client, (client, found)

    def _serve(self, at: int) -> bool:
        """Serve at this address, unless another process does so elsewhere."""
        self._end_server()
        for family, target in self._addresses.targets(at):
            try:
                server = serve_as(self.credentials, family, target, timeout=_SERVING)
            except (OSError, dist.DistError) as error:
                self.last = str(error).partition("\n")[0]
                continue
            client = None
            try:
                deadline = time.monotonic() + ANSWER
                client = TcpClient.connect_as(self.credentials, family, target, deadline=deadline)
                if (opened := self._stand(at, client)) is not None:
                    self._use(at, opened, client)
                    self.server = server
                    return True
            except OSError as error:
                self.last = str(error)
            if client is not None:
                client.close()
            server.close()
            return False
        return False

    def _stand(self, at: int, client: TcpClient) -> Found | None:
        """As a candidate, look at all others; returns what the server is then, or None."""
        client.set(STATE, b"candidate", deadline=time.monotonic() + ANSWER)
        if self.process:
            client.set(PROCESS, self.process.encode(), deadline=time.monotonic() + ANSWER)
        client.ping(deadline=time.monotonic() + ANSWER)
        until = time.monotonic() + _CANDIDATE
        while True:
            # Who has just been silent is not waited for again; a first server looks as closely as it can.
            quick = self._known != serving.NEVER
            found = self._addresses.look_aside(at, quick=quick, brief=self._slow if quick else ())
            what = serving.verdict(at, found, self._known)
            if what is Verdict.YIELD or self._ended.is_set():
                return None
            if what is Verdict.SERVE or time.monotonic() >= until:
                break
            time.sleep(0.02)
        epoch = serving.next_epoch(at, found, self._known, secrets.randbits(32))
        opened = Found(AddressState.OPEN, epoch, secrets.token_hex(8), self.process)
        client.set(STATE, b"open %d %s" % (epoch, opened.mark.encode()), deadline=time.monotonic() + ANSWER)
        client.ping(deadline=time.monotonic() + ANSWER)
        return opened

    # -- the thread ------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        pid, said = os.getpid(), ""
        while not self._ended.wait(_KEEP_EVERY) and os.getpid() == pid:
            try:
                self._keep_once()
            except Exception as error:  # noqa: BLE001, PERF203  (no descriptor is left, say: the next turn tries again)
                if said != (said := f"{type(error).__name__}: {error}"):
                    _log.warning("the store %s is not looked after: %s; tried again", self.key, said)

    def _keep_once(self) -> None:
        with contextlib.suppress(OSError):  # there is none at present
            client, _ = self.current(
                self._silent(), deadline=time.monotonic() + PATIENCE, cancelled=self._ended.is_set
            )
            with registry.lock:
                views = list(self._views)
            for view in views:
                view.keep_up(client, time.monotonic() + PATIENCE)
        if self.server is not None and time.monotonic() - self._looked >= _RIVALS_EVERY:
            self._lock.acquire()
            try:
                self._see_rivals()
            finally:
                self._release()

    def _silent(self) -> TcpClient | None:
        """Return the client if its server does not answer."""
        client = self.client
        if client is None or client.alive(deadline=time.monotonic() + PATIENCE):
            return None
        return client

    def _see_rivals(self) -> None:
        """End the server that is here if another one has followed it; else say whether worlds may begin."""
        client, self._looked = self.client, time.monotonic()
        if client is None or self.server is None:
            return
        found = self._addresses.look_aside(self._at)
        with contextlib.suppress(OSError):
            newer = client.get(_NEWER, deadline=time.monotonic() + PATIENCE) or b""
            if newer.isdigit() and int(newer) > self._known:
                _known[str(self.key)] = int(newer)
        if serving.outranked(self._at, self.found.epoch, found) or self._known > self.found.epoch:
            _log.warning("the store %s is served elsewhere: the older server ends", self.key)
            self._lose()
            self._end_server()
        else:
            if not serving.may_begin(self._at, found):
                self._settles = None
            elif self._settles is None:
                self._settles = self._looked
            begins = self._settles is not None and time.monotonic() - self._settles >= _SETTLED
            with contextlib.suppress(OSError):
                client.set(_BEGAN, b"%d" % begins, deadline=time.monotonic() + PATIENCE)


def _slow(found: list[Found]) -> frozenset[int]:
    return frozenset(at for at, each in enumerate(found) if each.slow)
