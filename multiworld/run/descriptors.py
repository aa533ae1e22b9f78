"""File descriptors of a launcher: whether it may open as many as it will need.

It is checked before the rendezvous, because torch's store does not report that there are too few: its server
can accept no connection, while its client in the same process tries again for minutes. With fewer still, the
C++ library ends the process.
"""

from __future__ import annotations

import resource

from multiworld._net import procfs
from multiworld.run.errors import RunError

__all__ = ["check_descriptors", "check_limit"]

# Measured with torch 2.13, from the begin of a run: 30 and one for each worker, and 6 with the page.
_OWN = 56
_PER_WORKER = 2


def check_descriptors(workers: int) -> None:
    """Raise `RunError` where this process may open too few to be the launcher of `workers` workers."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        opened = len(procfs.names("/proc/self/fd")) - 1  # and not the folder itself
    except FileNotFoundError:  # a system without /proc
        return
    check_limit(None if limit == resource.RLIM_INFINITY else limit, opened, workers)


def check_limit(limit: int | None, opened: int, workers: int) -> None:
    """Compare a limit with the need of a launcher.

    Args:
        limit: how many descriptors the process may have open (``ulimit -n``); None without a limit.
        opened: how many are open already.
        workers: how many workers the launcher starts.

    Raises:
        RunError: it needs more.
    """
    needed = opened + _OWN + _PER_WORKER * workers
    if limit is not None and limit < needed:
        raise RunError(
            f"this process may have {limit} file descriptors open",
            rule=f"The launcher needs {needed} for {workers} workers",
            next_step=f"Raise the limit before the start: ulimit -n {needed}",
        )
