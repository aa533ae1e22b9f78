"""The page of ``m8d-run --web``: a process of its own, which ends with the launcher.

It costs the launcher nothing while no browser looks, and a fault in it is not the launcher's.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import subprocess
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from multiworld.run.errors import ArgumentsError
from multiworld.run.events import Note

if TYPE_CHECKING:
    from multiworld.run.events import EventBus

__all__ = ["WebPage", "check_installed"]

_ENDING = 3.0
_LINES = 3


def check_installed() -> None:
    """Check that the extra is there.

    Raises:
        ArgumentsError: it is not.
    """
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ArgumentsError(
            f"--web without {' and '.join(missing)}",
            rule="The page is served by them",
            next_step="pip install 'm8d[web]'",
        )


class WebPage:
    """See the module.

    Args:
        control: path of the launcher's control socket.
        address: "HOST:PORT" to listen at.
        bus: gets a `Note` with the page's address, or with what is wrong.
    """

    def __init__(self, control: str, address: str, bus: EventBus) -> None:
        self._bus = bus
        self._closing = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "multiworld.run", "web", "--socket", control, "--at", address],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            text=True,
        )  # fmt: skip
        self._said: deque[str] = deque(maxlen=_LINES)
        for function in (self._tell, self._read):
            threading.Thread(target=function, name="m8d-web-page", daemon=True).start()

    def _tell(self) -> None:
        assert self._process.stdout is not None  # noqa: S101  (it is a pipe)
        link = self._process.stdout.readline().strip()
        if link:
            self._note(logging.INFO, f"page: {link}")
            self._process.stdout.read()
        code = self._process.wait()
        if not self._closing:
            why = "; ".join(self._said) or f"exit code {code}"
            self._note(logging.WARNING, f"the page has ended: {why}. m8d-run web serves it anew")

    def _read(self) -> None:
        """Read what it says on standard error, so that it never waits; the last lines are told."""
        assert self._process.stderr is not None  # noqa: S101  (it is a pipe)
        for line in self._process.stderr:
            if line.strip():
                self._said.append(line.strip()[:500])

    def _note(self, level: int, text: str) -> None:
        self._bus.publish(Note(time.time(), level, text))

    def close(self) -> None:
        """End it, within 3 s. Idempotent."""
        self._closing = True
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
