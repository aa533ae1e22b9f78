"""`WorldsPlan`, the content of a worlds file: roles, their workers, and the worlds between them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["LAUNCHER", "PlannedMember", "PlannedWorld", "Role", "WorldsPlan"]

LAUNCHER = "launcher"
"""Value of ``store`` for worlds that meet at the launcher's own store."""


@dataclass(frozen=True)
class Role:
    """Workers of one kind.

    Attributes:
        name: of the role.
        count: number of its workers, at least 1; of a range the largest.
        line: in the file.
        least: smallest number of a range; 0: they are always `count`.
    """

    name: str
    count: int
    line: int
    least: int = 0

    @property
    def needed(self) -> int:
        """Number of its workers that the run cannot do without."""
        return self.least or self.count


@dataclass(frozen=True)
class PlannedMember:
    """One worker, by role and index.

    Attributes:
        role: name of its role.
        index: 0 to the role's count - 1.
    """

    role: str
    index: int

    def __str__(self) -> str:
        return f"{self.role}:{self.index}"


@dataclass(frozen=True)
class PlannedWorld:
    """One world, as `multiworld.join_all` joins it.

    Attributes:
        name: of the world.
        members: by rank in the world; two at least, each once.
        backend: as for `multiworld.join`, in lower case.
        store: "launcher", or an address as for `multiworld.join`.
        timeout: seconds, for the join and for each operation; None: the worker's default.
        hang_timeout: seconds of silence after which a member is hung; None: the worker's default.
        device: of the tensors; "{local_rank}" in it stands for the worker's own. None: the backend decides.
        after: names of the worlds that a worker joins before this one.
        line: in the file.
        least, most: range of sizes of a world whose ranks are assigned; 0: all members, by rank.
        last_call: as for `multiworld.join`, where ranks are assigned; None: its default.
    """

    name: str
    members: tuple[PlannedMember, ...]
    backend: str
    store: str
    timeout: float | None
    hang_timeout: float | None
    device: str | None
    after: tuple[str, ...]
    line: int
    least: int = 0
    most: int = 0
    last_call: float | None = None

    @property
    def assigned(self) -> bool:
        """Whether ranks are assigned, so that its size may change."""
        return self.least > 0


@dataclass(frozen=True)
class WorldsPlan:
    """A valid worlds file.

    Attributes:
        roles: in the file's order, which is that of the ranks: the first role has the first ranks.
        worlds: in the file's order.
        path: of the file, for messages.
    """

    roles: tuple[Role, ...]
    worlds: tuple[PlannedWorld, ...]
    path: str

    @property
    def world_size(self) -> int:
        """Number of workers of all roles, the largest of each."""
        return sum(role.count for role in self.roles)

    @property
    def least_workers(self) -> int:
        """Number of workers of all roles, the smallest of each."""
        return sum(role.needed for role in self.roles)

    @property
    def changing(self) -> tuple[Role, ...]:
        """Roles whose number of workers is a range."""
        return tuple(role for role in self.roles if role.least)

    def role_size(self, name: str) -> int:
        """Number of workers of a role; 0 for one that the file does not name."""
        return next((role.count for role in self.roles if role.name == name), 0)

    def places(self) -> dict[tuple[str, int], int]:
        """Return ranks in the worlds, by world and global rank; not of worlds whose ranks are assigned."""
        return {
            (world.name, self.rank_of(member)): rank
            for world in self.worlds
            if not world.assigned
            for rank, member in enumerate(world.members)
        }

    def ranks(self) -> dict[str, frozenset[int]]:
        """Return the global ranks of each world's members, by world."""
        return {
            world.name: frozenset(self.rank_of(member) for member in world.members) for world in self.worlds
        }

    def rank_of(self, member: PlannedMember) -> int:
        """Global rank of a member.

        Raises:
            ValueError: the file has no such member.
        """
        first = 0
        for role in self.roles:
            if role.name == member.role and 0 <= member.index < role.count:
                return first + member.index
            first += role.count
        raise ValueError(f"{self.path} has no member {member}")

    def member_at(self, rank: int) -> PlannedMember:
        """Role and index of a global rank.

        Raises:
            ValueError: there is no such rank.
        """
        left = rank
        for role in self.roles:
            if 0 <= left < role.count:
                return PlannedMember(role.name, left)
            left -= role.count
        raise ValueError(f"{self.path} has ranks 0 to {self.world_size - 1}, not {rank}")

    def worlds_of(self, rank: int) -> tuple[PlannedWorld, ...]:
        """Return the worlds that the worker of this global rank is in.

        Raises:
            ValueError: there is no such rank.
        """
        member = self.member_at(rank)
        return tuple(world for world in self.worlds if member in world.members)

    def worlds_without(self, ranks: Collection[int]) -> tuple[str, ...]:
        """Return the names of the worlds that cannot be whole without these global ranks."""
        gone = {self.member_at(rank) for rank in ranks if 0 <= rank < self.world_size}
        return tuple(
            world.name for world in self.worlds if not world.assigned and not gone.isdisjoint(world.members)
        )

    def ranks_of(self, name: str) -> range:
        """Return the global ranks of a role's workers; none for one that the file does not name."""
        first = 0
        for role in self.roles:
            if role.name == name:
                return range(first, first + role.count)
            first += role.count
        return range(0)

    def starting(self, workers: int) -> tuple[int, ...]:
        """Return the global ranks of the workers that a run of one node begins with.

        Each role gets as many as it needs; what is left goes to the roles of a range, in the file's order.

        Args:
            workers: how many, from `least_workers` to `world_size`.
        """
        left, ranks = workers - self.least_workers, list[int]()
        for role in self.roles:
            more = min(left, role.count - role.needed)
            left -= more
            ranks += self.ranks_of(role.name)[: role.needed + more]
        return tuple(ranks)

    def missed(self, ranks: Collection[int]) -> tuple[int, ...]:
        """Return those of these global ranks, which have no worker, that the run cannot do without.

        Of a role of a range these are all of them, where fewer workers than its smallest number are left.
        """
        missed = list[int]()
        for role in self.roles:
            gone = [rank for rank in self.ranks_of(role.name) if rank in ranks]
            if role.count - len(gone) < role.needed:
                missed += gone
        return tuple(missed)
