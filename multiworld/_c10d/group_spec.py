"""The arguments from which a world's process group is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch._C._distributed_c10d import Store

__all__ = ["GroupSpec"]


@dataclass(frozen=True)
class GroupSpec:
    """What a group is built from.

    Attributes:
        world: name.
        generation: 1 or more.
        rank: of this process.
        size: number of members.
        backend: "gloo", "nccl", "cpu:gloo,cuda:nccl", or any name registered with torch.
        device: of this process; None where the backend has none of its own.
        timeout: seconds, of each operation and of building.
        store: where the members of this generation meet; no other generation's keys are in it.
        local_host: numeric address at which gloo listens, unless GLOO_SOCKET_IFNAME says otherwise.
        check_cancelled: called while the group is being built; raises to give up.
        secure: whether gloo may not connect: the lane carries what it can.
        gpu: index of the one NCCL uses where `device` names none; the current one if None.
        fresh_store: makes a store like `store` (the same keys) with a connection of its own, for backends
            that block in C++ (NCCL); `store` if None.
    """

    world: str
    generation: int
    rank: int
    size: int
    backend: str
    device: torch.device | None
    timeout: float
    store: Store
    local_host: str
    check_cancelled: Callable[[], None]
    fresh_store: Callable[[], Store] | None = None
    gpu: int | None = None
    secure: bool = False
