"""A launcher's private folder of certificates and keys, which goes with the run.

The launcher holds a lock on the folder. The kernel frees it with the launcher, however that ends, so that a
later launcher of the same user knows which folders are abandoned. No torch is loaded.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["NAME", "KeyFolder", "remove_abandoned"]

NAME = "tls"
"""Name of the folder within the launcher's own."""


class KeyFolder:
    """Makes the folder; only this user can read it.

    Args:
        launcher: the launcher's folder, which is made too unless it is there.

    Attributes:
        path: of the folder.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, launcher: Path) -> None:
        self.path = launcher / NAME
        self._made = not launcher.exists()
        launcher.mkdir(mode=0o700, exist_ok=True)
        self.path.mkdir(mode=0o700)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, name: str, data: bytes) -> Path:
        """Write a file that only this user can read, whole: readers see the former one or this one."""
        fresh, path = self.path / f"{name}.new", self.path / name
        fresh.unlink(missing_ok=True)
        with os.fdopen(
            os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb"
        ) as file:
            file.write(data)
        return fresh.replace(path)

    def remove(self) -> None:
        """Remove it, with the launcher's folder where this made it and nothing else is in it. Idempotent."""
        if self._lock < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1
        if self._made:
            with contextlib.suppress(OSError):  # a file of another part of the launcher is in it
                self.path.parent.rmdir()


def remove_abandoned(launcher: Path) -> bool:
    """Remove the folder of keys of a launcher that has ended; return False where it has not."""
    path = launcher / NAME
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
