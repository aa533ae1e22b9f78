"""Who gets a world's state from whom when a generation begins."""

from __future__ import annotations

__all__ = ["sources"]


def sources(steps: tuple[int | None, ...], torn: tuple[int, ...] = ()) -> dict[int, int]:
    """Return the members whose state is not the latest, each with the one that it gets it from, by rank.

    The latest state is that of the members with the most advances; they are taken in turn. Where all are new,
    rank 0's is taken, as DistributedDataParallel does, or that of the first one whose own is not torn.

    Args:
        steps: by rank, how many advances each has made; None: it comes new.
        torn: ranks of members whose state came in part. There is no world of such members alone.
    """
    whole = {rank: step for rank, step in enumerate(steps) if rank not in torn}
    known = [step for step in whole.values() if step is not None]
    latest = [rank for rank, step in whole.items() if step is not None and step == max(known)] or [*whole][:1]
    behind = [rank for rank in range(len(steps)) if rank not in latest]
    return {rank: latest[at % len(latest)] for at, rank in enumerate(behind)}
