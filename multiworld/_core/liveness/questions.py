"""Questions from watchdog to watchdog: what is a member doing? Its answer comes in pieces.

Only members that have proved themselves ask, and are heard; those of a world that has just broken, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiworld._core.liveness.actions import Action, Answer, Hear, Send
from multiworld._core.liveness.wire import Asked, Told

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from multiworld._core.liveness.attached import AttachedWorlds
    from multiworld._core.liveness.connection import PeerConnection
    from multiworld._core.liveness.detector import WorldId

__all__ = ["PIECE", "Questions", "pieces"]

PIECE = 3072
"""Bytes of an answer in one frame."""


class Questions:
    """Asks, and has others' questions answered.

    Args:
        worlds: that are attached.
        trusted: connections by process.
        act: takes actions.
    """

    def __init__(
        self,
        worlds: AttachedWorlds,
        trusted: Mapping[str, PeerConnection],
        act: Callable[[Action], None],
    ) -> None:
        self._worlds = worlds
        self._trusted = trusted
        self._act = act

    def ask(self, world: WorldId, number: int, *, deep: bool) -> None:
        """Ask the members of a world in other processes what they are doing.

        Args:
            world: that is attached.
            number: of the question; the answers have it.
            deep: whether their threads' stacks are wanted.
        """
        state = self._worlds.get(world)
        if state is None:
            return
        for process in self._worlds.processes(state.roster):
            if (connection := self._trusted.get(process)) is not None:
                self._act(Send(connection.channel, Asked(*world, number, deep)))

    def asked(self, connection: PeerConnection, frame: Asked) -> None:
        """The other end asks; one that is no member of the world is not heard."""
        if _is_member(connection, frame):
            for world in self._worlds.of(frame.key):
                self._act(Answer(world, connection.channel, frame.number, frame.deep))

    def told(self, connection: PeerConnection, frame: Told) -> None:
        """The other end answers."""
        if _is_member(connection, frame):
            for world in self._worlds.of(frame.key):
                self._act(Hear(world, frame.rank, frame.number, frame.piece, frame.last))


def _is_member(connection: PeerConnection, frame: Asked | Told) -> bool:
    """Whether the other end is the member that it says it is; of a broken world, too, to find out why."""
    place = (frame.key, frame.rank)
    return place in connection.proven or place in connection.ended


def pieces(world: WorldId, number: int, data: bytes) -> Iterator[Told]:
    """Give the frames of one answer, in their order.

    Args:
        world: key, and rank of the member that answers.
        number: of the question.
        data: the answer.
    """
    for start in range(0, max(1, len(data)), PIECE):
        piece = data[start : start + PIECE]
        yield Told(*world, number, piece, start + PIECE >= len(data))
