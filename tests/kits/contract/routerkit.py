"""Worlds of one process for the router's own tests: a state and a group, no peers, no watchdog."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from multiworld._c10d.routing import router

TIMEOUT = dt.timedelta(seconds=20)


class Kit:
    """Opens worlds; `close` forgets them all."""

    def __init__(self) -> None:
        self.states: list[Any] = []
        # Backends outlive their groups, whose destructors run with the GIL held and join threads that want it.
        self.backends: list[Any] = []

    def world(
        self, name: str, *, generation: int = 1, backend: str = "gloo", rank: int = 0, size: int = 1
    ) -> Any:
        state = router.WorldState(name=name, generation=generation)
        self.states.append(state)
        with router.selected(state):
            group_name = c10d._process_group_name(list(range(size)), False)
            group, _ = c10d._new_process_group_helper(
                size, rank, [], dist.Backend(backend), dist.HashStore(), group_name, timeout=TIMEOUT
            )
            c10d._update_default_pg(group)
            c10d._world.pg_group_ranks[group] = {each: each for each in range(size)}
            self.keep(group)
        return state

    def keep(self, group: Any) -> Any:
        self.backends.append(group._get_backend(torch.device("cpu")))
        return group

    def own(self, *, backend: str = "gloo", rank: int = 0, size: int = 1) -> Any:
        """Make torch's own default group."""
        dist.init_process_group(backend, store=dist.HashStore(), rank=rank, world_size=size, timeout=TIMEOUT)
        return self.keep(dist.group.WORLD)

    def close(self) -> None:
        for state in self.states:
            state.forget()
        if dist.is_initialized():
            dist.destroy_process_group()
        self.states.clear()


@contextlib.contextmanager
def routed() -> Iterator[Kit]:
    kit = Kit()
    router.install()
    try:
        yield kit
    finally:
        kit.close()
        router.uninstall()
