"""Scaling of a running run: the workers that ``m8d-run scale`` starts and retires. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from multiworld.run.errors import ArgumentsError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from multiworld.run.worldsfile.worlds_plan import Role, WorldsPlan

__all__ = [
    "DRAIN",
    "POLICIES",
    "Change",
    "Command",
    "Worker",
    "changed",
    "choose",
    "read",
    "spared",
    "spares",
]

DRAIN = 60.0
"""Seconds that a retired worker has to leave its worlds and to end, by default."""

_LONGEST_DRAIN = 10_000_000.0
_DIGITS = 9


@dataclass(frozen=True)
class Worker:
    """A worker of this node that is to go on.

    Attributes:
        rank: global rank.
        started: monotonic seconds of its process's start; infinity: none runs, it waits to be started again.
        member: whether it has reported an active world.
    """

    rank: int
    started: float
    member: bool


_KEYS: dict[str, Callable[[Worker], tuple[float, int]]] = {
    "newest": lambda each: (-each.started, -each.rank),
    "oldest": lambda each: (each.started, each.rank),
    "highest": lambda each: (-each.rank, 0),
}
POLICIES = tuple(_KEYS)
"""Who is retired first: who was started last, who was started first, or who has the highest rank."""


@dataclass(frozen=True)
class Command:
    """A request to change the number of workers.

    Attributes:
        worker: rank, or "role:index", of one to retire; None: `workers`, or `size`, is to be reached.
        role: of which the number changes; None: the only one of a range.
        workers: number of workers of the role on this node.
        world, size: number of members of a world instead.
        policy: one of `POLICIES`.
        drain: seconds that a retired worker has before it gets SIGTERM.
    """

    worker: str | None = None
    role: str | None = None
    workers: int | None = None
    world: str | None = None
    size: int | None = None
    policy: str = POLICIES[0]
    drain: float = DRAIN


@dataclass(frozen=True)
class Change:
    """What a command comes to.

    Attributes:
        start, retire: global ranks.
        drain: see `Command`.
    """

    start: tuple[int, ...] = ()
    retire: tuple[int, ...] = ()
    drain: float = DRAIN


def read(said: dict[str, Any]) -> Command:
    """Return the command of a message.

    Raises:
        ArgumentsError: it has unknown keys, or values of a wrong type or range.
    """
    command = Command(**{key: value for key, value in said.items() if key in Command.__annotations__})
    texts = (command.worker, command.role, command.world, command.policy)
    numbers = (command.workers, command.size)
    whole = all(each is None or (type(each) is int and each >= 0) for each in numbers)
    if (
        not set(said) <= set(Command.__annotations__)
        or not all(each is None or isinstance(each, str) for each in texts)
        or not whole
        or type(command.drain) not in {int, float}
        or not 0 <= command.drain <= _LONGEST_DRAIN
        or (command.world is None) != (command.size is None)
        or sum(each is not None for each in (command.worker, command.workers, command.size)) != 1
    ):
        raise ArgumentsError(
            f"command {str(said)[:200]}",
            rule="It names a worker, a number of workers, or a world and its size",
            next_step="See m8d-run scale --help, and m8d-run retire --help",
        )
    if command.policy not in POLICIES:
        raise ArgumentsError(
            f"--policy {command.policy}",
            rule=f"It is one of {', '.join(POLICIES)}",
            next_step="Give one of them",
        )
    return command


def choose(workers: Collection[Worker], number: int, policy: str) -> tuple[int, ...]:
    """Return the ranks of `number` workers to retire: first those in no world, whom no other worker misses.

    Args:
        workers: to choose among.
        number: how many.
        policy: one of `POLICIES`, among those that are alike in that.
    """
    ordered = sorted(workers, key=lambda each: (each.member, _KEYS[policy](each)))
    return tuple(each.rank for each in ordered[:number])


def changed(
    command: Command,
    plan: WorldsPlan | None,
    places: Sequence[int],
    workers: Sequence[Worker],
    busy: Collection[int],
    *,
    nodes: int,
    vacant: Collection[int] = (),
) -> Change:
    """Return who is to be started, and who to be retired.

    Args:
        command: the request.
        plan: of the worlds file; None without one.
        places: ranks that this node has, or may have, a worker for.
        workers: of this node that are to go on.
        busy: ranks whose retired process has not ended yet: they are taken last.
        nodes: number of nodes that have workers; 0: this one has none, or they have ended.
        vacant: ranks that no node has workers for. Those of other nodes count as there.

    Raises:
        ArgumentsError: the run cannot be changed like this.
    """
    _require(nodes > 0, "this node has no workers", "Workers that run can be scaled")
    if plan is None or not plan.changing:
        raise ArgumentsError(
            "this run has no role of a range",
            rule="m8d-run starts and retires workers of roles whose number is a range",
            next_step="Give a role one in the worlds file, as in \"trainer = '2:8'\"",
        )
    if command.worker is not None:
        rank = _rank(command.worker, plan)
        _require(rank in {each.rank for each in workers}, f"worker {command.worker}", "It runs on this node")
        role = plan.member_at(rank).role
        _require(
            role in {each.name for each in plan.changing},
            f"worker {command.worker}",
            "Its role is of a range",
        )
        retire: tuple[int, ...] = (rank,)
        start: tuple[int, ...] = ()
    else:
        found, wanted = _wanted(command, plan, nodes)
        ours = [each for each in workers if each.rank in plan.ranks_of(found.name)]
        here = [rank for rank in places if rank in plan.ranks_of(found.name)]
        lowest = found.needed if nodes == 1 else 0
        _require(
            lowest <= wanted <= len(here),
            f"{wanted} workers of role {found.name}",
            f"This node may have {lowest} to {len(here)} of them",
        )
        taken = {each.rank for each in ours}
        free = sorted((rank for rank in here if rank not in taken), key=lambda rank: (rank in busy, rank))
        start = tuple(sorted(free[: max(0, wanted - len(ours))]))
        retire = choose(ours, len(ours) - wanted, command.policy) if wanted < len(ours) else ()
    for rank in retire[:1]:
        left = {each.rank for each in workers} - set(retire)
        whose = next(each for each in plan.roles if each.name == plan.member_at(rank).role)
        names = ", ".join(str(plan.member_at(each)) for each in retire)
        rule = f"Role {whose.name} has at least {whose.needed} workers"
        _require(_enough(plan, whose, set(places) - left | set(vacant)), f"retiring {names}", rule)
    return Change(start, retire, command.drain)


def spared(
    plan: WorldsPlan | None, places: Sequence[int], workers: Sequence[Worker], vacant: Collection[int] = ()
) -> tuple[int, ...]:
    """Return the ranks of all workers of this node that the run can do without; the newest go first."""
    kept = {each.rank for each in workers}
    if plan is None:
        return ()
    for role in plan.changing:
        ours = [each for each in workers if each.rank in plan.ranks_of(role.name)]
        for rank in choose(ours, len(ours), POLICIES[0]):
            if _enough(plan, role, set(places) - (kept - {rank}) | set(vacant)):
                kept.discard(rank)
    return tuple(each.rank for each in workers if each.rank not in kept)


def spares(
    plan: WorldsPlan,
    rank: int,
    places: Sequence[int],
    others: Sequence[Worker],
    vacant: Collection[int] = (),
) -> bool:
    """Whether a run goes on with these other workers of this node, when one has failed for good.

    Its role has enough workers, and one of them is here: what fails on all of them ends the run.
    """
    role = next(each for each in plan.roles if each.name == plan.member_at(rank).role)
    here = {each.rank for each in others}
    gone = set(places) - here | set(vacant)
    return bool(here & set(plan.ranks_of(role.name))) and _enough(plan, role, gone)


def _enough(plan: WorldsPlan, role: Role, gone: Collection[int]) -> bool:
    """Whether a role has enough workers without those of these ranks."""
    return not set(plan.missed(gone)) & set(plan.ranks_of(role.name))


def _wanted(command: Command, plan: WorldsPlan, nodes: int) -> tuple[Role, int]:
    """Return the role whose number changes, and the number on this node."""
    if command.world is None or command.size is None:
        names = [role.name for role in plan.changing]
        name = command.role or (names[0] if len(names) == 1 else "")
        _require(name in names, f"--role {name or 'is missing'}", f"It is one of {', '.join(names)}")
        return plan.changing[names.index(name)], command.workers or 0
    _require(
        nodes == 1, f"--world {command.world} on {nodes} nodes", "Each node scales its own --workers N there"
    )
    worlds = {world.name: world for world in plan.worlds if world.assigned}
    _require(
        command.world in worlds, f"--world {command.world}", f"It is one of {', '.join(worlds) or 'none'}"
    )
    world = worlds[command.world]
    roles = [role for role in plan.changing if any(each.role == role.name for each in world.members)]
    listed = [sum(each.role == role.name for each in world.members) for role in roles]
    _require(
        len(roles) == 1 and listed == [roles[0].count],
        f"--world {command.world}",
        "All workers of one role of a range are its members",
        next_step="Scale the role: --role ROLE --workers N",
    )
    _require(
        world.least <= command.size <= world.most,
        f"--world {command.world} --size {command.size}",
        f"Its size is {world.least} to {world.most}",
    )
    return roles[0], command.size - (len(world.members) - roles[0].count)


def _rank(worker: str, plan: WorldsPlan) -> int:
    role, named, index = worker.rpartition(":")
    ranks = plan.ranks_of(role) if named else range(plan.world_size)
    short = index.isascii() and index.isdigit() and len(index) <= _DIGITS
    ok = short and int(index) < len(ranks)
    _require(ok, f"worker {worker!r}", 'It is a rank, or "role:index" of the worlds file')
    return ranks[int(index)]


def _require(ok: bool, value: str, rule: str, next_step: str = "See m8d-run status") -> None:
    if not ok:
        raise ArgumentsError(value, rule=rule, next_step=next_step)
