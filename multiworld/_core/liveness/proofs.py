"""Proofs of membership: offering this process's, and judging those of the other end."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from multiworld._core.liveness.detector import world_id
from multiworld._core.liveness.wire import Attach, Reason, Refused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from multiworld._core.liveness.attached import AttachedWorld, AttachedWorlds
    from multiworld._core.liveness.connection import PeerConnection, Place
    from multiworld._core.liveness.ended import EndedGenerations

__all__ = ["MAX_WAITING", "Judgement", "Proofs"]

MAX_WAITING = 64
"""Proofs for unknown worlds that an unauthenticated connection may have waiting."""

_MAX_WAITING_TRUSTED = 1024


class Judgement(enum.Enum):
    """Result of judging a proof that is not refused."""

    VALID = "valid"
    EARLY = "early"
    """Kept in `PeerConnection.waiting`: this process has not attached the world yet."""
    EXCESS = "excess"
    """One more early proof than a connection may have."""


class Proofs:
    """Judges proofs of membership.

    Args:
        own: this process's id.
        worlds: attached here.
        ended: generations that ended here.
        trusted: authenticated connections, by the peer's process.
    """

    def __init__(
        self, own: str, worlds: AttachedWorlds, ended: EndedGenerations, trusted: Mapping[str, PeerConnection]
    ) -> None:
        self._own = own
        self._worlds = worlds
        self._ended = ended
        self._trusted = trusted

    def offers(self, connection: PeerConnection) -> list[Attach]:
        """Return the proofs not offered yet; before the other end is authenticated, at most `MAX_WAITING`."""
        shared = [each for each in self._worlds.shared(connection.peer) if each not in connection.offered]
        offered = shared if connection.trusted else shared[:MAX_WAITING]
        return [connection.offer(self._worlds[world].roster.token, world) for world in offered]

    def judge(self, connection: PeerConnection, place: Place, given: bytes) -> Refused | Judgement:
        """Judge the other end's claim to be `place`, with the proof `given`."""
        key, rank = place
        local = self._worlds.of(key)
        if not local:
            return self._judge_unknown(connection, place, given)
        roster = self._worlds[local[0]].roster
        theirs = rank < roster.size and roster.members[rank].process == connection.peer
        if theirs and connection.holds(roster.token, place, given):
            if connection.may_be_on(roster.members[rank].hostname):
                return Judgement.VALID
            connection.refused = f"its certificate is of another host, {connection.host!r}"
            self._worlds.note(connection.peer, connection.refused)
        return Refused(key, rank, Reason.PROOF, roster.generation)

    def _judge_unknown(self, connection: PeerConnection, place: Place, given: bytes) -> Refused | Judgement:
        refusal = self._ended.refusal(
            place[0], self._worlds.rosters(), lambda token: connection.holds(token, place, given)
        )
        if refusal is not None:
            return Refused(*place, *refusal)
        if len(connection.waiting) >= (_MAX_WAITING_TRUSTED if connection.trusted else MAX_WAITING):
            return Judgement.EXCESS
        # Its join may be a few milliseconds ahead of this process's.
        connection.waiting[place] = given
        return Judgement.EARLY

    def early_close_of(self, connection: PeerConnection, place: Place, given: bytes) -> PeerConnection | None:
        """Return the trusted connection whose early-close connection this proves to be; None for none."""
        main = self._trusted.get(connection.peer)
        if main is None or place not in main.proven:
            return None
        roster = self._worlds[self._worlds.of(place[0])[0]].roster
        its = connection.may_be_on(roster.members[place[1]].hostname)
        return main if its and connection.holds(roster.token, place, given, early_close=True) else None

    def complete(self, state: AttachedWorld) -> bool:
        """Whether every member is connected and authenticated, in both directions."""
        # The member that was missing last comes first: with each proof that comes this is asked.
        if not self._proved(state, state.missing):
            return False
        missing = next((rank for rank in range(state.roster.size) if not self._proved(state, rank)), None)
        state.missing = missing or 0
        return missing is None

    def missing(self, state: AttachedWorld) -> list[int]:
        """Return the ranks of members for which that is not so."""
        return [rank for rank in range(state.roster.size) if not self._proved(state, rank)]

    def _proved(self, state: AttachedWorld, rank: int) -> bool:
        roster = state.roster
        process = roster.members[rank].process
        if process == self._own:
            return (roster.key, rank) in self._worlds
        connection = self._trusted.get(process)
        return (
            connection is not None
            and (roster.key, rank) in connection.proven
            and world_id(roster) in connection.accepted
        )
