"""Groups inside NCCL worlds: each gets a communicator of its own, where torch would split the world's.

Torch splits it in C++, and waits there for all members of the world. Where one stands still meanwhile,
those that are not in the new group wait with the GIL held (`perform_nocolor_split`, seen with 2.14.1): all
worlds of the process stand still with it. And an abort of the communicator that is being split can end the
process (SIGSEGV, seen with 2.12.1 under a mesh of two dimensions). The connection of a new communicator is
given up with the world.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import device_mesh

from multiworld._c10d.nccl import backend as nccl
from multiworld._c10d.routing.selection import current, selected
from multiworld._c10d.routing.state import StandIn, owner_of

if TYPE_CHECKING:
    from multiworld._c10d.monkeypatch import Patches

__all__ = ["install"]


def install(patches: Patches) -> None:
    """Replace torch's functions wherever they have names.

    Args:
        patches: the router's, which undoes them.
    """
    if "_get_split_source" in vars(c10d):
        patches.set(c10d, "_get_split_source", _not_split(vars(c10d)["_get_split_source"]))
    for module in (c10d, dist, device_mesh):
        if "split_group" in vars(module):
            patches.set(module, "split_group", _splitting(vars(module)["split_group"]))


def _not_split(original: Any) -> Any:
    @functools.wraps(original)
    def source(pg: Any) -> Any:
        owner = owner_of(pg)
        return original(pg) if owner is None or owner.traffic is None else None

    return source


def _splitting(original: Any) -> Any:
    names = original.__code__.co_names
    outside = dist.GroupMember.NON_GROUP_MEMBER if "GroupMember" in names else None
    ordered: dict[str, Any] = (
        {} if "sorted" in names else {"sort_ranks": False}
    )  # 2.14 and newer keep the order of ranks

    @functools.wraps(original)
    def split_group(
        parent_pg: Any = None, split_ranks: Any = None, timeout: Any = None, pg_options: Any = None,
        group_desc: str | None = None, **more: Any,
    ) -> Any:  # fmt: skip
        owner = current() if parent_pg is None else owner_of(parent_pg)
        if owner is None or owner.traffic is None:
            return original(parent_pg, split_ranks, timeout, pg_options, group_desc, **more)
        parent = owner.group if parent_pg is None or isinstance(parent_pg, StandIn) else parent_pg
        # What torch refuses, or has beside, is torch's.
        if not nccl.has_nccl(parent) or not _are_parts(split_ranks) or any(more.values()):
            return original(parent_pg, split_ranks, timeout, pg_options, group_desc, **more)
        with selected(owner):
            ranks, mine = dist.get_process_group_ranks(parent), dist.get_rank(parent)
            part = next((each for each in split_ranks if mine in each), None)
            if part is None:
                return outside
            return dist.new_group(
                [ranks[each] for each in part], timeout, c10d._world.pg_map[parent][0], pg_options,
                use_local_synchronization=True, group_desc=group_desc, **ordered,
            )  # fmt: skip

    return split_group


def _are_parts(split_ranks: Any) -> bool:
    return bool(split_ranks) and all(each and len(each) == len(set(each)) for each in split_ranks)
