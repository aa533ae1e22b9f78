"""`Publisher`: the trainer's end of versioned weights."""

from __future__ import annotations

import operator
import threading
import time
import uuid
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from multiworld import settings
from multiworld._core.weights import Entry, Roster
from multiworld._join.arguments import make_plan
from multiworld._join.join import join_planned
from multiworld.errors import (
    InvalidJoinError,
    JoinError,
    JoinTimeoutError,
    MultiworldError,
)
from multiworld.events import State
from multiworld.logs.source import logger
from multiworld.registry import registry
from multiworld.weights import one_end, wire
from multiworld.weights.announcing import FUNCTION, Announcements, present
from multiworld.weights.shelf import Shelf, Version
from multiworld.weights.tensors import BUCKET, buckets, gather

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable

    from torch import Tensor
    from torch._C._distributed_c10d import Store

    from multiworld.weights.tensors import Source
    from multiworld.world import World

__all__ = ["Publisher"]

LOOK_EVERY = 0.05
"""Seconds between two looks at whether engines have come."""
AGAIN = 1.0
"""Seconds until the next look at a store that does not answer."""
JOINS, AGAIN_JOIN = 5, 0.1
"""Joins of an engine's world that fail in a row, and the seconds between two of them."""

_log = logger(__name__)


class Publisher:
    """Publishes versions of a model's weights to all engines that are there, and to those that come later.

    `publish` copies the weights and returns; threads send the copies, one for each engine. So the trainer
    waits for no engine, dead, slow or stopped. An engine that comes gets the newest version; one that is
    slower than the trainer gets whole versions, though not each.

    A name has one publisher at a time, the newest: an older one at the same store closes itself, with an
    error in the log.

    Args:
        name: of these weights: the same on the engines. Their worlds are called "name/engine".
        source: a module, tensors by name, or a function without arguments that returns names and tensors, in
            the same order each time. Sharded tensors (DTensor, as FSDP2's) are put together one after the
            other. The engines have the same names, dtypes and whole shapes.
        store: where engines and trainer meet, as for `multiworld.join`; rank 0's process serves a tcp store.
            Or a function without arguments that returns its present address: it is asked for each connection,
            and the store is served elsewhere. For a store of Ray's, `RayStore.address`.
        rank: of this process among those that train the model together. Rank 0 sends; the others take part
            in `publish`, which puts sharded tensors together.
        timeout: seconds (or a timedelta) for each join, and for each transfer of a bucket; None takes
            M8D_JOIN_TIMEOUT (30).
        hang_timeout: seconds (or a timedelta) without a sign of life after which an engine is hung; None
            takes M8D_HANG_TIMEOUT (5).
        bucket_bytes: of the tensors in one message, at most. It bounds what a transfer loses when it is cut.
        versions: in the trainer's memory, at most, 2 or more: the newest, and older ones while they are sent.
            While `publish` copies, there is one more: to wait until one is free would hold up the trainer.

    Raises:
        InvalidJoinError: an argument breaks a rule, or this process has a `Subscriber` of that name.
        StoreBindError, StoreUnreachableError: the store cannot be served, or does not answer.
        TypeError: `bucket_bytes` or `versions` is no integer.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        store: str | Store | Callable[[], str] | None = None,
        *,
        rank: int = 0,
        timeout: float | dt.timedelta | None = None,
        hang_timeout: float | dt.timedelta | None = None,
        bucket_bytes: int = BUCKET,
        versions: int = 3,
    ) -> None:
        bucket_bytes, versions = operator.index(bucket_bytes), operator.index(versions)
        if bucket_bytes < 1024 or versions < 2 or rank < 0:
            raise InvalidJoinError(
                name,
                f"publisher {name!r}: bucket_bytes={bucket_bytes}, versions={versions}, rank={rank}",
                rule="Buckets have 1024 bytes or more, 2 or more versions are kept, and ranks begin at 0",
                next_step="Leave them out, or give larger ones",
            )
        self.name = name
        self._store = store
        address = FUNCTION if callable(store) else store
        self._plan = make_plan(name, 0, 2, address, "gloo", timeout, hang_timeout, None)
        self._source = source
        self._rank = rank
        self._bucket = bucket_bytes
        self._session = uuid.uuid4().hex
        self._closed = threading.Event()
        self._shelf = Shelf(versions, self._closed.is_set)
        self._roster = Roster()
        self._has: dict[str, int] = {}
        self._worlds: dict[str, World] = {}
        self._threads: list[threading.Thread] = []
        if rank == 0:
            one_end.begin(self)
            try:
                self._engines_list = self._open()
            except BaseException:
                self._closed.set()  # its error may be kept, and this with it: no end of these weights
                raise
            try:
                self._engines_list.claim(self._session)
                registry.close_at_end(self)
                self._start(self._look, "list")
            except BaseException:  # also Ctrl-C: no caller has the publisher that would close it
                self.close()
                self._engines_list.close()
                raise

    @property
    def version(self) -> int | None:
        """That was published last; None before the first. Only rank 0 knows whether rank 0 failed."""
        return None if self._shelf.last < 0 else self._shelf.last

    @property
    def engines(self) -> dict[str, int]:
        """The engines that are connected, with the version that each has whole; -1 for none yet."""
        with self._shelf.changed:
            return dict(self._has)

    def publish(self, version: int) -> None:
        """Publish the weights as they are now. They may be changed when this has returned.

        Where tensors are sharded, all ranks of their mesh call this together. The time is that of copying the
        weights into the host's memory; no engine is waited for.

        Args:
            version: an integer, larger than the last one, and 0 or more; the same on all ranks. Where a
                publish failed on any rank, rank 0 may have published it. All ranks call this again then, with
                a larger version, which is always taken; rank 0 refuses the same one if it has published it.

        Raises:
            ValueError: it is not, or this is closed: all ranks have taken part then. Or this was made in the
                process of which this one was forked.
            TypeError: it is no integer, as 1.5.
            StateError: a weight is no tensor, or none that is dense (a sparse or quantized one).
            BrokenWorldException: a rank that trains was lost while the shards were put together. Where rank 0
                raises it, nothing was published.
        """
        one_end.require_own(self)
        version = operator.index(version)  # also numpy's, of which an engine could be told nothing
        # Rank 0 alone knows whether it failed last time, or was closed by a newer publisher. So the others
        # take part in both, and it does, too.
        closed, again = self._closed.is_set(), version == self._shelf.last
        if version < max(0, self._shelf.last):
            raise self._not_risen(version)
        with torch.no_grad():
            if self._rank or again or closed:
                # Takes part in putting the shards together, and keeps none: a loop's variable would.
                deque(gather(self._source), maxlen=0)
            elif not self._shelf.put(self._copied(version)):
                again = True
        if closed:
            raise ValueError(f"publisher {self.name!r} is closed. Make another one.")
        if self._rank:
            self._shelf.last = version
        elif again:
            raise self._not_risen(version)

    def _not_risen(self, version: int) -> ValueError:
        return ValueError(f"version {version} after {self._shelf.last}. Versions rise, from 0 on.")

    def wait(self, engines: int = 1, timeout: float = 30.0) -> int:
        """Wait until so many engines have the version that was published last.

        Args:
            engines: how many.
            timeout: seconds.

        Returns:
            How many have it, which may be fewer: an engine that has left does not count any more.

        Raises:
            ValueError: this was made in the process of which this one was forked.
        """
        one_end.require_own(self)

        def having() -> int:
            return sum(each >= self._shelf.last for each in self._has.values())

        seconds = min(timeout, settings.MAX_TIMEOUT)
        with self._shelf.changed:
            self._shelf.changed.wait_for(lambda: having() >= engines or self._closed.is_set(), seconds)
            return having()

    def close(self, timeout: float = 5.0) -> bool:
        """Leave all engines, and free everything. Never raises, harmless when repeated.

        Args:
            timeout: seconds.

        Returns:
            Whether all has ended; False when the time ran out (the rest goes on in the background).
        """
        deadline = time.monotonic() + min(timeout, settings.MAX_TIMEOUT)
        if one_end.is_forked(self):  # a thread of the parent's may have had the lock
            return True
        self._closed.set()
        with self._shelf.changed:
            worlds = list(self._worlds.values())
            # A thread that closes this itself is not waited for.
            others = set(self._threads) - {threading.current_thread()}
            threads = [each for each in others if each.is_alive()]
            self._shelf.changed.notify_all()
        self._shelf.clear()
        for world in worlds:
            world.close(max(0.0, min(1.0, deadline - time.monotonic())))
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _copied(self, version: int) -> Version:
        entries: list[Entry] = []
        rooms: list[Tensor] = []
        for entries, room in buckets(self._source, self._bucket, self._shelf.rooms()):  # noqa: B007  (the last)
            rooms.append(room)
        return Version(self._session, version, self._bucket, entries, rooms)

    def _open(self) -> Announcements:
        plan = present(self._plan, self._store)
        return Announcements(
            self.name,
            plan.store,
            serve=not plan.served,
            timeout=plan.timeout,
            cancelled=self._closed.is_set,
        )

    # -- threads ---------------------------------------------------------------------------------------------

    def _start(self, function: Callable[..., None], name: str, *arguments: object) -> None:
        thread = threading.Thread(
            target=function,
            args=arguments,
            daemon=True,
            name=f"m8d-weights-{name}",
        )
        with self._shelf.changed:
            # Before it starts: Ctrl-C may come when it has.
            self._threads = [each for each in self._threads if each.is_alive()] + [thread]
            thread.start()

    def _look(self) -> None:
        """Thread entry point: begin to serve each engine that comes."""
        while not self._closed.wait(LOOK_EVERY):
            try:
                newest = self._engines_list.holder(self._session) == self._session
                seats = self._engines_list.take() if newest else []
            except Exception as error:  # noqa: BLE001  (else no engine would be served any more)
                known = isinstance(error, JoinError)
                _log.warning("publisher %r: %s", self.name, error, exc_info=not known)
                if self._closed.wait(AGAIN):
                    break
                self._reopen()
                continue
            if not newest:
                _log.error("publisher %r is closed: a newer one of that name has begun", self.name)
                self.close()
                break
            with self._shelf.changed:
                fresh = self._roster.announced(seats)
            for seat in fresh:
                self._begin_to_serve(seat)
        self._engines_list.close()

    def _begin_to_serve(self, seat: str) -> None:
        try:
            self._start(self._serve, seat, seat)
        except RuntimeError as error:  # no thread can be had: the engine makes itself known again
            _log.warning("publisher %r, engine %r: %s", self.name, seat, error)
            with self._shelf.changed:
                self._roster.ended(seat)

    def _reopen(self) -> None:
        try:
            found = self._open()
        except Exception as error:  # noqa: BLE001  (the next look tries again)
            known = isinstance(error, MultiworldError)
            _log.warning("publisher %r: %s", self.name, error, exc_info=not known)
            return
        self._engines_list.close()
        self._engines_list = found

    def _serve(self, seat: str) -> None:
        """Thread entry point: send one engine what is new, until it is lost."""
        again = True
        while again:
            try:
                self._serve_once(seat)
            finally:
                with self._shelf.changed:
                    again = self._roster.ended(seat) and not self._closed.is_set()

    def _notify(self, _world: World) -> None:
        """A world broke: its thread looks again."""
        with self._shelf.changed:
            self._shelf.changed.notify_all()

    def _serve_once(self, seat: str) -> None:
        try:
            world = self._joined(seat)
            if world is not None:
                self._follow(seat, world)
        except Exception as error:  # noqa: BLE001  (the engine makes itself known again)
            known = isinstance(error, (MultiworldError, ValueError))
            _log.info("publisher %r, engine %r: %s", self.name, seat, error, exc_info=not known)

    def _joined(self, seat: str) -> World | None:
        """Join an engine's world; None where it does not come, or this is closed.

        An engine waits in its join for its whole timeout, so a join that fails here earlier is made again.
        """
        plan = replace(self._plan, name=f"{self.name}/{seat}")
        for _ in range(JOINS):
            try:
                return join_planned(present(plan, self._store), self._closed.is_set)
            except JoinTimeoutError:
                raise
            except JoinError as error:
                _log.info("publisher %r, engine %r: %s", self.name, seat, error)
            if self._closed.wait(AGAIN_JOIN):
                break
        return None

    def _follow(self, seat: str, world: World) -> None:
        """Send what is new until the engine is lost, or this is closed."""
        with self._shelf.changed:
            self._worlds[seat], self._has[seat] = world, -1
        try:
            world.on_break(self._notify)
            while not self._closed.is_set():
                version = self._shelf.take(
                    self._has[seat], self._plan.timeout / wire.BEATS, lambda: world.state is not State.ACTIVE
                )
                if version is None:
                    wire.send(world, {"kind": "idle"})
                    continue
                try:
                    whole = self._send(world, version)
                finally:
                    self._shelf.done(version)
                if whole:
                    with self._shelf.changed:
                        self._has[seat] = version.number
                        self._shelf.changed.notify_all()
        finally:
            with self._shelf.changed:
                del self._worlds[seat], self._has[seat]
            world.close(1.0)

    def _send(self, world: World, version: Version) -> bool:
        """Send what the engine lacks of a version; return False if the transfer was cut."""
        while (head := version.head(self._plan.timeout / wire.BEATS)) is None:
            if version.cut.is_set():
                return False
            wire.send(world, {"kind": "idle"})
        wire.send(world, head.told())
        with self._shelf.waiting(version):
            while (said := wire.receive(world)).get("busy"):
                continue
        need, there = said.get("need"), len(head.digests)
        if not isinstance(need, list) or not all(each in range(there) for each in need):
            raise ValueError(f"an engine asked for buckets {need!s:.80} of {there}")
        for number in need:
            if version.cut.is_set():
                wire.send_number(world, -1)
                return False
            wire.send_number(world, number)
            world.send(version.rooms[number], 1)
        return wire.receive(world).get("got") == version.number
