"""`Waiting`: operations that wait in the run's worlds, asked again and again for the live view."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from multiworld.run.control.pending import blocked_operations

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["EVERY", "Waiting"]

EVERY = 2.0
"""Seconds between the answer to a question and the next question."""

_TIMEOUT = 2.0
_STOP_TIMEOUT = 5.0


class Waiting:
    """A thread asks the launcher's socket, as ``m8d-run status`` does: the workers answer there.

    Args:
        path: of the launcher's socket.

    Attributes:
        operations: by world, rows as `layout` takes them; replaced as a whole, never changed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.operations: dict[str, list[dict[str, Any]]] = {}
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, name="m8d-run-waiting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more."""
        self._enough.set()
        self._thread.join(_STOP_TIMEOUT)

    def _run(self) -> None:
        while not self._enough.wait(EVERY):
            self.operations = blocked_operations(self._path, _TIMEOUT)
