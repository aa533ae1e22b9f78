"""The end of torch's own default group, where this package has made it for a program."""

from __future__ import annotations

from torch.distributed import distributed_c10d as c10d

from multiworld._c10d.last_holder import last_holder
from multiworld._c10d.nccl.backend import backends_of

__all__ = ["destroy"]


def destroy() -> None:
    """Destroy it and its sub-groups; no backend's destructor runs with the GIL (see `last_holder`).

    Where one did, as the group's last variable went, it could wait for ever for a thread that needs the GIL
    (torch 2.4.0, on a busy machine: in 4 of 25 runs of four processes).
    """
    groups = tuple(c10d._world.pg_map)
    held = [backend for group in groups for backend in backends_of(group, gloo=True)]
    del groups
    c10d.destroy_process_group()
    while held:
        last_holder.let_go(held.pop())
