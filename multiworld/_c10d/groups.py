"""Build, abort and close the process group of one world and generation."""

from __future__ import annotations

import contextlib
import datetime as dt
import gc
import math
import threading
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed.distributed_c10d as c10d

from multiworld._c10d import capabilities, fault_classification
from multiworld._c10d.gloo import backend as gloo
from multiworld._c10d.gloo import lane_only
from multiworld._c10d.last_holder import backends_in, last_holder
from multiworld._c10d.nccl import backend as nccl
from multiworld._c10d.nccl import coalescing, inflight
from multiworld._c10d.routing import selection
from multiworld._net.stores.torchstore import PollingStore
from multiworld.errors import BackendError, JoinAbandonedError, JoinTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import ProcessGroup, Store

    from multiworld._c10d.group_spec import GroupSpec
    from multiworld._c10d.late_group import LateGroup
    from multiworld._c10d.routing.state import WorldState

__all__ = ["Group", "backends", "build", "check_backend", "may_be_late"]

_SETTLE = 0.25
"""Seconds to wait for gloo to close its sockets. Longer is no use: then user code holds a Work or a group of
it."""


_REASON = 1.0
"""Seconds to learn why a connection broke while the group was being built: what an interrupted member takes,
on a machine that is busy, from the end of its connections to the store."""


def build(spec: GroupSpec, state: WorldState, *, late: bool = False) -> Group:
    """Build the default group of a world; everyone in it does so at the same time.

    The group is registered in `state`, which the router selects for ``with world:``.

    Args:
        spec: of the group.
        state: of the world.
        late: do not make it now, but by `Group.make`.

    Raises:
        BackendError: it could not be built.
        JoinAbandonedError: a member went away meanwhile.
        JoinTimeoutError: the others did not come in time.
        Exception: what `spec.check_cancelled` raised.
    """
    group = Group(spec, state)
    if not late:
        group.make()
    return group


def may_be_late(backend: str) -> bool:
    """Whether a world's default group may be made when an operation needs it: plain gloo, no checks around it."""
    detail = c10d.get_debug_level() == c10d.DebugLevel.DETAIL
    return backend.strip().lower() in {"gloo", "cpu:gloo"} and not detail


