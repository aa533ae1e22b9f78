"""Starting the other processes of an example with one command.

They are forked from a server of multiprocessing's, which has loaded torch once for all of them: to load it takes seconds.
"""

from __future__ import annotations

import _ctrl_c

import multiprocessing
import runpy
import sys
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerProcess

import torch.distributed as dist

from _common import BROKE, say

__all__ = ["Members"]


def _run(words: list[str]) -> None:
    """Be this same program, with `words` on its command line."""
    sys.argv[1:] = words
    runpy.run_path(sys.argv[0], run_name="__main__")


class Members:
    """The other processes of an example: this same program, started with --rank. None outlives the `with`.

    Args:
        loads: modules that each of them needs later, beside what the program imports.
    """

    def __init__(self, *loads: str) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "multiworld", *loads])
        # Bound to port 0 and then told to the others: there is no moment in which somebody else can take the port.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.running: dict[int, ForkServerProcess] = {}

    def __enter__(self) -> Members:
        with _ctrl_c.kept_back():  # it lets Ctrl-C through, as the first start would without it
            resource_tracker.ensure_running()
        _ctrl_c.raises()
        return self

    def start(self, rank: int, *more: str) -> None:
        """Start process `rank`, with `more` on its command line."""
        say("process %d starts", rank)
        own = ["--rank", str(rank), "--addr", "127.0.0.1", "--port", str(self.store.port)]
        with _ctrl_c.kept_back():
            process = self._context.Process(target=_run, args=([*sys.argv[1:], *own, *more],))
            process.start()
            self.running[rank] = process

    def kill(self, rank: int) -> None:
        """End process `rank` as a crash would."""
        say("kill -9 for process %d", rank)
        self.running[rank].kill()
        self.running.pop(rank).join()

    def wait(self) -> int:
        """Wait for the end of all; 0 if all went well, whoever was killed or lost its world aside."""
        codes = {}
        for rank, process in self.running.items():
            process.join()
            codes[rank] = code = process.exitcode or 0
            if code:
                how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
                say("process %d %s", rank, how)
        return max(0 if code == BROKE else code for code in [0, *codes.values()])

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        with _ctrl_c.kept_back():
            for process in self.running.values():
                process.kill()
            for process in self.running.values():
                process.join()
        _ctrl_c.ends_at_once()
        return kind is KeyboardInterrupt
