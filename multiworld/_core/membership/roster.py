"""Roster: the members of one generation of a world, as agreed by the rendezvous."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Endpoint", "Member", "Roster"]


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
class Member:
    """One member of one generation.

    Attributes:
        rank: in the world.
        process: 32 hex digits, drawn once per process: the same process has the same one in all its worlds.
        endpoint: where its watchdog listens.
        pid: process id on its host, for messages only.
        hostname: for messages only.
    """

    rank: int
    process: str
    endpoint: Endpoint
    pid: int
    hostname: str


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
    """

    world: str
    generation: int
    rank: int
    members: tuple[Member, ...]
    token: bytes
    hang_timeout: float

    @property
    def size(self) -> int:
        """How many members the world has."""
        return len(self.members)

    @property
    def key(self) -> str:
        """Name and generation in one string, unique in this process: ``"w1/2"``."""
        return f"{self.world}/{self.generation}"
