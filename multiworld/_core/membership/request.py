"""Join request: the arguments of one process's join, validated."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from multiworld._core.membership.ledger import MAX_SIZE, Terms
from multiworld._core.membership.roster import Endpoint, LaneAddress, Member
from multiworld.errors import InvalidJoinError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["MAX_NAME", "JoinRequest", "state_text", "validate"]

MAX_NAME = 200
"""Characters of a world's name, and of a backend's."""
_MAX_STATE = 200
"""Characters of a state's names; longer ones are told apart by what they hash to."""


@dataclass(frozen=True)
class JoinRequest:
    """The arguments of one process's join.

    Attributes:
        world: name, 1 to 200 characters.
        rank: 0 to ``size - 1``; -1 where it is assigned.
        size: how many members the world has; at most, where ranks are assigned.
        backend: as given by the caller; all members must say the same.
        device_type: "cpu", "cuda", ...; all members must say the same.
        process: 32 hex digits, drawn once per process.
        endpoint: where its watchdog listens.
        pid, hostname: for messages.
        hang_timeout: seconds; goes into this process's roster as it is.
        last_generation: the latest generation of this world that the process knows of; 0 if none.
        run: id of the run it belongs to; only members of one run meet. "" is a run as well: of those without
            an id.
        held_rank: the rank it had in `last_generation`; None if it was no member.
        lane: where its lane is connected; None for no lane.
        least: how many members the world has at least, where ranks are assigned; 0 where members choose them.
        seat: its name among the members, where ranks are assigned.
        past: the members of the last generation that it was a member of, where ranks are assigned.
        past_generation: that generation's number; 0 if there was none.
        past_rank: its rank there.
        lost: ranks of members of that generation that it knows to be lost.
        left: those of them that have said themselves that they leave.
        step: which state this process has: how many advances (`World.advance`); None: it has not had the
            world's state yet; a negative number: see `state_sources`.
        torn: whether its state is partly that of a member that was lost meanwhile.
        working: whether that generation still works: the next one is prepared beside it.
        state: of the state that newcomers get, or that it gets: see `state_text`; "" for none.
    """

    world: str
    rank: int
    size: int
    backend: str
    device_type: str
    process: str
    endpoint: Endpoint
    pid: int
    hostname: str
    hang_timeout: float
    last_generation: int = 0
    held_rank: int | None = None
    run: str = ""
    lane: LaneAddress | None = None
    least: int = 0
    seat: str = ""
    past: tuple[Member, ...] = ()
    past_generation: int = 0
    past_rank: int = 0
    lost: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    step: int | None = 0
    working: bool = False
    state: str = ""
    torn: bool = False

    @property
    def assigned(self) -> bool:
        """Whether its rank is assigned."""
        return self.least > 0

    @property
    def slot(self) -> int | str:
        """What no other member has: the seat where ranks are assigned, else the rank."""
        return self.seat or self.rank

    @property
    def turn(self) -> int:
        """Its place among the survivors of the last generation, 0 or more; 0 for a newcomer."""
        return self.past_rank - sum(rank < self.past_rank for rank in self.lost)

    @property
    def place(self) -> str:
        """The slot, in a sentence's beginning."""
        return f"Seat {self.seat!r}" if self.seat else f"Rank {self.rank}"

    @property
    def member(self) -> Member:
        """The process as a member."""
        return Member(
            self.rank, self.process, self.endpoint, self.pid, self.hostname[:64], self.lane, self.seat
        )

    @property
    def terms(self) -> Terms:
        """What all members must say alike."""
        return Terms(self.size, self.backend, self.device_type, self.least, self.state)


def state_text(names: Iterable[object] | None) -> str:
    """Return the names of a world's states as text, whatever their order; None: it is one, without a name."""
    if names is None:
        return "one, without a name"
    text = ", ".join(sorted(ascii(name) for name in names))
    if len(text) > _MAX_STATE:
        text = f"{text[:_MAX_STATE]}..., {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return f"{{{text}}}"


def validate(request: JoinRequest) -> None:
    """Check what can be checked without the others.

    Raises:
        InvalidJoinError: a name, size, rank, backend or generation that no world can have.
    """
    world = request.world
    if not isinstance(world, str) or not 1 <= len(world) <= MAX_NAME:
        raise InvalidJoinError(
            str(world)[:MAX_NAME],
            f"name={str(world)[:50]!r}",
            rule=f"A world's name is a string of 1 to {MAX_NAME} characters",
            next_step="Choose another name, the same on all members",
        )
    if type(request.size) is not int or not 1 <= request.size <= MAX_SIZE:
        raise InvalidJoinError(
            world,
            f"world_size={request.size!r} in world {world!r}",
            rule=f"It is a whole number from 1 to {MAX_SIZE}",
            next_step="Pass the number of members, the same on all of them",
        )
    if request.assigned:
        _validate_assigned(request)
    elif type(request.rank) is not int or not 0 <= request.rank < request.size:
        raise InvalidJoinError(
            world,
            f"rank={request.rank!r} in world {world!r} of {request.size}",
            rule=f"A rank is a whole number from 0 to world_size-1, here {request.size - 1}",
            next_step="Pass another rank, or another world_size on all members",
        )
    for name, text in (("backend", request.backend), ("device", request.device_type)):
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_NAME:
            raise InvalidJoinError(
                world,
                f"{name}={str(text)[:50]!r} in world {world!r}",
                rule=f"It is a string of 1 to {MAX_NAME} characters",
                next_step=f"Pass the {name}'s name, the same on all members",
            )
    if type(request.last_generation) is not int or request.last_generation < 0:
        raise InvalidJoinError(
            world,
            f"last_generation={request.last_generation!r} in world {world!r}",
            rule="It is the number of a generation, or 0",
            next_step="Pass what the roster said",
        )


def _validate_assigned(request: JoinRequest) -> None:
    world = request.world
    if request.least > request.size:
        raise InvalidJoinError(
            world,
            f"world_size={f'{request.least}:{request.size}'!r} in world {world!r}",
            rule="It is MIN:MAX, and MIN is not larger than MAX",
            next_step="Pass the range, the same on all members",
        )
    if not isinstance(request.seat, str) or not 1 <= len(request.seat) <= MAX_NAME:
        raise InvalidJoinError(
            world,
            f"seat={str(request.seat)[:50]!r} in world {world!r}",
            rule=f"It is a string of 1 to {MAX_NAME} characters",
            next_step="Pass a name that no other member has, or none",
        )
