"""Executor: feeds socket events to the peer protocol and carries out its actions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiworld._core.liveness.actions import (
    Action,
    Answer,
    Ask,
    Break,
    BusyReport,
    Dial,
    Drop,
    Hear,
    Keep,
    Lost,
    ReadUnread,
    Ready,
    Release,
    Send,
)
from multiworld._core.liveness.questions import pieces
from multiworld._core.liveness.wire import Beat, Close
from multiworld._net.liveness.evidence import Answered
from multiworld._net.liveness.sockets import Accepted, Closed, Connected, Received, SocketEvent, Sockets
from multiworld.logs.source import logger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from multiworld._core.liveness.detector import WorldId
    from multiworld._core.liveness.peers import Peers
    from multiworld._net.descriptor_table import IsolatedTable
    from multiworld._net.liveness.attachment import Attachment
    from multiworld.events import Breakage

__all__ = ["Executor", "feed", "report"]

_log = logger(__name__)


def feed(peers: Peers, event: SocketEvent, now: float) -> None:
    """Pass one event of the sockets to the peer protocol."""
    if isinstance(event, Received):
        peers.received(event.channel, event.frames, now, error=event.error, host=event.host)
    elif isinstance(event, Closed):
        peers.closed(event.channel, event.ending, now, refused=event.refused, plain=event.plain)
    elif isinstance(event, Accepted):
        peers.accepted(event.channel, now)
    elif isinstance(event, Connected):
        peers.connected(event.channel, now)
    elif isinstance(event, Answered):
        peers.answered(event.process, event.evidence, now)


def report(attachment: Attachment, breakage: Breakage) -> None:
    """Report a verdict to a world; an exception of its callback, of any kind, is logged."""
    try:
        attachment.broke(breakage)
    except BaseException:  # noqa: BLE001  (logged: the watchdog goes on)
        _log.exception("what was to be done about %s failed", attachment.roster.key)


class Executor:
    """Carries out actions. For the watchdog's thread.

    Args:
        sockets: of the watchdog.
        table: for this process's early-close connections; None where the system has none.
    """

    def __init__(self, sockets: Sockets, table: IsolatedTable | None) -> None:
        self._sockets = sockets
        self._table = table

    def run(self, actions: list[Action], attachments: Mapping[WorldId, Attachment]) -> list[Attachment]:
        """Carry out `actions` in order, verdicts and releases last.

        Returns:
            The attachments that became ready.
        """
        broken: list[Break] = []
        released: list[int] = []
        ready: list[Attachment] = []
        sockets = self._sockets
        for action in actions:
            if isinstance(action, Send):
                sockets.send(action.channel, action.frame, droppable=isinstance(action.frame, Beat))
            elif isinstance(action, Dial):
                sockets.dial(action.channel, action.endpoint)
            elif isinstance(action, Drop):
                sockets.close(action.channel, orderly=action.orderly)
            elif isinstance(action, Keep):
                self._keep(action.channel)
            elif isinstance(action, Ask):
                sockets.asker.ask(action.process, action.endpoint, action.token)
            elif isinstance(action, Release):
                released.append(action.channel)
            elif isinstance(action, Break):
                broken.append(action)
            elif (attachment := attachments.get(action.world)) is None:
                continue
            elif isinstance(action, Ready):
                attachment.attached()
                ready.append(attachment)
            elif isinstance(action, BusyReport):
                attachment.busy(action.ranks, busy=action.busy)
            elif isinstance(action, Lost):
                attachment.lose(action.ranks)
            elif isinstance(action, ReadUnread):
                attachment.look(action.rank)
            elif isinstance(action, Answer):
                for frame in pieces(action.world, action.number, attachment.describe(deep=action.deep)):
                    sockets.send(action.channel, frame)
            elif isinstance(action, Hear):
                attachment.heard(action.number, action.rank, action.piece, last=action.last)
            else:
                attachment.refused(action)
        # Callbacks last: the other members are told before this process is busy with its own worlds.
        for each in broken:
            if (attachment := attachments.get(each.world)) is not None:
                report(attachment, each.breakage)
        self._release(released)
        return ready

    def _keep(self, channel: int) -> None:
        table = self._table
        if table is None or not self._sockets.hand_over(
            channel, Close(), lambda sock, closing: table.keep(channel, sock, closing)
        ):
            self._sockets.send(channel, Close())
            self._sockets.close(channel, orderly=True)

    def _release(self, channels: list[int]) -> None:
        if channels and self._table is not None:
            for channel in channels:
                self._table.drop(channel)
            # A caller of `leave` may end the process right after: the closing messages are sent by then.
            self._table.settle()