class _While:
    """`check_cancelled` for as long as the group is being built; nothing to check afterwards."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check: Callable[[], None] | None = check
        self.raised: BaseException | None = None

    def __call__(self) -> None:
        if self._check is None:
            return
        try:
            self._check()
        except BaseException as error:
            self.raised = error
            raise

    def ask_why(self, seconds: float) -> None:
        """Wait for the reason of an error: a crashed member, or one that gave up. Asks once in any case.

        A check that raises inside the store reaches this thread as gloo's RuntimeError with its text.
        """
        end = time.monotonic() + seconds
        with contextlib.suppress(BaseException):  # kept in `raised`
            while self.raised is None:
                self()
                if time.monotonic() >= end:
                    return
                time.sleep(0.01)

    def over(self) -> None:
        self._check = None


def _default_group(
    spec: GroupSpec, state: WorldState, world: gloo.GlooWorld, alive: Callable[[], None]
) -> ProcessGroup:
    blocking = nccl.is_nccl(spec.backend)
    store: Store = spec.store
    if not blocking:
        store = PollingStore(spec.store, check_cancelled=alive, timeout=spec.timeout)
    world.kept += [spec.store] if blocking else [store, spec.store]  # sub-groups meet there too
    traffic = _traffic(spec, state) if blocking else None

    def make() -> ProcessGroup:
        nonlocal store
        if traffic is not None:
            if spec.fresh_store is not None:
                # torch waits without a limit for a server that stands still.
                store = spec.fresh_store()
            with traffic.call():  # raises where this was given up meanwhile
                pass
            nccl.wake()
        made = c10d._new_process_group_helper(
            spec.size,
            spec.rank,
            [],
            c10d.Backend(spec.backend),
            store,
            group_name=c10d._process_group_name([], use_hashed_name=False),
            timeout=dt.timedelta(seconds=spec.timeout),
            device_id=None if traffic is None else traffic.device,
        )
        group: ProcessGroup = made[0] if isinstance(made, tuple) else made
        if traffic is not None:
            nccl.connect(group, traffic)
        return group

    if traffic is None:
        return make()
    try:
        group: ProcessGroup = nccl.cancellable(make, alive, spec.rank)
    except BaseException:
        traffic.abort([])  # what is left behind in a thread comes to its end
        raise
    traffic.ready = True
    return group


def _traffic(spec: GroupSpec, state: WorldState) -> inflight.Traffic:
    from multiworld._c10d.routing import router  # noqa: PLC0415  (it imports what this imports)

    router.install_nccl()
    decision = capabilities.decide_nccl(capabilities.nccl_name(spec.backend) or "nccl")
    traffic = state.traffic = inflight.Traffic(
        timeout=spec.timeout,
        device=nccl.bound_device(spec),
        fragile=decision.fragile,
        torch_aborts=decision.torch_aborts,
        abort_returns=decision.abort_returns,
    )
    return traffic


def backends() -> tuple[str, ...]:
    """Name the backends that this torch can build here."""
    names = [name for name in c10d.Backend.backend_list if name != "undefined" and _available(name)]
    return tuple(dict.fromkeys(names))


def _available(name: str) -> bool:
    ask = getattr(c10d, f"is_{name}_available", None)
    if name == "fake":  # torch lists it, and its own module has to be imported for it
        return name.upper() in c10d.Backend._plugins
    return True if ask is None else bool(ask())


def check_backend(world: str, backend: str, device: torch.device | None) -> None:
    """Check, without the other members, that this process can build a world's backend.

    Args:
        world: its name, for the error.
        backend: as in `GroupSpec`.
        device: as in `GroupSpec`.

    Raises:
        BackendError: this torch has no such backend, or it is NCCL and finds no GPU.
    """
    register = getattr(
        c10d.Backend, "_ensure_backend_registered", None
    )  # torch 2.14: some only when asked for
    for part in backend.split(","):
        name = part.rpartition(":")[2].strip().lower()
        if register is not None:
            register(name)
        if name == "undefined" or name not in c10d.Backend.backend_list or not _available(name):
            raise BackendError(
                world,
                f"backend={backend!r}",
                rule=f"This torch ({torch.__version__}) can build: {', '.join(backends())}",
                next_step="Choose one of them, or register it with torch.distributed.Backend.register_backend",
            )
    if nccl.is_nccl(backend):
        nccl.check_gpu(world, backend, device)


def _explained(spec: GroupSpec, error: Exception) -> Exception:
    fault = fault_classification.classify(error)
    text = str(error).splitlines()[0] if str(error) else repr(error)
    if fault is not None and fault.timeout:
        return JoinTimeoutError(
            spec.world,
            f"The {spec.backend} group was not connected within {spec.timeout:g} s: {text}",
            rule="Every member connects to every other before the timeout",
            next_step="See that no firewall is between the members, and that GLOO_SOCKET_IFNAME fits if it is set",
        )
    if fault is not None:
        return JoinAbandonedError(
            spec.world,
            f"A member went away while the {spec.backend} group was being connected: {fault.detail}",
            rule="Every member stays until the world is joined",
            next_step="Look at the other members' errors, and join again",
        )
    return BackendError(
        spec.world,
        f"The {spec.backend} group could not be built: {text}",
        rule="Every member can reach every other on the interface that leads to the store",
        next_step="See the cause of this error; GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME choose another interface",
    )


def _undo(state: WorldState, world: gloo.GlooWorld) -> None:
    world.aborted = True
    groups = world.take()
    for group in groups:
        group.shut()
    # No other references to the group exist: maps first, which hold its process groups, then the backends.
    state.forget()
    for group in groups:
        group.drop()


class Group:
    """The process group of a world, and its sub-groups.

    Args:
        spec: of the default group, which `make` makes.
        state: what the router selects for this world.

    Attributes:
        pg: the default group, a torch ProcessGroup; None before it is made, and once closed.
        state: as given.
        secure: see `GroupSpec`.
        late: makes `pg` when it is needed; None where it was made at once.
    """

    def __init__(self, spec: GroupSpec, state: WorldState) -> None:
        self.pg: ProcessGroup | None = None
        self.state = state
        self.late: LateGroup | None = None
        self._spec = spec
        self.secure = spec.secure
        self._alive = _While(spec.check_cancelled)
        self._world = gloo.GlooWorld(
            name=spec.world,
            host=spec.local_host,
            timeout=spec.timeout,
            check=self._alive,
            secure=spec.secure,
        )
        gloo.of(state, self._world)
        self._traffic = inflight.Traffic(timeout=0.0, device=torch.device("cpu"))
        self._links: list[gloo.GlooGroup] = []
        self._lock = threading.Lock()
        self._aborted = False
        self._destroying = False
        self._destroyed = threading.Event()
        self._free = False

    @property
    def device_types(self) -> frozenset[str]:
        """The kinds of device it has a backend for ("cpu", "cuda")."""
        if self.pg is not None:
            return frozenset(device.type for device in self.pg._device_types)
        return frozenset(c10d.BackendConfig(c10d.Backend(self._spec.backend)).get_device_backend_map())

    def made(self) -> ProcessGroup | None:
        """Return the default group, which is made now if it was not yet; None where it is gone."""
        return self.late.made() if self.pg is None and self.late is not None else self.pg

    def permitted(self) -> None:
        """Raise where the default group may not connect, and this torch has no other that could be made.

        Raises:
            UnencryptedError: so it is.
        """
        if self.secure and not lane_only.available():
            raise lane_only.unavailable(self._spec.world)

    def make(self, exchange: Store | None = None, agree: Callable[[], None] = lambda: None) -> None:
        """Make the default group. Raises as `build`.

        Args:
            exchange: where gloo's addresses are exchanged instead of the world's store, by a group that is
                late; what a failure leaves is `close`'s to release then.
            agree: returns when all members' groups stand; before that no operation may begin.
        """
        spec, state, world, alive = self._spec, self.state, self._world, self._alive
        world.exchange = exchange
        try:
            with selection.selected(state):
                group = _default_group(spec, state, world, alive)
                agree()
                c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(spec.size)}
                self.pg = group
                state.default_pg = group
        except BaseException as error:  # raised again, or as what it means
            if exchange is None:
                _undo(state, world)
            else:
                world.abort()
            alive.ask_why(0.0 if fault_classification.classify(error) is None else _REASON)
            raised, alive.raised = alive.raised, None
            try:
                if raised is error or not isinstance(error, Exception):
                    raise
                raise (_explained(spec, error) if raised is None else raised) from error
            finally:
                del raised  # else this frame and the exception hold each other, and the sockets
        alive.over()
        self._traffic = state.traffic or self._traffic

    def joined(self) -> None:
        """Every member has built it."""
        self._world.joined()

    def abort(self) -> None:
        """Let each pending and each later operation of the default group and its sub-groups raise.

        Returns within milliseconds; any thread; idempotent.
        """
        with self._lock:
            first, self._aborted = not self._aborted, True
        if not first:
            return
        self._world.abort()
        if self.late is not None:
            self.late.end()
        backends = [backend for pg in self._process_groups() for backend in nccl.backends_of(pg)]
        ends = [nccl.aborter(backend, tells=self._traffic.abort_returns) for backend in backends]
        self._traffic.abort([end for end in ends if end is not None])

    def close(self, deadline: float) -> bool:
        """Abort, and free everything: threads, sockets, names and maps.

        Args:
            deadline: ``time.monotonic()`` seconds; a destructor that hangs goes on in a daemon thread after
                it.

        Returns:
            Whether all is gone. False also while user code still holds the group (a DDP model of this world).
        """
        self.abort()
        coalescing.close_left(self._traffic)  # of this thread: the abort waits for it
        if not self._destroying:
            try:
                threading.Thread(target=self._destroy_once, name="m8d-destroy", daemon=True).start()
            except RuntimeError:  # the host has no thread left for this process, or the interpreter is ending
                self._destroy_once()
        if not self._destroyed.wait(max(0.0, deadline - time.monotonic())):
            return False
        return self._traffic.ended(deadline) and self._settled(deadline)

    def _process_groups(self) -> list[ProcessGroup]:
        # Copied without a lock: in rare cases this raises because another thread changes the dict meanwhile.
        for _ in range(3):
            with contextlib.suppress(RuntimeError):
                found = list(self.state.pg_map)
                return found if self.pg is None or self.pg in found else [self.pg, *found]
        return [] if self.pg is None else [self.pg]

    def _destroy_once(self) -> None:
        with self._lock:
            first, self._destroying = not self._destroying, True
        if first:
            try:
                self._destroy()
            finally:
                self._destroyed.set()

    def _destroy(self) -> None:
        """Free it: process groups first, then their backends (see `multiworld._c10d.last_holder`)."""
        if self.late is not None:
            self.late.rest()
        groups = self._world.take()
        held = backends_in(self._process_groups())  # those that a program has made itself, too
        self._links = [group for group in groups if not group.gone]
        self.pg = None
        self._traffic.released()
        self.state.forget()
        # A functional operation that a thread still waits for, in C++, gives its events back to its backend.
        self._traffic.keep_for_blocks([backend for backend, _ in held if nccl.works_need(backend)])
        while held:
            last_holder.let_go(*held.pop())
        for group in groups:
            group.drop()

    def _settled(self, deadline: float) -> bool:
        now = time.monotonic()
        deadline, sweep, pause = min(deadline, now + _SETTLE), now + _SETTLE / 2, 0.001
        while any(not group.gone for group in self._links):
            now = time.monotonic()
            if now >= deadline:
                return False
            if now >= sweep:
                # The error of a broken operation and the frames it went through (asyncio's task among them)
                # hold each other, and a work in there holds gloo's device.
                gc.collect()
                sweep = math.inf
            last_holder.nudge()
            time.sleep(min(pause, deadline - now))
            pause = min(0.02, pause * 2)
        return True
