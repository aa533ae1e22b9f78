"""Who gets a world's state from whom when a generation begins."""

from __future__ import annotations

__all__ = ["sources"]


def sources(steps: tuple[int | None, ...]) -> dict[int, int]:
    """Return the members whose state is not the latest, each with the one that it gets it from, by rank.

    The latest state is that of the members with the most advances; they are taken in turn. Where all are new,
    rank 0's is taken, as DistributedDataParallel does.

    Args:
        steps: by rank, how many advances each has made; None: it comes new.
    """
    known = [step for step in steps if step is not None]
    latest = [rank for rank, step in enumerate(steps) if step is not None and step == max(known)] or [0]
    behind = [rank for rank in range(len(steps)) if rank not in latest]
    return {rank: latest[at % len(latest)] for at, rank in enumerate(behind)}
