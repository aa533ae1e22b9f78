"""A rank without torch, for test_bench_ranks: it answers, fails, dies, hangs, forks."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def make(rank: int, count: int, args: dict[str, object]) -> Toy:
    if args.get("refuse") == rank:
        raise LookupError("nothing to serve")
    sys.stdout.write(f"rank {rank} of {count} made" + "\n")
    return Toy(rank, count, args)


class Toy:
    def __init__(self, rank: int, count: int, args: dict[str, object]) -> None:
        self._told = [rank, count, args]

    def told(self) -> list[object]:
        return self._told

    def add(self, one: float, other: float) -> float:
        return one + other

    def long(self, length: int) -> str:
        sys.stdout.write("noise on standard output\n")
        return "x" * length

    def path(self) -> list[str]:
        return [str(Path.cwd()), *sys.path]

    def input(self) -> str:
        return sys.stdin.read()

    def fail(self) -> None:
        raise ValueError("fails on purpose")

    def no_json(self, kind: str) -> object:
        return {"object": object(), "nan": float("nan")}[kind]

    def die(self) -> None:
        sys.stdout.write("last words\n")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self, status: int) -> None:
        os._exit(status)

    def hang(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._blocked()

    def _blocked(self) -> None:
        while True:
            time.sleep(3600)

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def fork(self) -> int:
        child = os.fork()
        if not child:
            self._blocked()
        return child

    def fork_and_die(self) -> None:
        self.fork()
        self.die()
