"""Links between the agents of several nodes: the worlds' watchdog, with small worlds of two agents.

Each pair of agents has three of them, over one connection. The end of each has its own meaning:

- ``alive`` ends when the agent leaves, crashes, hangs or cannot be reached; the ends of the others after it
  mean nothing. A node that ends the run for all says so as it leaves it;
- ``working``, one for each of the two, is left in good order when all workers of that node have ended with 0.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from multiworld._core.membership.roster import Endpoint, Member, Roster
from multiworld._net.blocking import BlockingCall
from multiworld.errors import JoinAbandonedError, MultiworldError
from multiworld.events import Cause
from multiworld.logs.source import logger
from multiworld.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld._net.liveness.attachment import Attachment
    from multiworld.events import Breakage
    from multiworld.run.nodes.slots import Membership, Node

__all__ = ["PeerLinks", "PeerSignal", "link_epoch"]

_log = logger(__name__)

CONNECTING = 30.0
"""Seconds that two agents have to connect once both are in the membership."""

_SETTLED = 1.0
"""Seconds within which a lost connection ends all three worlds."""

_ANSWERED = 0.5
"""Seconds, more, that a thread has which asks another agent."""

_ALIVE = "alive"
_ENDS = "it ends the run for all"
"""The reason that peers get as such a node leaves ``alive``."""


@dataclass(frozen=True)
class PeerSignal:
    """News of another agent.

    Attributes:
        id: of its node.
        epoch: of the link, see `link_epoch`.
        what: "lost", "done" or "failed".
        cause: of a loss: "crashed", "hung", "unreachable", "left" or "failed".
        at: ``time.monotonic()`` seconds.
    """

    id: str
    epoch: int
    what: str
    cause: str
    at: float


def link_epoch(mine: Node, other: Node) -> int:
    """Return the epoch of the link between two nodes: a later one after either of them was admitted again."""
    return max(mine.since, other.since)


@dataclass
class _PeerLink:
    node: Node
    epoch: int
    begun: float  # ``time.monotonic()`` seconds
    attachments: dict[str, Attachment] = field(default_factory=dict)
    dropped: bool = False
    lost: bool = False
    made: threading.Event = field(default_factory=threading.Event)  # or failed


class PeerLinks:
    """This agent's links to the other agents.

    Args:
        hang_timeout: seconds without a sign of life, at least 0.3.
        on_signal: called with each `PeerSignal`, from any thread; must be quick.
        describe: returns what `ask` gets on the other agents, 64 KiB at most. Quick; called in the watchdog's
            thread.
    """

    def __init__(
        self,
        hang_timeout: float,
        on_signal: Callable[[PeerSignal], None],
        describe: Callable[[], bytes] = bytes,
    ) -> None:
        self._watchdog = Watchdog()
        self._hang_timeout = max(0.3, hang_timeout)
        self._on_signal = on_signal
        self._describe = describe
        self._lock = threading.Lock()  # guards the fields below; nothing is waited for under it
        self._links: dict[tuple[str, int], _PeerLink] = {}
        self._left: set[str] = set()
        self._unbegun: deque[Callable[[], None]] = deque()

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
                id_ for (id_, _), link in self._links.items() if _ALIVE in link.attachments and not link.lost
            )

    def unmade(self, before: float) -> tuple[str, ...]:
        """Ids of the agents that this one began to connect with `before`, and is not connected with yet."""
        with self._lock:
            return tuple(
                id_
                for (id_, _), link in self._links.items()
                if link.begun < before and _ALIVE not in link.attachments and not link.lost
            )

    def ask(self, timeout: float) -> list[bytes]:
        """Return what the other agents say of themselves; of those that answer within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with self._lock:
            alive = [
                link.attachments[_ALIVE]
                for link in self._links.values()
                if _ALIVE in link.attachments and not link.lost
            ]
        # One that is stopped must not take the others' time.
        asked = []
        with contextlib.suppress(RuntimeError):  # no thread is left: the rest counts as silent
            for each in alive:
                call = partial(each.ask, deep=False, deadline=deadline)
                asked.append(BlockingCall(call, name="m8d-nodes-ask"))
        return [
            answer
            for call in asked
            if call.wait(deadline + _ANSWERED - time.monotonic())
            for answer in call.result().values()
        ]

    def update(self, membership: Membership) -> None:
        """Connect with the agents of the membership, and drop links to all others; returns at once."""
        mine = membership.node(self.me)
        wanted = (
            {}
            if mine is None
            else {(node.id, link_epoch(mine, node)): node for node in membership.nodes if node is not mine}
        )
        with self._lock:
            gone = [self._links.pop(key) for key in tuple(self._links) if key not in wanted]
            now = time.monotonic()
            new = [_PeerLink(node, key[1], now) for key, node in wanted.items() if key not in self._links]
            for link in new:
                self._links[link.node.id, link.epoch] = link
            for link in gone:
                link.dropped = True
        for link in gone:
            self._drop(link)
        if mine is not None:
            self._unbegun.extend(partial(self._connect, link, mine, membership.token) for link in new)
        self.begin()

    def begin(self) -> None:
        """Begin to connect where no thread was left to do it. From the thread of `update`."""
        with contextlib.suppress(RuntimeError):  # none is left still: it is called again
            while self._unbegun:
                threading.Thread(target=self._unbegun[0], daemon=True, name="m8d-nodes-link").start()
                self._unbegun.popleft()

    def done(self) -> None:
        """Tell the others that this node's workers have ended with 0."""
        self._leave(_working(self.me))

    def not_done(self) -> None:
        """Do not tell it on links that are made from now on: the seat went to another node."""
        with self._lock:
            self._left.discard(_working(self.me))

    def fail(self) -> None:
        """Tell the others that this node ends the run. They are left with that."""
        self._leave(_ALIVE)

    def settle(self, deadline: float) -> None:
        """Wait until each link is made or has failed; a peer may not understand what it is told earlier."""
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.made.wait(max(0.0, deadline - time.monotonic()))

    def close(self, deadline: float) -> None:
        """Leave all peers, by `deadline` in ``time.monotonic()`` seconds."""
        with self._lock:
            for link in self._links.values():
                link.dropped = True
            self._links.clear()
        self._watchdog.stop(deadline)  # it says goodbye in the order of attaching: what came first ends first

    # -- one link

    def _connect(self, link: _PeerLink, mine: Node, token: str) -> None:
        """Connect, in a thread of its own: the other side may be slow."""
        deadline = time.monotonic() + CONNECTING
        try:
            for kind in (_ALIVE, *sorted((_working(self.me), _working(link.node.id)))):
                self._attach(link, kind, _roster(kind, mine, link.node, token, self._hang_timeout), deadline)
        except MultiworldError as error:
            if not link.dropped:
                _log.debug("no connection with the agent of %s: %s", link.node.host, error)
                self._lose(link, "unreachable", time.monotonic())
        finally:
            link.made.set()

    def _attach(self, link: _PeerLink, kind: str, roster: Roster, deadline: float) -> None:
        try:
            attachment = self._watchdog.attach(
                roster, self._verdict(link, kind), deadline=deadline, cancelled=lambda: link.dropped
            )
        except JoinAbandonedError:
            # The other side may leave a world before this side has joined it: that is the signal already.

            if kind == _ALIVE or link.dropped or link.attachments[_ALIVE].ended.wait(_SETTLED):
                raise
            self._heard(link, kind, time.monotonic())
            return
        attachment.describe_with(lambda _: self._describe())
        with self._lock:
            link.attachments[kind] = attachment
            leave = link.dropped or kind in self._left
        if leave:
            attachment.leave(_last_word(kind))

    def _verdict(self, link: _PeerLink, kind: str) -> Callable[[Breakage], None]:
        def heard(breakage: Breakage) -> None:
            if kind == _ALIVE and not link.dropped:
                ends = _ENDS in breakage.detail
                if ends and not link.lost:
                    self._tell(link, "failed", "", breakage.at)
                self._lose(link, str(Cause.LEFT if ends else breakage.cause), breakage.at)
            elif breakage.cause is Cause.LEFT and not link.dropped and not link.lost:
                self._heard(link, kind, breakage.at)

        return heard

    def _heard(self, link: _PeerLink, kind: str, at: float) -> None:
        if kind == _working(link.node.id):
            self._tell(link, "done", "", at)

    def _lose(self, link: _PeerLink, cause: str, at: float) -> None:
        with self._lock:
            first, link.lost = not link.lost, True
        if first:
            self._tell(link, "lost", cause, at)

    def _tell(self, link: _PeerLink, what: str, cause: str, at: float) -> None:
        self._on_signal(PeerSignal(link.node.id, link.epoch, what, cause, at))

    def _leave(self, kind: str) -> None:
        with self._lock:
            self._left.add(kind)
            attachments = [link.attachments.get(kind) for link in self._links.values()]
        for attachment in attachments:
            if attachment is not None:
                attachment.leave(_last_word(kind))

    def _drop(self, link: _PeerLink) -> None:
        with self._lock:
            attachments = list(link.attachments.values())
        for attachment in attachments:
            with contextlib.suppress(MultiworldError):
                attachment.leave()


def _last_word(kind: str) -> str:
    """Return the reason that peers get as this node leaves a world; "" for a goodbye."""
    return _ENDS if kind == _ALIVE else ""


def _working(id_: str) -> str:
    return f"working/{id_}"


def _roster(kind: str, mine: Node, other: Node, token: str, hang_timeout: float) -> Roster:
    """The world of two agents; both sides make the same one from the same membership."""
    pair = sorted((mine, other), key=lambda node: node.id)
    generation = link_epoch(mine, other)
    name = f"m8d-agents/{kind}/{pair[0].id}-{pair[1].id}"
    secret = hashlib.sha256(f"{token}/{name}/{generation}".encode()).digest()[:16]
    members = tuple(
        Member(rank, node.id, Endpoint(node.address, node.port), node.pid, node.host)
        for rank, node in enumerate(pair)
    )
    return Roster(name, generation, pair.index(mine), members, secret, hang_timeout)
