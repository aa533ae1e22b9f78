"""Sources of a world's state when a generation begins: who gets it from whom.

One number says which state a member has: how many advances it has made; None if it comes new, without one.
The state of a member that comes back after the others went on without it is `outdated`, a negative number:
it counts only where no member has a later one, as after the loss of those that went on.
"""

from __future__ import annotations

__all__ = ["advances", "latest", "outdated", "sources"]


def outdated(state: int | None) -> int | None:
    """Return what says that a state may have been left behind; one without an advance is as good as none."""
    if not state or state < 0:
        return state or None
    return -1 - state


def advances(state: int) -> int:
    """Return how many advances a state has, left behind or not."""
    return state if state >= 0 else -1 - state


def latest(steps: tuple[int | None, ...]) -> int:
    """Return how many advances the world's state has; 0 where all members come new."""
    known = [each for each in steps if each is not None]
    return advances(max(known, key=_order)) if known else 0


def sources(steps: tuple[int | None, ...], torn: tuple[int, ...] = ()) -> dict[int, int]:
    """Return the members whose state is not the latest, each with the one that it gets it from, by rank.

    The latest state is that of the members with the most advances; they are taken in turn. Where all are new,
    rank 0's is taken, as DistributedDataParallel does, or that of the first one whose own is not torn.

    Args:
        steps: by rank, which state each has; see the module.
        torn: ranks of members whose state came in part. There is no world of such members alone.
    """
    whole = {rank: step for rank, step in enumerate(steps) if rank not in torn}
    known = [step for step in whole.values() if step is not None]
    best = max(known, key=_order) if known else None
    having = [rank for rank, step in whole.items() if step == best] if known else [*whole][:1]
    behind = [rank for rank in range(len(steps)) if rank not in having]
    return {rank: having[at % len(having)] for at, rank in enumerate(behind)}


def _order(state: int) -> tuple[bool, int]:
    return state >= 0, advances(state)
