"""Roster: the members of one generation of a world, as agreed by the rendezvous."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CHECKS", "MEETS", "Endpoint", "LaneAddress", "Member", "Roster"]

CHECKS = 1
"""Option of a lane: its member wants each collective's calls to be compared."""
MEETS = 2
"""Its member waits for all others before and after a state is sent. Older versions do not."""


@dataclass(frozen=True)
class Endpoint:
    """Where a process listens for its peers' watchdogs.

    Attributes:
        host: numeric IPv4 or IPv6 address of one interface, never a wildcard.
        port: TCP port.
    """

    host: str
    port: int


@dataclass(frozen=True)
class LaneAddress:
    """Where a member waits for the others' lane connections while a generation is being joined.

    Members at the same place connect through a Unix socket, all others through TCP at the member's host.

    Attributes:
        version: of the lane's protocol, 1 or more; from 2 on it carries collectives.
        place: the same text in all processes that share a host and its network; "" where that is not known.
        port: TCP port.
        options: `CHECKS`, `MEETS`, or their sum; else 0.
    """

    version: int
    place: str
    port: int
    options: int = 0


@dataclass(frozen=True)
class Member:
    """One member of one generation.

    Attributes:
        rank: in the world.
        process: 32 hex digits, drawn once per process: the same process has the same one in all its worlds.
        endpoint: where its watchdog listens.
        pid: process id on its host, for messages only.
        hostname: for messages only.
        lane: where its lane is connected; None: it has none, and so no member of the generation uses one.
        seat: its name in a world whose ranks are assigned; "" where members choose their ranks.
    """

    rank: int
    process: str
    endpoint: Endpoint
    pid: int
    hostname: str
    lane: LaneAddress | None = None
    seat: str = ""

    @property
    def slot(self) -> int | str:
        """What no other member of a generation has: the seat, or else the rank."""
        return self.seat or self.rank


@dataclass(frozen=True)
class Roster:
    """One generation of a world, as every member knows it.

    Attributes:
        world: name.
        generation: 1, 2, ...
        rank: of this process.
        members: all of them, by rank; ``len(members)`` is the world's size.
        token: 16 random bytes that authenticate the members to each other, drawn by the member that completes
            the generation.
        hang_timeout: seconds, this process's own.
        steps: where ranks are assigned, by rank, which state each member has: how many advances; None for one
            that comes new, without the world's state; a negative number for one that comes back with an old
            one (`state_sources`). Empty where members choose their ranks.
        torn: ranks of those whose state is in part that of a member that was lost while it sent it.
    """

    world: str
    generation: int
    rank: int
    members: tuple[Member, ...]
    token: bytes
    hang_timeout: float
    steps: tuple[int | None, ...] = ()
    torn: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """How many members the world has."""
        return len(self.members)

    @property
    def lane_version(self) -> int:
        """The lane's protocol that all members speak; 0: some have no lane, so messages go through gloo."""
        return min((0 if member.lane is None else member.lane.version for member in self.members), default=0)

    @property
    def checks(self) -> bool:
        """Whether all members want the calls of each collective to be compared."""
        # Versions without `MEETS` take each option for this one, and all members must decide alike.
        return self._all_say(CHECKS if self.meets else CHECKS | MEETS)

    @property
    def meets(self) -> bool:
        """Whether all members wait for each other before and after a state is sent."""
        return self._all_say(MEETS)

    def _all_say(self, options: int) -> bool:
        """Whether each member says at least one of these options."""
        return all(member.lane is not None and member.lane.options & options for member in self.members)

    @property
    def one_host(self) -> bool:
        """Whether all members have lanes on one host; all of them find the same."""
        places = {"" if member.lane is None else member.lane.place for member in self.members}
        return len(places) == 1 and "" not in places

    @property
    def key(self) -> str:
        """Name and generation in one string, unique in this process: ``"w1/2"``."""
        return f"{self.world}/{self.generation}"
