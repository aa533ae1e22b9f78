"""Starting the other processes of an example with one command."""

from __future__ import annotations

import _ctrl_c

import subprocess
import sys

import torch.distributed as dist

from _common import BROKE, say

__all__ = ["Members"]


class Members:
    """The other processes of an example: this same program, started with --rank. None outlives the `with`."""

    def __init__(self) -> None:
        # Bound to port 0 and then told to the others: there is no moment in which somebody else can take the port.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.running: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Members:
        _ctrl_c.raises()
        return self

    def start(self, rank: int, *more: str) -> None:
        """Start process `rank`, with `more` on its command line."""
        say("process %d starts", rank)
        own = ["--rank", str(rank), "--addr", "127.0.0.1", "--port", str(self.store.port)]
        with _ctrl_c.kept_back():
            self.running[rank] = subprocess.Popen([sys.executable, sys.argv[0], *sys.argv[1:], *own, *more])

    def kill(self, rank: int) -> None:
        """End process `rank` as a crash would."""
        say("kill -9 for process %d", rank)
        self.running[rank].kill()
        self.running.pop(rank).wait()

    def wait(self) -> int:
        """Wait for the end of all; 0 if all went well, whoever was killed or lost its world aside."""
        codes = {rank: process.wait() for rank, process in self.running.items()}
        for rank, code in codes.items():
            if code:
                how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
                say("process %d %s", rank, how)
        return max(0 if code == BROKE else code for code in [0, *codes.values()])

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        with _ctrl_c.kept_back():
            for process in self.running.values():
                process.kill()
            for process in self.running.values():
                process.wait()
        _ctrl_c.ends_at_once()
        return kind is KeyboardInterrupt
