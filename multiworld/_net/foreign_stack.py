"""The Python stacks of another process on this host, by py-spy, where that is installed.

A member that holds the GIL cannot say where it stands. py-spy reads its memory, without stopping it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["foreign_stack"]

_TRIES = 3
"""What it reads may change meanwhile, as nothing is stopped: it ends with an error then."""

_SECONDS = 5.0
"""It takes 0.1 s with torch loaded, and is ended after so many."""


def foreign_stack(pid: int) -> str:
    """Return the stacks of a process's threads as py-spy writes them; "" where it cannot tell.

    Args:
        pid: of a process whose memory this one may read.
    """
    beside = str(Path(sys.executable).parent) if sys.executable else None
    program = shutil.which("py-spy") or shutil.which("py-spy", path=beside)
    if program is None:
        return ""
    for _ in range(_TRIES):
        if found := _asked(program, pid):
            return found
    return ""


def _asked(program: str, pid: int) -> str:
    try:
        ran = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    text = ran.stdout.decode(errors="replace")
    # Before the first thread stands the command line, which may have what is no other member's business.
    start = text.find("\nThread ")
    return text[start + 1 :].rstrip() if ran.returncode == 0 and start >= 0 else ""
