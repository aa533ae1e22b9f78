"""Every collective torch's NCCL backends offer, with values that are compared exactly. One process, many checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from programs.checks import Checks, add_up
from programs.values_move import movements, odds_and_ends
from programs.values_pairs import coalesced, objects, pairs
from programs.values_reduce import reductions, refusals

if TYPE_CHECKING:
    from bed.rank import Rank

__all__ = ["collectives", "groups"]


def collectives(me: Rank) -> None:
    """Everything, in the default group."""
    me.init(me.config["backend"], eager=me.config.get("eager", False), timeout=60)
    checks = Checks(me)
    reductions(checks)
    movements(checks)
    odds_and_ends(checks)
    pairs(checks)
    coalesced(checks)
    objects(checks)
    refusals(checks)
    _finish(me, checks)


def groups(me: Rank) -> None:
    """A part of everything, in groups beside the default one: of all ranks, of some, split off, inside another."""
    eager = me.config.get("eager", False)
    me.init(me.config["backend"], eager=eager, timeout=60)
    everybody = [*range(me.world_size)]
    made = [dist.new_group(everybody), dist.new_group(everybody[1:]), dist.new_group([0, me.world_size - 1])]
    if me.config.get("split"):
        made.append(dist.split_group(split_ranks=[everybody]))
    parts = [Checks(me)]
    odds_and_ends(parts[0])
    for number, group in enumerate(made):
        if group is None or group is dist.GroupMember.NON_GROUP_MEMBER:
            continue
        part = Checks(me, group)
        if part.size > 1:
            odds_and_ends(part)
            coalesced(part)
            objects(part)
        part.done = [f"group {number}: {name}" for name in part.done]
        part.failed = {f"group {number}: {name}": text for name, text in part.failed.items()}
        parts.append(part)
    _finish(me, add_up(parts))


def _finish(me: Rank, checks: Checks) -> None:
    torch.cuda.synchronize()
    bed = me.bed
    pending = bed.count("ops_pending") if bed else 0
    made = bed.count("comms_made") if bed else 0
    checks.tell()
    dist.destroy_process_group()
    left = bed.count("comms") if bed else 0
    me.event("clean", pending=pending, made=made, left=left)
