"""Names in folders of the /proc file system."""

from __future__ import annotations

import os

__all__ = ["names"]


def names(folder: str | os.PathLike[str]) -> list[str]:
    """Return the names in a folder, complete before the caller opens or closes descriptors.

    Raises:
        OSError: the folder cannot be read.
    """
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]
