"""gloo groups of a world: built so that their sockets are known, and ended by shutting those down.

Every gloo group that is made while a world is selected goes through here: the world's own and those that user
code makes (`new_group`, DeviceMesh), because `install` replaces the name `ProcessGroupGloo` in torch's
module. They listen on the interface that leads to the store, on devices that worlds share (`devices.py`), and
hear only the members of a group that is being built (`listeners.py`).
"""

from __future__ import annotations

import contextlib
import datetime as dt
import socket
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch.distributed
import torch.distributed.distributed_c10d as c10d

from multiworld import settings
from multiworld._c10d.gloo import devices, lane_only, listeners, sockets, unblocking
from multiworld._c10d.last_holder import last_holder
from multiworld._c10d.routing import selection
from multiworld._c10d.routing.error_owner import guessed
from multiworld._core.reraise import raise_instead
from multiworld._net.host_address import LOOPBACK
from multiworld._net.stores.torchstore import PollingStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import ProcessGroup, Store

    from multiworld._c10d.monkeypatch import Patches
    from multiworld._c10d.routing.state import WorldState

    class GlooOptions:
        """Options of a ProcessGroupGloo, by the names that all versions of torch have."""

        _devices: list[devices.Device]
        _threads: int
        _timeout: dt.timedelta

    class TorchGloo:
        """ProcessGroupGloo, of which torch's own stub leaves out what is used here."""

        _Options: Callable[[], GlooOptions]

        def __init__(self, store: Store, rank: int, size: int, options: GlooOptions) -> None: ...

        @staticmethod
        def create_device(**where: str | bool) -> devices.Device: ...


__all__ = ["GlooGroup", "GlooWorld", "install", "of"]

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W")

_DistBackendError: type[RuntimeError] = getattr(torch.distributed, "DistBackendError", RuntimeError)

THREADS = (2, 1)
"""Worker threads of a group: torch's own default for the first `FEW` groups of a process, then one.

With two, a collective that waits for a slow member does not hold up the next one, and DDP's buckets overlap:
1.1 to 1.8 times as fast for several at a time, 2 members, 64 KB to 16 MB. Who has many worlds overlaps them
anyway."""

FEW = 4
"""Groups."""

_TURN = 0.02
"""Seconds between two looks at whether a group that is being built was cancelled."""


class GlooGroup:
    """One gloo backend and what it owns.

    Attributes:
        backend: the ProcessGroupGloo; None once it was let go.
        links: the sockets of its pairs.
        target: what is to be ended after `shut`.
        group: the process group it is of, once that is there.
    """

    def __init__(
        self,
        backend: object,
        store: PollingStore,
        own: set[sockets.Address],
        members: set[sockets.Address],
        lease: devices.Lease,
        workers: tuple[tuple[unblocking.GroupThread, ...], int] = ((), 0),
    ) -> None:
        self.backend: object = backend
        self.store = store
        self.lease = lease
        self.links, self._listeners = sockets.find(own, members)
        self._spare = sockets.spare()
        self.target = unblocking.Target(self.links, *workers)
        self.group: weakref.ref[ProcessGroup] | None = None

    def shut(self) -> None:
        """Let every pending and every later operation raise."""
        sockets.shut(self.links)

    def drop(self) -> None:
        """Let go of the backend; of one that user code holds once that has let go of it."""
        if not self.lease.give_back():
            self._listeners = ()  # they are other groups' too
        backends, self.backend, self._spare = [self.backend], None, None
        last_holder.let_go(backends.pop(), self.group)

    @property
    def gone(self) -> bool:
        """Whether all its sockets are closed, which gloo does in the destructors. Asked after `drop`."""
        return not sockets.still_open((*self.links, *self._listeners))


