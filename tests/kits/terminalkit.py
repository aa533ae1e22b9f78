"""Programs run on a terminal of their own, and what they wrote there."""

from __future__ import annotations

import os
import pty
import re
import select
import struct
import subprocess
import time
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def text_of(told: str) -> list[str]:
    """The lines without what colours them and moves the cursor."""
    # A live picture is left by going up from its last line, and what follows begins a line.
    return [
        line.rstrip()
        for line in CODES.sub("", re.sub(r"\x1b\[[0-9]*A", "\n", told)).replace("\r", "").split("\n")
    ]


def on_a_terminal(
    *command: str,
    columns: int = 100,
    lines: int = 30,
    watch: Callable[[str], None] = lambda _: None,
    **more: str,
) -> tuple[int, str]:
    """Run a program on a terminal of its own; return its exit code and what it wrote there.

    Args:
        command: the program and its arguments.
        columns, lines: of the terminal.
        watch: called with all that was written so far, whenever there is more.
        more: environment variables.
    """
    ours, its = pty.openpty()
    try:
        ioctl(its, TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        environ = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "LINES", "NO_COLOR"}}
        path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
        process = subprocess.Popen(
            command, stdin=its, stdout=its, stderr=its, cwd=ROOT,
            env={**environ, "TERM": "xterm-256color", "PYTHONPATH": path, **more},
        )  # fmt: skip
        os.close(its)
        its = -1
        told, deadline = b"", time.monotonic() + 180
        try:
            while time.monotonic() < deadline:
                if not select.select([ours], [], [], 1)[0]:
                    continue
                try:
                    part = os.read(ours, 1 << 16)
                except OSError:  # the other end was closed
                    break
                if not part:
                    break
                told += part
                watch(told.decode(errors="replace"))
            return process.wait(max(1, deadline - time.monotonic())), told.decode()
        finally:
            process.kill()
            process.wait(60)
    finally:
        os.close(ours)
        if its >= 0:
            os.close(its)
