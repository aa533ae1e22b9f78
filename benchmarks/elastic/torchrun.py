"""The same loss under plain torchrun: it ends all workers and starts them again.

torchrun of torch 2.13 keeps one store for all attempts, where workers that were started again find the
addresses of those before them and end with "Connection refused". TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives
each attempt its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

WORKERS = 4
_WORKER = Path(__file__).with_name("torchrun_worker.py")
_ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_START = """
import ctypes, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv.pop(1)):
    raise SystemExit("the driver was gone before torchrun began")
runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
"""
"""A driver that was killed leaves no torchrun behind."""
_LOOK = 0.02
_TIMEOUT = 120.0
_END = 30.0


class TorchrunError(Exception):
    """torchrun ended, or its workers were not there in time; the message has its last output."""


class Torchrun:
    """One run of torchrun. Made by `torchrun`.

    Args:
        process: of torchrun.
        folder: where its workers write.
        output: of all of them.
    """

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, output: Path) -> None:
        self._process, self._folder, self._output = process, folder, output

    def workers(self, attempt: int) -> list[dict[str, Any]]:
        """What each worker wrote after its first operation, by rank: "pid", "times".

        Args:
            attempt: how often they were restarted before.

        Raises:
            TorchrunError: they did not.
        """
        paths = [self._folder / f"{attempt}-{rank}" for rank in range(WORKERS)]
        deadline = time.monotonic() + _TIMEOUT
        while not all(path.exists() for path in paths):
            ended = self._process.poll()
            if ended is not None or time.monotonic() > deadline:
                how = f"no workers after {_TIMEOUT:g} s" if ended is None else f"ended with {ended}"
                text = self._output.read_text(encoding="utf-8", errors="replace")
                raise TorchrunError(f"torchrun: {how}; its last output:\n{text[-2000:]}")
            time.sleep(_LOOK)  # the times are the workers' own
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


@contextlib.contextmanager
def torchrun(restarts: int) -> Iterator[Torchrun]:
    """Run four workers on this host with so many restarts, and end all of it."""
    with tempfile.TemporaryDirectory(prefix="m8d-torchrun-") as name:
        folder, output = Path(name), Path(name) / "output"
        command = [
            sys.executable, "-c", _START, str(os.getpid()), "--standalone",
            f"--nproc-per-node={WORKERS}", f"--max-restarts={restarts}", str(_WORKER), name,
        ]  # fmt: skip
        with output.open("wb") as written:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.STDOUT,
                env={**os.environ, **_ENV}, cwd=folder, start_new_session=True,
            )  # fmt: skip
        try:
            yield Torchrun(process, folder, output)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """It ends its workers; where it does not end itself, they end with it."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def lose(run: Torchrun, attempt: int) -> tuple[float, list[dict[str, Any]]]:
    """Kill a worker of that attempt; when, and what those of the next one wrote.

    Raises:
        TorchrunError: see `Torchrun.workers`.
    """
    pid = run.workers(attempt)[attempt % WORKERS]["pid"]
    at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return at, run.workers(attempt + 1)
