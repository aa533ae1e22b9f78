"""`init_custom_process_group`: what frameworks take instead of their copies of torch's private functions.

See docs/rl-weights.md. Importing it loads torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

import torch

from multiworld import settings
from multiworld._c10d.custom_group import CustomGroup
from multiworld._join.join import join
from multiworld.errors import InvalidJoinError

if TYPE_CHECKING:
    import datetime as dt

    from torch._C._distributed_c10d import ProcessGroup, Store

__all__ = ["init_custom_process_group"]

_UNNAMED = "custom_process_group"
"""Name of the world of a group that is given none."""


def init_custom_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: float | dt.timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str | None = None,
    pg_options: Any | None = None,
) -> ProcessGroup:
    """Join a process group beside torch's default group, or without one; returns when all are there.

    It stands in for the function of this name, or ``init_process_group``, that slime, AReaL, verl, OpenRLHF,
    NeMo-RL and TRL carry along. The group is a world: a member that crashes, hangs or leaves breaks this
    group alone, and every operation of it raises `multiworld.BrokenWorldException` in the others, from then
    on.

    Take it as ``torch.distributed.broadcast(t, src, group=group)``, ``barrier``, ``all_reduce`` and so on, in
    and outside of blocks; ``src`` and ``dst`` are ranks of this group. ``group.world`` is its
    `multiworld.World`. ``torch.distributed.destroy_process_group(group)`` leaves and frees it. After that, or
    after a breakage, call this again on all members, with the same `group_name` or another one.

    Args:
        backend: as for `multiworld.join`; None takes gloo for CPU tensors, and nccl for GPUs where there are
            any.
        init_method: "tcp://host:port", which rank 0 serves, "file:///path" or "env://"; None is "env://"
            where no `store` is given. ``?rank=0&world_size=2`` at its end, RANK and WORLD_SIZE with "env://",
            count where these arguments are not given.
        timeout: seconds, or a timedelta, for this call and for each operation; None takes M8D_JOIN_TIMEOUT
            (30), where the copies take torch's 30 minutes.
        world_size: number of members.
        rank: of this process, from 0 on.
        store: a ``torch.distributed.Store`` in the place of `init_method`.
        group_name: of the world: the same on all members; None is one name for all such groups.
        pg_options: None. A world's groups are made with the backend's defaults.

    Raises:
        InvalidJoinError: an argument breaks a rule, or this process is in an active group of that name.
        JoinError: see `multiworld.join`: not all came in time, and so on. Nothing half-made is left.
    """
    name = _UNNAMED if group_name is None else str(group_name)

    def refuse(value: str, rule: str, next_step: str) -> InvalidJoinError:
        return InvalidJoinError(name, f"group {name!r}: {value}", rule=rule, next_step=next_step)

    if pg_options is not None:
        raise refuse(
            f"pg_options of type {type(pg_options).__name__}",
            "A world's groups are made with the backend's defaults",
            "Give none; NCCL's settings are taken from its environment variables, NCCL_...",
        )
    if store is not None and init_method is not None:
        raise refuse(
            f"init_method {init_method!r} and a store", "One of them says where members meet", "Give one"
        )
    address: str | Store | None = store
    if store is None:
        address, query = _address(init_method)
        from_environment = address is None
        rank = _number(rank, query.get("rank"), "RANK" if from_environment else None)
        world_size = _number(world_size, query.get("world_size"), "WORLD_SIZE" if from_environment else None)
    if rank < 0 or world_size < 1:
        raise refuse(
            f"rank {rank} of {world_size}",
            "Each member has a rank from 0 on, and knows the number of members",
            "Give rank and world_size",
        )
    world = join(name, rank, world_size, address, _backend(backend), timeout)
    try:
        group = CustomGroup(world, lambda: world._gen, world.close)  # noqa: SLF001  (as World.elastic_group)
        group.enter(world.backend)
    except BaseException:  # also Ctrl-C: no caller has the group that would leave the world
        world.close()
        raise
    return group


def _address(init_method: str | None) -> tuple[str | None, dict[str, str]]:
    """Where members meet, None for the environment's address; and what else the address says."""
    parts = urlsplit(init_method or "env://")
    query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
    if parts.scheme == "env":
        return None, query
    return urlunsplit((parts.scheme, parts.netloc, parts.path, "", "")), query


def _number(given: int, written: str | None, variable: str | None) -> int:
    """A number that is given, written at the address, or in the environment; -1 if it is nowhere."""
    if given >= 0:
        return given
    text = written or (settings.environment(variable) if variable is not None else None) or ""
    return int(text) if text.isascii() and text.isdigit() else -1


def _backend(backend: str | None) -> str:
    if backend is None:
        return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    return str(backend)
