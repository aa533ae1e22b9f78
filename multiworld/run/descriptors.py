"""File descriptors of a launcher: whether it may open as many as it will need.

It is checked before the rendezvous, because torch's store does not report that there are too few: its server
can accept no connection, while its client in the same process tries again for minutes. With fewer still, the
C++ library ends the process.
"""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.multiprocessing.api import to_map

from multiworld._net import procfs
from multiworld.run.errors import RunError

if TYPE_CHECKING:
    import argparse

__all__ = ["check_descriptors", "check_limit", "of_workers"]

# Measured with torch 2.13, from the begin of a run: 30 and one for each worker, and 6 with the page.
_OWN = 56

_OF_PROGRAM = 2
"""The process's own, and its connection to the control socket."""
_OF_FUNCTION = 6
"""The same, and the pipes of multiprocessing."""


def check_descriptors(workers: int, args: argparse.Namespace, *, functions: bool) -> None:
    """Raise `RunError` where this process may open too few to be the launcher of `workers` workers.

    Args:
        workers: how many this launcher has at most.
        args: torchrun's options.
        functions: as for `of_workers`.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        opened = len(procfs.names("/proc/self/fd")) - 1  # and not the folder itself
    except FileNotFoundError:  # a system without /proc
        return
    theirs = of_workers(workers, args, functions=functions)
    check_limit(None if limit == resource.RLIM_INFINITY else limit, opened, workers, theirs)


def of_workers(workers: int, args: argparse.Namespace, *, functions: bool) -> int:
    """Return how many descriptors a launcher has open for so many workers and their output.

    Args:
        workers: how many.
        args: torchrun's options.
        functions: whether they are functions (--run-path), which open their log files themselves.
    """
    alone, file = (_OF_FUNCTION, 0) if functions else (_OF_PROGRAM, 1)
    filters = (getattr(args, f"duplicate_{name}_filters", None) for name in ("stdout", "stderr"))
    readers = 2 if any(filters) else 1
    redirected, teed = (to_map(Std.from_str(said), workers) for said in (args.redirects, args.tee))
    shown = {int(rank) for rank in (args.local_ranks_filter or "").split(",") if rank}
    total = alone * workers
    for rank in range(workers):
        written, read = redirected[rank] | teed[rank], teed[rank]
        if shown and rank not in shown:  # each stream has a file: its own, or /dev/null
            written, read = Std.ALL, Std.NONE
        total += file * int(written).bit_count() + readers * int(read).bit_count()
    return total


def check_limit(limit: int | None, opened: int, workers: int, theirs: int) -> None:
    """Compare a limit with the need of a launcher.

    Args:
        limit: how many descriptors the process may have open (``ulimit -n``); None without a limit.
        opened: how many are open already.
        workers: how many workers the launcher has at most.
        theirs: how many it opens for them.

    Raises:
        RunError: it needs more.
    """
    needed = opened + _OWN + theirs
    if limit is not None and limit < needed:
        raise RunError(
            f"this process may have {limit} file descriptors open",
            rule=f"The launcher needs {needed} for {workers} workers",
            next_step=f"Raise the limit before the start: ulimit -n {needed}",
        )
