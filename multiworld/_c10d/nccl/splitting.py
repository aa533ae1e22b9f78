"""Groups inside NCCL worlds: each gets a communicator of its own, where torch would split the world's.

Torch splits it in C++, and waits there for all members of the world. Where one stands still meanwhile,
those that are not in the new group wait with the GIL held (`perform_nocolor_split`, seen with 2.14.1): all
worlds of the process stand still with it. And an abort of the communicator that is being split can end the
process (SIGSEGV, seen with 2.12.1 under a mesh of two dimensions). The connection of a new communicator is
given up with the world.

A split has no use for a group's name; a connection meets under it, in the store. Torch would name a group
of some members by how many groups each of them has, which may differ. So a part is named by its parent, and
by how often that was split.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import device_mesh

from multiworld._c10d.nccl import backend as nccl
from multiworld._c10d.routing.selection import current, selected
from multiworld._c10d.routing.state import StandIn, owner_of

if TYPE_CHECKING:
    from multiworld._c10d.monkeypatch import Patches
    from multiworld._c10d.routing.state import WorldState

__all__ = ["install"]

_splits: weakref.WeakKeyDictionary[WorldState, Counter[str]] = weakref.WeakKeyDictionary()
"""How often each group of a world was split, by name: all its members do that in the same order."""

_name: contextvars.ContextVar[str] = contextvars.ContextVar("m8d_name_of_part")
"""Of the group that is being made."""


def install(patches: Patches) -> None:
    """Replace torch's functions wherever they have names.

    Args:
        patches: the router's, which undoes them.
    """
    if "_get_split_source" in vars(c10d):
        patches.set(c10d, "_get_split_source", _not_split(vars(c10d)["_get_split_source"]))
    patches.set(c10d, "_process_group_name", _named(vars(c10d)["_process_group_name"]))
    for module in (c10d, dist, device_mesh):
        if "split_group" in vars(module):
            patches.set(module, "split_group", _splitting(vars(module)["split_group"]))


def _not_split(original: Any) -> Any:
    @functools.wraps(original)
    def source(pg: Any, *more: Any, **named: Any) -> Any:  # 2.15 gives the wanted backend, too
        owner = owner_of(pg)
        return original(pg, *more, **named) if owner is None or owner.traffic is None else None

    return source


def _named(original: Any) -> Any:
    @functools.wraps(original)
    def process_group_name(*args: Any, **kwargs: Any) -> Any:
        return _name.get("") or original(*args, **kwargs)

    return process_group_name


def _splitting(original: Any) -> Any:
    names = inspect.unwrap(original).__code__.co_names
    outside = dist.GroupMember.NON_GROUP_MEMBER if "GroupMember" in names else None
    # 2.14 and newer keep the order of ranks.
    ordered: dict[str, Any] = {} if "sorted" in names else {"sort_ranks": False}

    @functools.wraps(original)
    def split_group(
        parent_pg: Any = None, split_ranks: Any = None, timeout: Any = None, pg_options: Any = None,
        group_desc: str | None = None, backend: Any = None,
    ) -> Any:  # fmt: skip
        owner = current() if parent_pg is None else owner_of(parent_pg)
        parent = owner.group if owner is not None and _is_default(parent_pg) else parent_pg
        wanted = None
        if owner is not None and owner.traffic is not None and nccl.has_nccl(parent):
            wanted = _backends(owner.pg_map[parent][0], backend)
        # What torch refuses is torch's; older ones do not know the last argument.
        if owner is None or wanted is None or not _are_parts(split_ranks, parent.size()):
            more = {} if backend is None else {"backend": backend}
            return original(parent_pg, split_ranks, timeout, pg_options, group_desc, **more)
        with selected(owner):
            c10d._get_default_group()  # raises where the world is over, in members of no part, too
            count, whole = _splits.setdefault(owner, Counter()), owner.pg_names[parent]
            count[whole] += 1
            ranks, mine = dist.get_process_group_ranks(parent), dist.get_rank(parent)
            part = next((each for each in split_ranks if mine in each), None)
            if part is None:
                return outside
            named = _name.set(f"{whole}:{count[whole]}:{part[0]}")
            try:
                return dist.new_group(
                    [ranks[each] for each in part], timeout, wanted, pg_options,
                    use_local_synchronization=True, group_desc=group_desc, **ordered,
                )  # fmt: skip
            finally:
                _name.reset(named)

    return split_group


def _is_default(group: Any) -> bool:
    return group is None or isinstance(group, StandIn)


def _backends(have: str, wanted: Any) -> str | None:
    """Return those of a group's backends, "cpu:gloo,cuda:nccl", that are wanted; None where torch refuses."""
    if wanted is None or set(str(wanted).lower().split(",")) in ({*have.split(",")}, {f"cuda:{have}"}):
        return have
    each = [part for part in have.split(",") if str(wanted).lower() in {part, part.rpartition(":")[2]}]
    return ",".join(each) or None


def _are_parts(split_ranks: Any, size: int) -> bool:
    every = set(range(size))
    return bool(split_ranks) and all(
        each and len(each) == len(set(each)) and every.issuperset(each) for each in split_ranks
    )
