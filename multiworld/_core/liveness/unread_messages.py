"""Messages that lie unread: their sender asks, from watchdog to watchdog, that they be read.

If no thread of a process waits in a world, none reads that world's lane. A member that closes waits
there until what it sent is received, and would wait in vain for the answer of a receiver that has it all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiworld._core.liveness.actions import Action, ReadUnread, Send
from multiworld._core.liveness.wire import Unread

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from multiworld._core.liveness.attached import AttachedWorlds
    from multiworld._core.liveness.connection import PeerConnection
    from multiworld._core.liveness.detector import WorldId

__all__ = ["UnreadMessages"]


class UnreadMessages:
    """Asks, and has others' questions answered.

    Args:
        own: this process's id.
        worlds: that are attached.
        trusted: connections by process.
        act: takes actions.
    """

    def __init__(
        self,
        own: str,
        worlds: AttachedWorlds,
        trusted: Mapping[str, PeerConnection],
        act: Callable[[Action], None],
    ) -> None:
        self._own = own
        self._worlds = worlds
        self._trusted = trusted
        self._act = act

    def ask(self, world: WorldId, ranks: Collection[int]) -> None:
        """Ask members of a world to read what this process's member has sent them.

        The world has a lane: who had none, as all versions that do not know `Unread`, is never sent one.
        """
        state = self._worlds.get(world)
        if state is None:
            return
        key, own_rank = world
        for process in dict.fromkeys(state.roster.members[rank].process for rank in ranks):
            if process == self._own:
                for other in self._worlds.of(key):
                    if other[1] in ranks:
                        self._act(ReadUnread(other, own_rank))
            elif (connection := self._trusted.get(process)) is not None:
                self._act(Send(connection.channel, Unread(key, own_rank)))

    def asked(self, connection: PeerConnection, frame: Unread) -> None:
        """The other end asks; who is no member of the world is not heard."""
        if (frame.key, frame.rank) in connection.proven:
            for world in self._worlds.of(frame.key):
                self._act(ReadUnread(world, frame.rank))
