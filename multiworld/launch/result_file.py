"""`ResultFile`, an unnamed file in memory with a process's result or failure, for its parent.

Unlike a pipe it blocks neither side, and a process may die while it writes; unlike a named file it leaves
nothing on the disk.
"""

from __future__ import annotations

import io
import json
import os
from multiprocessing import reduction
from typing import Any

__all__ = ["ResultFile"]

_BEGAN, _RESULT, _FAILURE = b"B", b"R", b"F"


class ResultFile:
    """Written by one process, read by its parent afterwards. The first byte is the kind of the content."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("m8d-launch")

    def __getstate__(self) -> Any:
        return reduction.DupFd(self._fd)

    def __setstate__(self, handle: Any) -> None:
        self._fd = handle.detach()

    def began(self) -> None:
        """Record that the process reached its function."""
        self._write(_BEGAN, b"")

    def put_result(self, result: Any) -> None:
        """Write a result, by value: tensors in it are not shared.

        Raises:
            Exception: it cannot be pickled.
        """
        import torch

        buffer = io.BytesIO()
        torch.save(result, buffer)
        self._write(_RESULT, buffer.getbuffer())

    def put_failure(self, failure: dict[str, Any]) -> None:
        """Write a failure, as plain data for JSON."""
        self._write(_FAILURE, json.dumps(failure).encode())

    def has_begun(self) -> bool:
        """Whether the process reached its function."""
        return os.pread(self._fd, 1, 0) != b""

    def has_result(self) -> bool:
        """Whether the process wrote a result."""
        return os.pread(self._fd, 1, 0) == _RESULT

    def result(self) -> Any:
        """Return the result; None where the process ended in good order without one (``sys.exit(0)``)."""
        kind, data = self._read()
        if kind != _RESULT:
            return None
        import torch

        # Safe to unpickle: only the process that this parent started can write the file.
        stream = io.BytesIO(data)
        return torch.load(stream, weights_only=False)  # nosec B614

    def failure(self) -> dict[str, Any] | None:
        """Return the failure; None if none was written."""
        kind, data = self._read()
        return dict(json.loads(data)) if kind == _FAILURE else None

    def close(self) -> None:
        """Free it. May be repeated."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, kind: bytes, data: bytes | memoryview) -> None:
        rest, at = memoryview(data), 1
        while rest:
            done = os.pwrite(self._fd, rest, at)
            rest, at = rest[done:], at + done
        os.ftruncate(self._fd, at)
        os.pwrite(self._fd, kind, 0)  # last: a process that dies before it has written nothing valid

    def _read(self) -> tuple[bytes, bytes]:
        with open(os.dup(self._fd), "rb") as file:  # noqa: PTH123  (it has no path)
            file.seek(0)
            data = file.read()
        return data[:1], data[1:]