class GlooWorld:
    """The gloo groups of one world and generation in this process.

    Args:
        name: of the world.
        host: numeric address to listen at; GLOO_SOCKET_IFNAME overrides it.
        timeout: seconds an operation may take.
        check: called while a group is being built; raises to give up.
        secure: whether gloo may not connect, see `lane_only`.

    Attributes:
        joining: until `joined`: who joins says when all members' groups stand, so they may be on shared
            devices.
        exchange: until `joined`, the store for addresses instead of the one that `build` is given, if any.
    """

    def __init__(
        self, *, name: str, host: str, timeout: float, check: Callable[[], None], secure: bool = False
    ) -> None:
        self.name = name
        self.host = host
        self.secure = secure
        self.timeout = timeout
        self.check = check
        self.joining = True
        self.exchange: Store | None = None
        self.aborted = False
        # Python's part of a store ends with its last reference in Python, despite references in C++.
        self.kept: list[Store] = []
        # Each access is one step of the interpreter's, without a lock: a garbage collection may call
        # `release` in the middle of any other method, in the same thread.
        self._groups: dict[GlooGroup, None] = {}
        self._posted = unblocking.Posted()

    def verify(self) -> None:
        """Raise where this world's groups were ended.

        Raises:
            torch.distributed.DistBackendError: they were.
        """
        if self.aborted:
            raise _DistBackendError("multiworld: the groups of this world were aborted")
        self.check()

    def build(self, store: Store, rank: int, size: int, timeout: dt.timedelta | None = None) -> object:
        """Build a ProcessGroupGloo.

        Args:
            store: where the members meet, prefixed for this group.
            rank: in the group.
            size: of the group.
            timeout: of its operations; the world's if None.

        Raises:
            Exception: what `check` raised.
            RuntimeError: torch's or gloo's.
        """
        raised: list[BaseException] = []
        left = threading.Event()

        def check() -> None:
            try:
                self.verify()
            except BaseException as error:
                # Not in a thread that was given up: its frames hold the device, and `raised`.
                if not left.is_set():
                    raised.append(error)
                raise

        def turn() -> None:
            check()
            if not self.joining:  # a member whose group stands may send before all others' stand
                gate.relieve()

        limit = dt.timedelta(seconds=self.timeout) if timeout is None else timeout
        if self.secure and size > 1:
            self.verify()
            return lane_only.stand_in(self.name, rank, size, limit)
        gate = listeners.Gate(size)
        if self.exchange is not None:
            store = self.exchange
        polling = PollingStore(store, check_cancelled=check, timeout=self.timeout, publishing=gate.open)
        lease = devices.pool.take(self._where(), _make, self.verify, shared=self.joining, order=self.name)
        try:
            polling.set_timeout(limit)
            options, before = _options(lease, limit), unblocking.threads()
            backend = _run(
                lambda: _original(polling, rank, size, options),
                turn,
                lambda: _wake(list(polling.written.values()), size),
            )
            polling.recording = False
            # One that is alone has no pairs, and publishes none.
            own, members = (
                _addresses(each) if size > 1 else set() for each in (polling.written, polling.read)
            )
            workers = unblocking.workers_of(backend, before, options._threads) if size > 1 else ((), 0)
            group = GlooGroup(backend, polling, own, members - own, lease, workers)
            gate.close(group.links)
        except BaseException as error:
            lease.give_back()
            # C++ may have made a plain RuntimeError of it on the way.
            if raised and error is not raised[-1]:
                raise raised.pop() from error
            raise
        finally:
            left.set()
            raised.clear()
            gate.close()
        self._groups[group] = None
        if (fresh := getattr(_made, "groups", None)) is not None:
            fresh.append(group)
        if self.aborted:
            self.abort()
        return backend

    def groups(self) -> tuple[GlooGroup, ...]:
        """Return the groups that were not let go."""
        # Not a tuple at once: that is allocated after the iteration has begun, and may begin a collection.
        listed = list(self._groups)
        return tuple(listed)

    def abort(self) -> None:
        """Let all pending and later operations of all groups raise. Any thread, any time, microseconds."""
        self.aborted = True
        groups = self.groups()
        for group in groups:
            group.shut()
        unblocking.unblock([group.target for group in groups], self._posted)

    def posted(self, work: W) -> W:
        """A send or a receive of one of these groups was posted in this thread; returns it.

        Between the operations of a batch NCCL gives none.
        """
        if work is not None:
            self._posted.add(work)
        if self.aborted:  # perhaps too late to be told with the others
            self.abort()
        return work

    def take(self, groups: tuple[GlooGroup, ...] | None = None) -> tuple[GlooGroup, ...]:
        """Take groups out of the books, all of them if not told which; the caller drops them."""
        wanted = self.groups() if groups is None else groups
        return tuple(each for each in wanted if self._groups.pop(each, self) is None)

    def release(self, groups: tuple[GlooGroup, ...]) -> None:
        """Let go of groups whose process group is about to end: behind it, in a thread of its own."""
        taken = self.take(groups)
        if taken:
            _left.append(taken)  # where the host has no thread left for this process: with the next one
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=_let_go, name="m8d-release", daemon=True).start()

    def joined(self) -> None:
        """All members' groups are built: their devices are free for other worlds."""
        self.joining, self.exchange = False, None
        for group in self.groups():
            group.lease.connected()

    def _where(self) -> devices.Where:
        if self.secure:  # a group of one: it listens, and has none to hear
            return (("hostname", LOOPBACK),)
        names = [each for each in (settings.environment("GLOO_SOCKET_IFNAME") or "").split(",") if each]
        return tuple(("interface", each) for each in names) or (("hostname", self.host),)


