"""Processes of MPI to measure in, beside the ranks of the benchmarks."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measuring.ranks import END_SECONDS, ROOT

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

OPEN_MPI = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
"""Options of Open MPI's mpirun: as the ranks of the benchmarks run, wherever the system puts them."""
START_SECONDS = 60.0
LOOK = 0.2
"""Seconds between two looks whether mpirun lives, while its processes start."""


class MpiError(Exception):
    """MPI's processes did not start, or one has failed; the message has what they printed."""


def missing() -> str:
    """Why MPI cannot be measured here; "" if it can."""
    if shutil.which("mpirun") is None:
        return "there is no mpirun (Debian: openmpi-bin)"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed (pip install mpi4py)"
    return ""


class MpiRanks:
    """`count` processes under one mpirun; a context manager that leaves none of them behind.

    Attributes:
        library: MPI's name and version.

    Raises:
        MpiError: (on entering) they did not start.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._streams: dict[int, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="m8d-mpi-")
        self._output = Path(self._folder.name) / "output"
        self.library = ""

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def rounds(self, timeout: float = 300.0, **asked: Any) -> list[dict[str, Any]]:
        """What all of them answer to `benchmarks.limits.mpi_rank.Member.rounds`, by rank.

        Raises:
            MpiError: one has failed, or not answered in time.
        """
        line = json.dumps(asked).encode() + b"\n"
        try:
            for connection, stream in self._streams.values():
                connection.settimeout(timeout)
                stream.write(line)
                stream.flush()
            told = [self._streams[rank][1].readline() for rank in range(self._count)]
        except OSError as error:
            raise MpiError(f"MPI did not answer {asked}: {error}\n{self._printed()}") from error
        if not all(told):
            raise MpiError(f"MPI failed at {asked}:\n{self._printed()}")
        return [json.loads(each) for each in told]

    def close(self) -> None:
        """End them: three seconds of time, then SIGKILL."""
        for connection, stream in self._streams.values():
            stream.close()
            connection.close()
        self._streams.clear()
        process, self._process = self._process, None
        if process is not None:
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its processes end with their connections
                process.wait()
        self._folder.cleanup()

    def _start(self) -> None:
        path = f"{self._folder.name}/socket"
        version = subprocess.run(
            ["mpirun", "--version"], capture_output=True, text=True, check=False, timeout=30
        )
        options = OPEN_MPI if "Open" in version.stdout else ()
        with socket.socket(socket.AF_UNIX) as listener, self._output.open("wb") as output:
            listener.bind(path)
            listener.listen(self._count)
            self._process = subprocess.Popen(
                [
                    "mpirun", *options, "-n", str(self._count),
                    sys.executable, "-m", "benchmarks.limits.mpi_rank", path,
                ],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            try:
                for _ in range(self._count):
                    connection = self._accepted(listener, time.monotonic() + START_SECONDS)
                    stream = connection.makefile("rwb")
                    told = json.loads(stream.readline())
                    self._streams[told["rank"]] = (connection, stream)
                    self.library = told["library"]
            except (OSError, ValueError) as error:
                raise MpiError(f"MPI's processes did not start: {error}\n{self._printed()}") from error

    def _accepted(self, listener: socket.socket, deadline: float) -> socket.socket:
        """The next connection.

        Raises:
            MpiError: mpirun has ended.
            TimeoutError: a process of MPI did not connect in time.
        """
        assert self._process is not None  # noqa: S101  (for mypy; it was started)
        while not select.select([listener], [], [], LOOK)[0]:
            if self._process.poll() is not None:
                status = self._process.returncode
                raise MpiError(f"mpirun ended with status {status}:\n{self._printed()}")
            if time.monotonic() > deadline:
                raise TimeoutError("a process of MPI did not connect in time")
        connection, _ = listener.accept()
        connection.settimeout(START_SECONDS)
        return connection

    def _printed(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")[-2000:]
