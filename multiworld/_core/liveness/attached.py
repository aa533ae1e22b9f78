"""Worlds attached in this process, and the peers that each is shared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from multiworld._core.liveness.actions import Ask
from multiworld._core.liveness.detector import WorldId, names, world_id
from multiworld._core.liveness.early_close import Credentials
from multiworld._core.liveness.wire import Broken, Goodbye
from multiworld.events import Cause

if TYPE_CHECKING:
    from collections.abc import Iterator

    from multiworld._core.liveness.connection import PeerConnection
    from multiworld._core.membership.roster import Endpoint, Roster

__all__ = ["AttachedWorld", "AttachedWorlds"]


@dataclass
class AttachedWorld:
    """One attached world.

    Attributes:
        roster: its generation.
        ready: whether every member is connected and proved itself, in both directions.
        missing: a rank that was not there when this was looked at last.
        notes: rank -> why it is missing.
    """

    roster: Roster
    ready: bool = False
    missing: int = 0
    notes: dict[int, str] = field(default_factory=dict)

    def ranks(self, process: str) -> list[int]:
        """Return the ranks that `process` has in this world."""
        return [member.rank for member in self.roster.members if member.process == process]

    def last_word(self, failure: str) -> Goodbye | Broken:
        """Return what this member tells the others as it leaves: a goodbye, or its `failure`."""
        roster = self.roster
        if not failure:
            return Goodbye(roster.key, roster.rank)
        # A frame that members of all versions understand.
        detail = f"{names([roster.members[roster.rank]])}: {failure}"
        return Broken(roster.key, Cause.FAILED, (roster.rank,), detail)

    def question(self, process: str) -> Ask:
        """Return the question to the helper of `process`, a member."""
        endpoint = self.roster.members[self.ranks(process)[0]].endpoint
        return Ask(process, endpoint, self.roster.token)


class AttachedWorlds:
    """See the module. `own` is this process's id."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._worlds: dict[WorldId, AttachedWorld] = {}
        self._shared: dict[str, dict[WorldId, None]] = {}  # process -> worlds

    def add(self, roster: Roster) -> None:
        """Take a world in."""
        world = world_id(roster)
        self._worlds[world] = AttachedWorld(roster)
        for process in self.processes(roster):
            self._shared.setdefault(process, {})[world] = None

    def pop(self, world: WorldId) -> AttachedWorld | None:
        """Take a world out; None where it is not here."""
        state = self._worlds.pop(world, None)
        if state is not None:
            for process in self.processes(state.roster):
                del self._shared[process][world]
                if not self._shared[process]:
                    del self._shared[process]
        return state

    def get(self, world: WorldId) -> AttachedWorld | None:
        """Return a world; None where it is not here."""
        return self._worlds.get(world)

    def __getitem__(self, world: WorldId) -> AttachedWorld:
        return self._worlds[world]

    def __contains__(self, world: WorldId) -> bool:
        return world in self._worlds

    def rosters(self) -> Iterator[Roster]:
        """Give the rosters of all."""
        return (each.roster for each in self._worlds.values())

    def of(self, key: str) -> list[WorldId]:
        """Return the worlds with this key: one for each rank that this process has in it."""
        return [world for world in self._worlds if world[0] == key]

    def shared(self, process: str) -> list[WorldId]:
        """Return the worlds that `process` has a member in, in the order in which they were added."""
        return list(self._shared.get(process, ()))

    def processes(self, roster: Roster) -> list[str]:
        """Return the other processes of a world."""
        return [
            each for each in dict.fromkeys(member.process for member in roster.members) if each != self._own
        ]

    def endpoints(self, process: str) -> list[Endpoint]:
        """Return the endpoints of `process`: those of worlds that wait for it; of all, where none waits.

        A process that left its worlds and joins another listens somewhere else by then.
        """
        shared = [self._worlds[world] for world in self.shared(process)]
        known = {
            member.endpoint: None
            for world in [each for each in shared if not each.ready] or shared
            for member in world.roster.members
            if member.process == process
        }
        return list(known)

    def awaits(self, process: str) -> bool:
        """Whether a world that is shared with `process` is not ready yet."""
        return any(not self._worlds[world].ready for world in self.shared(process))

    def question(self, process: str) -> Ask | None:
        """Return the question to the helper of `process`, for its last world that is ready; None without."""
        ready = [state for each in self.shared(process) if (state := self._worlds[each]).ready]
        return ready[-1].question(process) if ready else None

    def credentials(self, main: PeerConnection) -> Credentials | None:
        """Choose a world, attached at both ends, whose token authenticates an early-close connection.

        The newest: an older one may be broken, and be attached only until its next generation is there.
        """
        for world in reversed(self.shared(main.peer)):
            state = self._worlds[world]
            if state.ready and world in main.accepted:
                theirs = state.roster.members[state.ranks(main.peer)[0]]
                return Credentials(theirs.endpoint, state.roster.token, world)
        return None

    def note(self, process: str, note: str) -> None:
        """Remember why `process` is missing."""
        for world in self.shared(process):
            state = self._worlds[world]
            state.notes.update(dict.fromkeys(state.ranks(process), note))
