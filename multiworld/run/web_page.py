"""The page of ``m8d-run --web``: a process of its own, which ends with the launcher.

It costs the launcher nothing while no browser looks, and a fault in it is not the launcher's. In a secure run
it has the launcher's certificate, by the environment.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
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
_AGAIN = 1.0
"""Seconds before a page whose process has ended is served anew; twice as many after each that served none."""
_LONGEST = 10.0
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
        self._command = [
            sys.executable, "-m", "multiworld.run", "web", "--socket", control, "--at", address,
        ]  # fmt: skip
        self._bus = bus
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._pause = math.inf  # until a page was served
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True, text=True,
        )  # fmt: skip
        said: deque[str] = deque(maxlen=_LINES)
        reader, teller = (
            threading.Thread(target=function, args=(process, said), name=name, daemon=True)
            for function, name in ((self._read, "m8d-web-page-errors"), (self._tell, "m8d-web-page"))
        )
        try:
            reader.start()
            teller.start()
        except RuntimeError:  # the host has no thread left: its end would not be heard of
            process.kill()
            process.wait()
            if reader.ident is None:
                self._read(process, said)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
            raise
        return process

    def _tell(self, process: subprocess.Popen[str], said: deque[str]) -> None:
        """Say where the page is; when its process has ended, say so, and serve it anew.

        Probes ask the page: without it a healthy launcher would be ended for nothing.
        """
        assert process.stdin is not None  # noqa: S101  (it is a pipe)
        assert process.stdout is not None  # noqa: S101  (as well)
        link = process.stdout.readline().strip()
        if link:
            self._pause = _AGAIN
            self._note(logging.INFO, f"page: {link}")
            for line in process.stdout:
                if line.strip():
                    self._note(logging.WARNING, f"page: {line.strip()}")
        code = process.wait()
        process.stdin.close()
        process.stdout.close()
        if self._closing.is_set():
            return
        why = "; ".join(said) or f"exit code {code}"
        if self._pause == math.inf:  # at an address that cannot be had, for instance
            self._note(logging.WARNING, f"the page has ended: {why}. m8d-run web serves it anew")
            return
        self._note(logging.WARNING, f"the page has ended: {why}. It is served anew")
        self._serve_anew()

    def _serve_anew(self) -> None:
        while not self._closing.wait(self._pause):
            self._pause = min(2 * self._pause, _LONGEST)
            with self._lock:
                if self._closing.is_set():
                    return
                try:
                    self._process = self._start()
                except (OSError, RuntimeError) as error:  # the host has no process or thread left
                    why = error
                else:
                    return
            self._note(logging.WARNING, f"the page cannot be started: {why}. It is tried again")

    def _read(self, process: subprocess.Popen[str], said: deque[str]) -> None:
        """Read what it says on standard error, so that it never waits; the last lines are told."""
        assert process.stderr is not None  # noqa: S101  (it is a pipe)
        for line in process.stderr:
            if line.strip():
                said.append(line.strip()[:500])
        process.stderr.close()

    def _note(self, level: int, text: str) -> None:
        self._bus.publish(Note(time.time(), level, text))

    def close(self) -> None:
        """End it, within 3 s. Idempotent."""
        self._closing.set()
        with self._lock:
            process = self._process
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        try:
            process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