def _options(lease: devices.Lease, timeout: dt.timedelta) -> GlooOptions:
    made = _original._Options()
    made._devices = lease.devices
    made._threads = settings.load().gloo_threads or THREADS[lease.among > FEW]
    made._timeout = timeout
    return made


def _make(where: devices.Where) -> list[devices.Device]:
    """Make gloo's devices, one for each place to listen at."""
    # Connections made later would not be among the group's known sockets.
    extra = {"lazy_init": False} if "lazy_init" in (_original.create_device.__doc__ or "") else {}
    made = [_original.create_device(**{kind: name}, **extra) for kind, name in where]
    for each in made:
        _deafen(each)
    return made


class _FoundError(Exception):
    """Ends the construction of a group that is built only to be told where its device listens."""


def _deafen(device: devices.Device) -> None:
    """Drop all packets at a new device. Its address is known only from what its groups publish."""
    found: list[sockets.Address] = []

    def publishing(value: bytes) -> None:
        address = listeners.address_of(value)
        if address is not None:
            found.append(address)
        raise _FoundError

    options = _original._Options()
    options._devices, options._threads = [device], 1
    options._timeout = dt.timedelta(seconds=1)
    polling = PollingStore(_hash_store(), timeout=1.0, publishing=publishing)
    with contextlib.suppress(_FoundError, RuntimeError):  # C++ may have made another of it on the way
        _original(polling, 0, 2, options)
    for address in found:
        listeners.deafen(address)


# None where torch was built without gloo: `install` does nothing then, and nothing else asks for it.
_original = cast("type[TorchGloo]", getattr(c10d, "ProcessGroupGloo", None))
# Exported without saying so to type checkers.
_hash_store: Callable[[], Store] = vars(torch.distributed)["HashStore"]
_made = threading.local()  # .groups: those that were built by the call of torch under way in this thread


def of(state: WorldState, world: GlooWorld | None = None) -> GlooWorld | None:
    """Return the gloo groups of a WorldState; `world` sets them."""
    # In the state itself: it and its groups refer to each other, and so end together.
    if world is not None:
        state.gloo = world
    return cast("GlooWorld | None", state.gloo)


class _Routed(type):
    """Stands for ProcessGroupGloo: makes a world's groups in a world, and torch's own elsewhere."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        state = selection.current()
        world = None if state is None else of(state)
        # An options object says everything; a group that can be reconfigured connects later. Both stay
        # torch's.
        told = (
            len(args) > 4 or "options" in kwargs or (len(args) == 4 and not isinstance(args[3], dt.timedelta))
        )
        own = told or kwargs.get("enable_reconfigure", False)
        if world is not None and world.secure and own:
            raise lane_only.refusal(
                world.name, "a gloo group with options of its own makes its own connections"
            )
        if world is None or own:
            return _original(*args, **kwargs)
        kwargs.pop("enable_reconfigure", None)
        return world.build(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _original) or lane_only.is_stand_in(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _original)

    def __getattr__(cls, name: str) -> object:
        return getattr(_original, name)


class _Gloo(metaclass=_Routed):
    """torch's ProcessGroupGloo, while multiworld routes torch.distributed."""


def install(patches: Patches) -> None:
    """Put the stand-in in torch's place.

    Args:
        patches: the router's, which undoes them.
    """
    if _original is None:
        return
    patches.set(c10d, "ProcessGroupGloo", _Gloo)
    lane_only.install(patches)
    patches.set(c10d, "_new_process_group_helper", _watching(c10d._new_process_group_helper))


