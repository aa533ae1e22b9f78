"""Launchers of several nodes, all on this host."""

from __future__ import annotations

import contextlib
import sys

from kits.contract.nodekit import free_port
from kits.contract.runkit import Run


@contextlib.contextmanager
def nodes(folder, count, *rest, options=(), each=lambda number: ()):
    """Launchers on this host; the first serves the rendezvous."""
    endpoint, runs = f"127.0.0.1:{free_port()}", []
    with contextlib.ExitStack() as made:
        for number in range(count):
            home = folder / f"node{number}"
            home.mkdir()
            line = [
                sys.executable, "-m", "multiworld.run", "--nnodes", str(count), "--rdzv-endpoint", endpoint,
                "--rdzv-id", "unequal", "--local-addr", "127.0.0.1", "--rdzv-conf", f"is_host={int(number == 0)}",
                *options, *each(number), *rest,
            ]  # fmt: skip
            run = Run(home, line, {"M8D_HANG_TIMEOUT": "30"}, None)
            made.callback(run.close)
            runs.append(run)
        yield runs
