"""The collectives of one generation of a world over its lane: of its default group and of its sub-groups."""

from __future__ import annotations

import asyncio
import threading
import weakref
from typing import TYPE_CHECKING

import torch

from multiworld._c10d.gloo import lane_only
from multiworld._c10d.lane import collective_signatures, comparing, records
from multiworld._c10d.lane.collective_dispatch import LIMITS, WITHOUT_LIMITS, GroupCollectives
from multiworld._c10d.lane.collective_work import CollectiveWork
from multiworld._c10d.waiter_pool import pool
from multiworld._core.reraise import raised_by_the_program
from multiworld._net.lane.waiting import LateError, nested_call
from multiworld.logs.source import logger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch._C._distributed_c10d import ProcessGroup

    from multiworld._c10d.lane.collective import Collective
    from multiworld._c10d.lane.messages import Messages
    from multiworld._c10d.lane.p2p_dispatch import Channels

__all__ = ["GenerationCollectives", "wait_explained"]

_log = logger(__name__)

_CPU = torch.device("cpu")
_Gloo: object = getattr(torch._C._distributed_c10d, "ProcessGroupGloo", None)


class GenerationCollectives:
    """See the module.

    Args:
        messages: of the generation.
        channels: that its groups have.
        group: its default group; None if that is made later, of gloo alone.
        rank: of this process in it.
        size: of it.
        carried: whether collectives go over the lane.
        crowds: see `GroupCollectives`.
        near: whether all its members are on one host.
        checks: whether members compare their calls before.
        secure: whether gloo carries none: what is larger, or among more members, goes over the lane, too.

    Attributes:
        checks: as given; then `posted` blocks until all members have called.
        default: of the default group; None where torch carries all its collectives.
    """

    def __init__(
        self,
        messages: Messages,
        channels: Channels,
        group: ProcessGroup | None,
        *,
        rank: int,
        size: int,
        carried: bool,
        crowds: bool,
        near: bool,
        checks: bool,
        secure: bool,
    ) -> None:
        self._messages = messages
        self._channels = channels
        self.checks = checks
        self._coalescing = channels.coalescing
        self._carried = carried
        self._crowds = crowds
        self._near = near or secure
        self._limits = WITHOUT_LIMITS if secure else LIMITS
        # Weak: a group that its users have destroyed must go.
        self._known: weakref.WeakKeyDictionary[ProcessGroup, GroupCollectives | None] = (
            weakref.WeakKeyDictionary()
        )
        self.default: GroupCollectives | None = None
        self.default = self._late(rank, size) if group is None else self._of(group)

    def by_torch(self) -> bool:
        """Whether a collective of `World` has to be called as torch's function.

        So it is where calls are compared, where they are recorded, and where torch collects them first.
        """
        return self.checks or bool(self._coalescing) or records.profiled()

    def posted(
        self, name: str, group: ProcessGroup, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> CollectiveWork | None:
        """Begin a collective over the lane; None where it is torch's to do, or to refuse.

        Args:
            name: of the ProcessGroup's method.
            group: the ProcessGroup.
            args: of the method.
            kwargs: of the method.

        Raises:
            BrokenWorldException, WorldClosedError: the world is over.
            CollectiveMismatchError: others have called something else (M8D_CHECK).
        """
        of = self._known.get(group) or self._of(group)
        if of is None:
            return None
        collective = collective_signatures.of(of, name, args, kwargs)
        if collective is None and (inside := collective_signatures.awaited(args)) is not None:
            args = inside
            collective = collective_signatures.of(of, name, args, kwargs)
        if self.checks:  # after what may refuse the call: the comparison has a number
            return self._posted_alike(of, name, args, kwargs)
        return self._posted(collective, name, args)

    def _posted(
        self, collective: Collective | None, name: str, args: tuple[object, ...]
    ) -> CollectiveWork | None:
        if collective is None:
            return None
        if not records.profiled():
            return self.post(collective)
        with records.posting(name):
            records.of_collective(collective, args)
            return self.post(collective)

    def _posted_alike(
        self, of: GroupCollectives, name: str, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> CollectiveWork | None:
        """Compare the call with the other members', and begin it, also where the caller is interrupted.

        They begin it once they have compared. The group's next call comes after it.
        """
        exchange = of.exchange(comparing.record(comparing.described(name, args, kwargs)))
        self._messages.endpoint.require_wait()
        me = threading.get_ident()
        if of.comparer == me:
            raise nested_call()
        held, handed = False, False
        holds = iter((of.comparing,))  # gives it to one thread, which lets go of it
        made: list[Collective | None] = []

        def go_on() -> None:
            try:
                wait_explained(exchange, self._messages, 0.0)
                if comparing.difference(self._messages.world, exchange.outputs) is None:
                    if not made:
                        made.append(collective_signatures.of(of, name, args, kwargs))
                    if made[0] is not None and made[0].tag < 0:
                        self.post(made[0])
            except Exception as error:  # the world is over, or no thread can wait
                _log.debug("%s does not go on: %s", name, error)
            finally:
                for lock in holds:
                    lock.release()

        try:
            # `for` stores what it is given before Python looks for signals.
            for held in map(of.comparing.acquire, (True,), (min(exchange.timeout, threading.TIMEOUT_MAX),)):
                if held:
                    of.comparer = me
                else:
                    waited = f"{name} timed out: the call before it is still compared"
                    self._messages.raise_explained(TimeoutError(waited))
            self.conclude(exchange)
            error = comparing.difference(self._messages.world, exchange.outputs)
            try:
                if error is not None:
                    raise error
            finally:
                del error  # it has this frame
            made.append(collective_signatures.of(of, name, args, kwargs))  # anew: its time begins now
            return self._posted(made[0], name, args)
        except BaseException as error:
            if (
                held
                and exchange.tag >= 0
                and (not isinstance(error, Exception) or raised_by_the_program(error))
            ):
                of.comparer = None
                pool.run(go_on, later=True)
                handed = True
            raise
        finally:
            if held and not handed:
                for lock in holds:
                    of.comparer = None
                    lock.release()

    def post(self, collective: Collective) -> CollectiveWork:
        """Begin a collective that the caller waits for later."""
        collective.failed = self._failed
        collective.begin()
        return CollectiveWork(self, collective)

    def conclude(self, collective: Collective, timeout: float = 0.0) -> None:
        """Carry out a collective, or wait until it is over.

        Args:
            collective: begun or not.
            timeout: seconds; 0: the group's.

        Raises:
            Exception: the world's error.
        """
        collective.failed = self._failed  # where the caller is interrupted, and hears no more of it
        wait_explained(collective, self._messages, timeout)

    async def until_over(self, collective: Collective) -> None:
        """Carry out a collective that was not begun, in the running loop; cancelled, it goes on.

        Raises:
            Exception: what it failed with, to be explained.
        """
        collective.failed = self._failed
        await collective.awaited(self._messages.watch_of(asyncio.get_running_loop()))
        if collective.error is not None:
            raise self._messages.told(collective.error)

    def explained(self, error: Exception) -> Exception:
        """Return what `conclude` raises for an error of a collective; may wait for a verdict."""
        return self._messages.explained(error)

    def _failed(self, error: Exception) -> None:
        # No caller waits, perhaps for long: the other members must hear of it now.
        pool.run(lambda: _ignore(self.explained(error)), later=True)

    def _of(self, group: ProcessGroup) -> GroupCollectives | None:
        if group not in self._known:  # another thread may have been first
            self._known[group] = self._made(group)
        return self._known[group]

    def _made(self, group: ProcessGroup) -> GroupCollectives | None:
        if _Gloo is None or _CPU not in group._device_types:
            return None
        backend = group._get_backend(_CPU)
        # Exactly: with TORCH_DISTRIBUTED_DEBUG=DETAIL a wrapper checks each operation first.
        channel = (
            self._channels.of(group) if type(backend) is _Gloo or lane_only.is_stand_in(backend) else None
        )
        if channel is None:
            return None
        if channel.number == 0 and self.default is not None:
            return self.default  # which was there before a group that is made late
        alone = all(group._get_backend(device) is backend for device in group._device_types)
        timeout = backend.options._timeout.total_seconds()
        return GroupCollectives(
            self._messages.endpoint,
            channel.number,
            channel.ranks,
            channel.own,
            timeout,
            near=self._near,
            carried=self._carried,
            alone=alone,
            log=self._messages.log,
            limits=self._limits,
            crowds=self._crowds,
        )

    def _late(self, rank: int, size: int) -> GroupCollectives:
        return GroupCollectives(
            self._messages.endpoint,
            0,
            range(size),
            rank,
            self._messages.timeout,
            near=self._near,
            carried=self._carried,
            alone=True,
            log=self._messages.log,
            limits=self._limits,
            crowds=self._crowds,
        )


def _ignore(_: object) -> None:
    """An error is raised where it is waited for."""


def wait_explained(collective: Collective, messages: Messages, timeout: float) -> None:
    """Carry out a collective, or wait until it is over.

    Args:
        collective: begun or not.
        messages: of its generation.
        timeout: seconds; 0: the group's.

    Raises:
        Exception: the world's error.
    """
    try:
        collective.wait(timeout)
        error = collective.error
    except LateError as late:
        error = TimeoutError(*late.args)
    if error is not None:
        messages.raise_explained(error)
