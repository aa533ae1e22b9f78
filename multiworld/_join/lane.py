"""The lane of a generation that is being joined: where it is connected, and its connections.

A world has a lane where gloo would carry its messages of CPU tensors, all its members speak it
(``M8D_LANE=0`` takes one out), and there is a member to send to.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from multiworld import settings
from multiworld._c10d import groups
from multiworld._c10d.lane.exchange import CHANNEL, Exchange
from multiworld._c10d.late_group import LateGroup
from multiworld._c10d.waiter_pool import ending, pool
from multiworld._core.lane.greeting import COLLECTIVES, LATE_GROUP, VERSION
from multiworld._core.state_machine import Broke
from multiworld._net.lane.door import Door
from multiworld._net.lane.endpoint import Endpoint
from multiworld._net.lane.meeting import meet
from multiworld._net.tls import credentials
from multiworld.events import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld._c10d.groups import Group
    from multiworld._core.membership.roster import Roster
    from multiworld._generation.stage import StateMachine
    from multiworld._join.arguments import JoinPlan
    from multiworld._net.liveness.attachment import Attachment

__all__ = ["connect", "make_when_needed", "open_door"]


def open_door(plan: JoinPlan, host: str, process: str) -> Door | None:
    """Open this member's door; None where its world has no lane.

    Args:
        plan: of the join.
        host: numeric address of this host, where the others reach it.
        process: this process's id.

    Raises:
        MultiworldError: `host` cannot be bound, or a setting has no sense.
    """
    chosen = settings.load()
    if plan.world_size == 1 or not _carried(plan.backend) or not chosen.lane:
        return None
    version = VERSION if groups.may_be_late(plan.backend) else LATE_GROUP - 1
    return Door(host, process, version if chosen.lane_collectives else COLLECTIVES - 1, checks=chosen.check)


def _carried(backend: str) -> bool:
    """Whether messages of CPU tensors of a world with this backend are gloo's, or of no backend at all."""
    parts = [part.strip().rpartition(":") for part in backend.split(",")]
    cpu = {name for device, _, name in parts if device in {"", "cpu"}}
    return all(name == "gloo" or name.startswith("nccl") for name in cpu)


def connect(
    door: Door | None,
    roster: Roster,
    attachment: Attachment,
    machine: StateMachine,
    *,
    deadline: float,
    check: Callable[[], None],
) -> Endpoint | None:
    """Connect with all other members, if all have a lane; None where some have not.

    Args:
        door: this member's.
        roster: of the generation.
        attachment: the generation's place in the watchdog.
        machine: of the generation.
        deadline: ``time.monotonic()`` seconds.
        check: called often; raises to give up.

    Raises:
        JoinTimeoutError: members are missing at the deadline.
        Exception: what `check` raised.
    """
    if door is None or not roster.lane_version or roster.size == 1:
        return None
    met = meet(door, roster, deadline=deadline, check=check, credentials=credentials.current())

    def lost(rank: int, error: Exception) -> None:
        # In the thread that found it, under the endpoint's lock: the watchdog is asked by another.
        detail = f"the connection for messages to rank {rank} was lost: {error}"
        ending.run(lambda: _report(attachment, machine, detail, (rank,)), later=True)

    def interrupted(error: Exception) -> None:
        # Under the endpoint's lock, too. The other members learn that it was this one.
        ending.run(lambda: _report(attachment, machine, str(error), (roster.rank,)), later=True)

    endpoint = Endpoint(met.connections, {rank: each.read for rank, each in met.readers.items()}, lost)
    endpoint.interrupted = interrupted
    endpoint.readable = {rank: each.pid for rank, each in met.readers.items()}
    attachment.read_with(lambda rank: _read_aside(endpoint, rank, _nothing))
    return endpoint


def make_when_needed(
    group: Group,
    endpoint: Endpoint,
    roster: Roster,
    attachment: Attachment,
    machine: StateMachine,
    *,
    timeout: float,
) -> None:
    """Have a generation's gloo group made when a member needs it.

    Args:
        group: that was built to be late.
        endpoint: of the lane.
        roster: of the generation.
        attachment: the generation's place in the watchdog.
        machine: of the generation.
        timeout: seconds that making it may take.
    """

    def check() -> None:
        if attachment.ended.is_set():
            raise ConnectionAbortedError("the world is over")

    def exchange(asking: bool) -> Exchange:
        others = [rank for rank in range(roster.size) if rank != roster.rank]
        return Exchange(endpoint, others, attachment.ask_to_read, check, asking=asking)

    def failed(error: BaseException) -> None:
        _report(attachment, machine, f"the gloo group could not be made: {error}", ())

    def asked() -> None:
        # One that has not joined yet is asked again.
        if machine.state is State.ACTIVE and endpoint.has_come(CHANNEL):
            late.begin(asking=False)

    late = group.late = LateGroup(group, exchange, failed, timeout, group.permitted)
    group.state.expect(late, "gloo", roster.rank, roster.size)
    attachment.read_with(lambda rank: _read_aside(endpoint, rank, asked))


def _read_aside(endpoint: Endpoint, rank: int, then: Callable[[], None]) -> None:
    """Read a connection for the member at its other end, in another thread than this, the watchdog's.

    Without a thread or a descriptor for that nothing is read: the member asks again.
    """

    def read() -> None:
        with contextlib.suppress(OSError):
            endpoint.ready(rank)
            then()

    with contextlib.suppress(RuntimeError):
        pool.run(read)


def _report(attachment: Attachment, machine: StateMachine, detail: str, ranks: tuple[int, ...]) -> None:
    """The world breaks, by the watchdog's verdict, or for this reason."""
    if machine.state is State.ACTIVE:
        machine.apply(Broke(attachment.breakage_for(detail, ranks)))


def _nothing() -> None:
    """No more is to be done."""
