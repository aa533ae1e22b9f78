"""A run of `m8d-run` with the workers of `benchmarks.starts.worker`, whose messages it receives."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

WORKERS = 4
PATIENCE = 120.0
_LOOK = 0.5
"""Seconds between two looks whether the launcher lives."""
_END = 60.0
_WORLDS = """
[roles]
worker = 4

[worlds.all]
members = ["worker:*"]
timeout = 120
"""
_PROGRAM = Path(__file__).with_name("worker.py")


class Launched:
    """One launcher and its workers.

    Args:
        options: of m8d-run, besides the worlds file and the restarts.

    Attributes:
        began: when it was started, monotonic seconds.
    """

    def __init__(self, options: Sequence[str]) -> None:
        self._parts = ExitStack()
        folder = Path(self._parts.enter_context(tempfile.TemporaryDirectory()))
        self._socket = self._parts.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        self._socket.settimeout(_LOOK)
        self._socket.bind(str(folder / "told"))
        (folder / "worlds.toml").write_text(_WORLDS)
        self._pids: dict[int, int] = {}
        self._log = folder / "log"
        log = self._parts.enter_context(self._log.open("w"))
        root = str(Path(__file__).parents[2])
        self.began = time.monotonic()
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "multiworld.run", "--worlds", str(folder / "worlds.toml"),
                "--max-restarts", "1000", "--grace", "5", *options, str(_PROGRAM),
            ],
            env={**os.environ, "M8D_BENCH_SOCKET": str(folder / "told"), "PYTHONPATH": root},
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END)
        finally:
            self._parts.close()

    def whole(self) -> dict[int, dict[str, Any]]:
        """Wait until each worker has done an operation of the newest generation.

        Returns:
            Of each rank: "at" of that operation; of one that was started meanwhile "loaded" and "joined" as
            well (monotonic seconds), and "cpu" seconds of its process until it joined.

        Raises:
            TimeoutError: nothing more was heard of them for 120 s.
            RuntimeError: the launcher has ended. Both have the last lines of its log.
        """
        found: dict[int, dict[str, Any]] = {rank: {} for rank in range(WORKERS)}
        while not all("at" in line for line in found.values()):
            told = json.loads(self._hear())
            line = found[told["rank"]]
            self._pids[told["rank"]] = told["pid"]
            if told["name"] == "whole":
                line["at"] = told["at"]
            else:
                line[told["name"]] = told["at"]
                line["cpu"] = told["cpu"]
        return found

    def _hear(self) -> bytes:
        """The next message of a worker."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            ended = self._process.poll()
            try:
                return self._socket.recv(4096)
            except TimeoutError:
                if ended is not None:
                    raise RuntimeError(f"m8d-run has ended with {ended}:\n{self._tail()}") from None
        raise TimeoutError(f"nothing was heard of the workers for {PATIENCE:g} s:\n{self._tail()}")

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])

    def kill(self, rank: int) -> float:
        """End a worker with SIGKILL; return when, monotonic seconds."""
        at = time.monotonic()
        os.kill(self._pids[rank], signal.SIGKILL)
        return at

    def memory(self) -> float:
        """MB of the launcher's children, what they share with others counted in parts (Pss)."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        kb = 0
        for pid in children:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                kb += int(line.split()[1]) if line.startswith("Pss:") else 0
        return kb / 1000
