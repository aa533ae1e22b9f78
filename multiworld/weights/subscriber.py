"""`Subscriber`: an engine's end of versioned weights."""

from __future__ import annotations

import threading
import time
import uuid
from typing import TYPE_CHECKING

from multiworld import settings
from multiworld._core import durations
from multiworld._core.reraise import as_new
from multiworld._core.weights import Head
from multiworld._join.arguments import make_plan
from multiworld._join.join import join_planned
from multiworld.errors import MultiworldError, StateError, StateTransferError
from multiworld.logs.source import logger
from multiworld.registry import registry
from multiworld.weights import one_end, wire
from multiworld.weights.announcing import FUNCTION, Announcements, present
from multiworld.weights.tensors import load, sizes, summed, whole

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable

    from torch import Tensor
    from torch._C._distributed_c10d import Store

    from multiworld.weights.tensors import Target
    from multiworld.world import World

__all__ = ["Subscriber"]

AGAIN = 0.1
"""Seconds until an engine makes itself known again, when the trainer was lost."""

_log = logger(__name__)


class Subscriber:
    """Keeps a model's weights at the newest version of a `Publisher`.

    A thread makes the engine known to the trainer, and receives versions into memory of its own, as large as
    the weights. `update` puts a version that came whole into the model, in the calling thread. So the weights
    are always those of one version: a transfer that breaks off changes nothing. When it begins anew, also
    with another trainer, the buckets that have come and are still the same are not sent again.

    The engine serves while it is `ready`; if not, it calls `update`, between two requests.

    Args:
        name: as of the publisher.
        target: a module, or tensors by name, with the names, dtypes and whole shapes of the publisher's; or
            a function that takes an iterable of names and tensors, as ``load_weights`` of vLLM's models.
        store: as for the publisher, which serves it, or a function that tells its address.
        seat: the engine's name: one that is started again takes its seat again. None makes one.
        timeout: seconds (or a timedelta) for each join, and for each transfer of a bucket; None takes
            M8D_JOIN_TIMEOUT (30). The publisher has the same.
        hang_timeout: seconds (or a timedelta) without a sign of life after which the trainer is hung; None
            takes M8D_HANG_TIMEOUT (5).

    Attributes:
        seat: the engine's name.
        version: of the weights in the model; None before the first, and after a `target` function has raised.
        digest: of that version: what `multiworld.weights.digest` says of the model as long as nothing else
            changes it, if its names are in the order of the publisher's.
        told: the newest version that the trainer has told of.
        error: why the connection was lost, or could not be made, last; None before that.

    Raises:
        InvalidJoinError: an argument breaks a rule, or this process has a `Publisher` of that name.
    """

    def __init__(
        self,
        name: str,
        target: Target,
        store: str | Store | Callable[[], str] | None = None,
        *,
        seat: str | None = None,
        timeout: float | dt.timedelta | None = None,
        hang_timeout: float | dt.timedelta | None = None,
    ) -> None:
        self.name = name
        self.seat = uuid.uuid4().hex[:12] if seat is None else seat
        self._store = store
        address = FUNCTION if callable(store) else store
        self._plan = make_plan(f"{name}/{self.seat}", 1, 2, address, "gloo", timeout, hang_timeout, None)
        self._target = target
        self.version: int | None = None
        self.told: int | None = None
        self.digest: str | None = None
        self.error: MultiworldError | None = None
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._waiting = 0
        self._world: World | None = None
        self._session = ""  # of what was told last
        self._loaded: tuple[str, int] | None = None
        self._staged: Head | None = None  # whole, in the rooms, and not loaded yet
        self._loading = False  # what is in the rooms; nothing may come into them
        self._rooms: list[Tensor] = []
        self._sums: list[str] = []  # of what is in the rooms; "" where that is not whole
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"m8d-weights-{self.seat}")
        one_end.begin(self)
        try:
            registry.close_at_end(self)
            self._thread.start()
        except BaseException:  # also Ctrl-C: no caller has the subscriber that would give its seat back
            self.close()
            raise

    @property
    def ready(self) -> bool:
        """Whether the model has the newest version that the trainer has told of, whole.

        False in a forked child, which hears of none.
        """
        if one_end.is_forked(self):
            return False
        with self._changed:
            return self._ready()

    @property
    def connected(self) -> bool:
        """Whether the trainer is there. Without it an engine that is ready stays so."""
        return self._world is not None and not one_end.is_forked(self)

    def _ready(self) -> bool:
        return self._loaded is not None and self._loaded == (self._session, self.told)

    def update(self, timeout: float | dt.timedelta | None = None) -> int:
        """Put the newest version that came whole into the model; at once if it has it.

        Args:
            timeout: seconds, or a timedelta, to wait for a version that was told and is not whole yet, or
                for the first one; None takes that of the joins.

        Returns:
            The version of the model's weights.

        Raises:
            TimeoutError: it did not come whole in time. The model has what it had.
            StateError: it does not fit the model, which has what it had.
            Exception: what a `target` function raises. The next call gives it the version again.
            ValueError: this is closed, or was made in the process of which this one was forked.
        """
        one_end.require_own(self)
        seconds = self._plan.timeout if timeout is None else durations.seconds(timeout)
        if seconds is None:
            raise TypeError(f"timeout={timeout!r}: it is a number of seconds, a timedelta, or None")
        deadline = time.monotonic() + min(seconds, settings.MAX_TIMEOUT)
        head: Head | None = None
        try:
            with self._changed:
                head = self._awaited(deadline, seconds)
                if head is None:
                    assert self.version is not None  # noqa: S101  (see there)
                    return self.version
                before = self.version, self.digest, self._loaded
                self._loading = True  # before it changes: an interrupt finds it staged, or being loaded
                self._staged = self.version = self.digest = self._loaded = None
            load(self._target, head, self._rooms)  # without the lock: it may take longer than the timeout
            with self._changed:
                self._loaded = (head.session, head.version)
                self.version, self.digest = head.version, whole(head.entries, head.digests)
                self._loading = False
                self._changed.notify_all()
                return self.version
        except BaseException as error:
            with self._changed:
                if head is not None and self._loading:
                    self._loading = False
                    self._staged = head  # the next call tries again: the trainer does not send it again
                    if isinstance(error, StateError):
                        self.version, self.digest, self._loaded = before
                    self._changed.notify_all()
            raise

    def _awaited(self, deadline: float, seconds: float) -> Head | None:
        """Wait for a version that is whole; None where the model has the newest. `_changed` is held."""
        self._waiting += 1
        try:
            while self._staged is None or self._closed.is_set():
                self._check_open()
                if self._ready() and self.version is not None:
                    return None
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(self._late(seconds))
                self._changed.wait(left)
            return self._staged
        finally:
            self._waiting -= 1
            self._changed.notify_all()

    def close(self, timeout: float = 5.0) -> bool:
        """Leave the trainer, and free everything but the model. Never raises, harmless when repeated.

        Args:
            timeout: seconds.

        Returns:
            Whether all has ended; False when the time ran out (the rest goes on in the background).
        """
        deadline = time.monotonic() + min(timeout, settings.MAX_TIMEOUT)
        if one_end.is_forked(self):  # a thread of the parent's may have had the lock
            return True
        self._closed.set()
        with self._changed:
            world = self._world
            self._changed.notify_all()
        if world is not None:
            world.close(timeout / 2)
        if self._thread.is_alive():  # else it may not have started
            self._thread.join(max(0.0, deadline - time.monotonic()))
        ended = not self._thread.is_alive()
        if ended:
            with self._changed:
                self._staged, self._rooms, self._sums = None, [], []
        return ended

    def _late(self, seconds: float) -> str:
        told = "no version was told" if self.told is None else f"version {self.told} is not whole"
        why = f" The connection's last error: {self.error}" if self.error is not None else ""
        return (
            f"subscriber {self.seat!r} of {self.name!r}: {told} after {seconds:g} s. The trainer publishes "
            f"at the same store, under the same name. Start it, or wait longer.{why}"
        )

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Thread entry point: follow the trainer, and the next one when it is lost."""
        while not self._closed.is_set():
            try:
                self._follow()
            except Exception as error:  # noqa: BLE001  (as no memory for a version: the next one may find some)
                if self._closed.is_set():
                    return
                known = isinstance(error, (MultiworldError, ValueError))
                _log.info("subscriber %r of %r: %s", self.seat, self.name, error, exc_info=not known)
                if not isinstance(error, MultiworldError):
                    text = str(error) or repr(error)
                    error = StateTransferError(self._plan.name, f"subscriber {self.seat!r}: {text}")
                self.error = as_new(error)  # its frames have the world, and what was received
            self._closed.wait(AGAIN)

    def _follow(self) -> None:
        """Join the trainer, and receive versions until it is lost."""
        plan = present(self._plan, self._store)
        announcements = Announcements(
            self.name, plan.store, serve=False, timeout=plan.timeout, cancelled=self._closed.is_set
        )
        try:
            announcements.announce(self.seat)
            world = join_planned(plan, self._closed.is_set)
        finally:
            announcements.close()
        self._world = world
        try:
            while not self._closed.is_set():
                told = wire.receive(world)
                if told.get("kind") == "version":
                    self._take(world, Head.of(told))
        finally:
            self._world = None
            world.close(1.0)

    def _take(self, world: World, head: Head) -> None:
        """Receive what is missing of a version."""
        rooms = [size for _, size in sizes(head)]
        if len(rooms) != len(head.digests):
            raise ValueError(f"version {head.version}: {len(head.digests)} digests for {len(rooms)} buckets")
        with self._changed:
            self._check_open()
            # Before it may come: the engine that loads an older one is not ready with that.
            self._session, self.told = head.session, head.version
        latest = time.monotonic() + self._plan.timeout
        while not self._may_come(rooms, latest):
            wire.send(world, {"busy": True})
        missing = [number for number, each in enumerate(head.digests) if self._sums[number] != each]
        wire.send(world, {"need": missing})
        for _ in missing:
            number = wire.receive_number(world)
            if number < 0:  # another version follows
                return
            if number not in missing:
                raise ValueError(f"bucket {number} came, which was not asked for")
            self._sums[number] = ""
            world.recv(self._rooms[number], 0)
            self._sums[number] = summed(self._rooms[number])
            if self._sums[number] != head.digests[number]:
                raise StateTransferError(
                    world.name,
                    f"version {head.version}: bucket {number} of {len(rooms)} came damaged",
                    rule="Its SHA-256 is the one that was told",
                    next_step="Nothing: it is sent again",
                )
        with self._changed:
            self._staged = head
            self._changed.notify_all()
        wire.send(world, {"got": head.version})

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise ValueError(f"subscriber {self.seat!r} of {self.name!r} is closed")

    def _may_come(self, sizes: list[int], latest: float) -> bool:
        """Make room for a version; False, after a part of the timeout, where it may not come yet."""

        def free() -> bool:
            # Who waits for the version before gets it first, until `latest`: there is always a next one.
            taken = self._staged is not None and self._waiting > 0 and time.monotonic() < latest
            return self._closed.is_set() or not (self._loading or taken)

        with self._changed:
            if not self._changed.wait_for(free, self._plan.timeout / wire.BEATS):
                return False
            self._check_open()
            self._staged = None
            self._fit(sizes)
            return True

    def _fit(self, sizes: list[int]) -> None:
        """Make the rooms as large as a version's buckets; those that are keep what they have."""
        kept = list(zip(self._rooms, self._sums, strict=True))[: len(sizes)]
        kept += [(wire.room(0), "")] * (len(sizes) - len(kept))
        fitting = [
            (room, total) if room.nbytes == size else (wire.room(size), "")
            for (room, total), size in zip(kept, sizes, strict=True)
        ]
        self._rooms, self._sums = [each[0] for each in fitting], [each[1] for each in fitting]
