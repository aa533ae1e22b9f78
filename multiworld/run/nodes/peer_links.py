"""How the agents of several nodes watch each other: the worlds' own watchdog, with small worlds of two agents.

Each pair of agents has four of them, over one connection. That one ends tells the other side something:

- ``alive`` ends when the agent leaves, crashes, hangs or cannot be reached; what ends after it says nothing;
- ``going`` is left in good order when the node ends the run for all;
- ``working``, one for each of the two, is left in good order when all workers of that node have ended with 0.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from multiworld._core.roster import Endpoint, Member, Roster
from multiworld.errors import JoinAbandonedError, MultiworldError
from multiworld.events import Cause
from multiworld.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld._net.attachment import Attachment
    from multiworld.events import Breakage
    from multiworld.run.nodes.slots import Node, Table

__all__ = ["Bonds", "Sign", "tie"]

_log = logging.getLogger(__name__)

BONDING = 30.0
"""Seconds within which two agents that know of each other have to be connected."""

_SETTLED = 1.0
"""Seconds after which a connection that ended would have ended all four worlds."""

_ALIVE, _GOING = "alive", "going"


@dataclass(frozen=True)
class Sign:
    """What became known of another agent.

    Attributes:
        id: of its node.
        tie: what `tie` gave for it and this node; another one after either was away.
        what: "lost", "done" or "failed".
        cause: of a loss: "crashed", "hung", "unreachable", "left" or "failed".
        at: ``time.monotonic()`` seconds.
    """

    id: str
    tie: int
    what: str
    cause: str
    at: float


def tie(mine: Node, other: Node) -> int:
    """Count the connections between two nodes: each has one more after either of them came anew."""
    return max(mine.since, other.since)


@dataclass
class _Bond:
    node: Node
    tie: int
    attachments: dict[str, Attachment] = field(default_factory=dict)
    dropped: bool = False
    lost: bool = False
    made: threading.Event = field(default_factory=threading.Event)  # or failed


class Bonds:
    """This agent's connections with the others.

    Args:
        hang_timeout: seconds without a sign of life, at least 0.3.
        on_sign: called with each `Sign`, from any thread; must be quick.
    """

    def __init__(self, hang_timeout: float, on_sign: Callable[[Sign], None]) -> None:
        self._watchdog = Watchdog()
        self._hang_timeout = max(0.3, hang_timeout)
        self._on_sign = on_sign
        self._lock = threading.Lock()  # guards the fields below; nothing is waited for under it
        self._bonds: dict[tuple[str, int], _Bond] = {}
        self._left: set[str] = set()

    @property
    def me(self) -> str:
        """This agent's id."""
        return self._watchdog.process

    def listen(self, host: str) -> Endpoint:
        """Listen for the others at a numeric address of this host.

        Raises:
            MultiworldError: it cannot be bound.
        """
        return self._watchdog.endpoint(host)

    def alive(self) -> tuple[str, ...]:
        """Ids of the agents that this one is connected with."""
        with self._lock:
            return tuple(
                id_ for (id_, _), bond in self._bonds.items() if _ALIVE in bond.attachments and not bond.lost
            )

    def update(self, table: Table) -> None:
        """Be connected with the agents at the table, and with no others; returns at once."""
        mine = table.node(self.me)
        wanted = (
            {}
            if mine is None
            else {(node.id, tie(mine, node)): node for node in table.nodes if node is not mine}
        )
        with self._lock:
            gone = [self._bonds.pop(key) for key in tuple(self._bonds) if key not in wanted]
            new = [_Bond(node, key[1]) for key, node in wanted.items() if key not in self._bonds]
            for bond in new:
                self._bonds[bond.node.id, bond.tie] = bond
            for bond in gone:
                bond.dropped = True
        for bond in gone:
            self._drop(bond)
        if mine is not None:
            for bond in new:
                threading.Thread(
                    target=self._bond, args=(bond, mine, table.token), daemon=True, name="m8d-nodes-bond"
                ).start()

    def done(self) -> None:
        """Say that this node's workers have ended with 0."""
        self._leave(_working(self.me))

    def fail(self) -> None:
        """Say that this node ends the run."""
        self._leave(_GOING)

    def settle(self, deadline: float) -> None:
        """Wait until the connections are there, or have failed; what is told earlier might not be understood."""
        with self._lock:
            bonds = list(self._bonds.values())
        for bond in bonds:
            bond.made.wait(max(0.0, deadline - time.monotonic()))

    def close(self, deadline: float) -> None:
        """Leave everybody; by ``time.monotonic()`` seconds."""
        with self._lock:
            for bond in self._bonds.values():
                bond.dropped = True
            self._bonds.clear()
        self._watchdog.stop(deadline)  # it says goodbye in the order of attaching: what came first ends first

    # -- one of them

    def _bond(self, bond: _Bond, mine: Node, token: str) -> None:
        """Connect, in a thread of its own: the other side may be slow."""
        deadline = time.monotonic() + BONDING
        try:
            for kind in (_ALIVE, _GOING, *sorted((_working(self.me), _working(bond.node.id)))):
                self._attach(bond, kind, _roster(kind, mine, bond.node, token, self._hang_timeout), deadline)
        except MultiworldError as error:
            if not bond.dropped:
                _log.debug("no connection with the agent of %s: %s", bond.node.host, error)
                self._lose(bond, "unreachable", time.monotonic())
        finally:
            bond.made.set()

    def _attach(self, bond: _Bond, kind: str, roster: Roster, deadline: float) -> None:
        try:
            attachment = self._watchdog.attach(
                roster, self._verdict(bond, kind), deadline=deadline, cancelled=lambda: bond.dropped
            )
        except JoinAbandonedError:
            # The other side leaves at once what it has no more use for, and that may be before this side is ready.
            if kind == _ALIVE or bond.dropped or bond.attachments[_ALIVE].ended.wait(_SETTLED):
                raise
            self._heard(bond, kind, time.monotonic())
            return
        with self._lock:
            bond.attachments[kind] = attachment
            leave = bond.dropped or kind in self._left
        if leave:
            attachment.leave()

    def _verdict(self, bond: _Bond, kind: str) -> Callable[[Breakage], None]:
        def heard(breakage: Breakage) -> None:
            if kind == _ALIVE and not bond.dropped:
                self._lose(bond, str(breakage.cause), breakage.at)
            elif breakage.cause is Cause.LEFT and not bond.dropped and not bond.lost:
                self._heard(bond, kind, breakage.at)

        return heard

    def _heard(self, bond: _Bond, kind: str, at: float) -> None:
        if kind == _GOING:
            self._tell(bond, "failed", "", at)
        elif kind == _working(bond.node.id):
            self._tell(bond, "done", "", at)

    def _lose(self, bond: _Bond, cause: str, at: float) -> None:
        with self._lock:
            first, bond.lost = not bond.lost, True
        if first:
            self._tell(bond, "lost", cause, at)

    def _tell(self, bond: _Bond, what: str, cause: str, at: float) -> None:
        self._on_sign(Sign(bond.node.id, bond.tie, what, cause, at))

    def _leave(self, kind: str) -> None:
        with self._lock:
            self._left.add(kind)
            attachments = [bond.attachments.get(kind) for bond in self._bonds.values()]
        for attachment in attachments:
            if attachment is not None:
                attachment.leave()

    def _drop(self, bond: _Bond) -> None:
        with self._lock:
            attachments = list(bond.attachments.values())
        for attachment in attachments:
            with contextlib.suppress(MultiworldError):
                attachment.leave()


def _working(id_: str) -> str:
    return f"working/{id_}"


def _roster(kind: str, mine: Node, other: Node, token: str, hang_timeout: float) -> Roster:
    """The world of two agents; both sides make the same one from the same table."""
    pair = sorted((mine, other), key=lambda node: node.id)
    generation = tie(mine, other)
    name = f"m8d-agents/{kind}/{pair[0].id}-{pair[1].id}"
    secret = hashlib.sha256(f"{token}/{name}/{generation}".encode()).digest()[:16]
    members = tuple(
        Member(rank, node.id, Endpoint(node.address, node.port), node.pid, node.host)
        for rank, node in enumerate(pair)
    )
    return Roster(name, generation, pair.index(mine), members, secret, hang_timeout)