def _watching(original: Callable[P, T]) -> Callable[P, T]:
    """Notice when a process group made in a world is gone, to let go of its backends after it."""

    def new_process_group_helper(*args: P.args, **kwargs: P.kwargs) -> T:
        state = selection.current()
        world = None if state is None else of(state)
        if world is None:
            return original(*args, **kwargs)
        if world.secure:
            _only_secure(world, kwargs["backend"] if "backend" in kwargs else args[3])
        outer, _made.groups = getattr(_made, "groups", None), []
        try:
            made = original(*args, **kwargs)
            fresh = tuple(_made.groups)
        except BaseException as error:
            # A part of a group is no group.
            world.release(tuple(_made.groups))
            # Who joins explains it.
            asked = None if world.joining or not isinstance(error, Exception) else state
            try:
                raise_instead(error, guessed(error, asked))
            finally:
                # A kept exception has this frame, and must not keep the world.
                del args, kwargs, state, world, asked
        finally:
            _made.groups = outer
        group = made[0] if isinstance(made, tuple) else made
        if fresh and isinstance(group, c10d.ProcessGroup):
            for each in fresh:
                each.group = weakref.ref(group)
            weakref.finalize(group, world.release, fresh).atexit = False
        return made

    return new_process_group_helper


def _only_secure(world: GlooWorld, backend: object) -> None:
    """Raise where a group would connect without TLS, and may not."""
    parts = {part.rpartition(":")[2].strip().lower() for part in str(backend).split(",")}
    if plain := sorted(parts - {"gloo", "undefined", "", *settings.load().tls_plain}):
        raise lane_only.refusal(world.name, f"a group of {', '.join(plain)} makes its own connections")


def _addresses(published: dict[str, bytes]) -> set[sockets.Address]:
    """Read what gloo published, one value per rank (its last part is the rank) and device."""
    found = {
        sockets.parse_address(value) for key, value in published.items() if key.rpartition("/")[2].isdigit()
    }
    if None in found:
        raise _DistBackendError("multiworld cannot read the addresses that this version of gloo publishes")
    return {each for each in found if each is not None}


def _run(build: Callable[[], T], check: Callable[[], None], wake: Callable[[], None]) -> T:
    """Run what blocks in C++ on a thread of its own, so that the caller can give up.

    Raises:
        BaseException: what `build` or `check` raised. When `check` did, gloo is woken; the thread ends with
            it.
    """
    box: list[T] = []
    failed: list[BaseException] = []
    done, abandoned = threading.Event(), threading.Event()

    def work() -> None:
        try:
            made = build()
            if not abandoned.is_set():  # otherwise no caller takes it
                box.append(made)
        except BaseException as error:  # raised where it is waited for
            if not abandoned.is_set():
                failed.append(error)
        finally:
            done.set()

    # The thread is free of the caller's selected world: gloo's constructor asks nothing of torch.distributed.
    thread = threading.Thread(target=work, name="m8d-connect", daemon=True)
    thread.start()
    try:
        while not done.wait(_TURN):
            check()
        thread.join()
        if failed:
            raise failed.pop()  # noqa: TRY301  (it goes the way of those that check() raises)
        return box.pop()
    except BaseException:
        abandoned.set()
        if not done.is_set():
            wake()
            done.wait(_WAKING)
        raise
    finally:
        # An exception holds these frames by its traceback: it must not be held by them.
        failed.clear()
        box.clear()


_WAKING = 0.5
"""Seconds that a cancelled constructor has to come back; a thread of its own goes on after that, until gloo's
timeout."""


def _wake(published: list[bytes], size: int) -> None:
    """Let a constructor return that waits for members to connect: connect in their place, and hang up.

    gloo's listener gives a connection to the pair whose number it says first; the numbers are the last part
    of what the device published, 8 bytes per rank.
    """
    for value in published:
        address = sockets.parse_address(value)
        if address is None:
            continue
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        for at in range(len(value) - 8 * size, len(value), 8):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as caller:
                caller.settimeout(_WAKING)
                caller.connect(address)
                caller.sendall(value[at : at + 8])


def _let_go() -> None:
    time.sleep(_BEHIND)
    while _left:
        with contextlib.suppress(IndexError):  # another thread was faster
            for group in _left.popleft():
                group.drop()


_left: deque[tuple[GlooGroup, ...]] = deque()
"""Groups to be let go of. A garbage collection may release some in the middle of anything, locks held."""

_BEHIND = 0.02
"""Seconds after which a process group that is being destroyed is gone: its backends go after it."""
