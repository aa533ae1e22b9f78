"""Link trees of an installed torch, whole or without one library; the installation is never changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["link_torch"]


def link_torch(site: Path, into: Path, *, without: str = "") -> Path:
    """Make a folder to import torch from: links to everything in ``site``, with ``torch/lib`` a folder of links.

    The loader and Python both go by the path they were given, so libraries in the tree look for each other in
    it.

    Args:
        site: the site-packages folder with torch.
        into: the folder to make.
        without: name of a file in ``torch/lib`` that is left out; "" for none.

    Returns:
        ``into``.

    Raises:
        OSError: a folder or link cannot be made.
    """
    _link_entries(site, into, but="torch")
    _link_entries(site / "torch", into / "torch", but="lib")
    _link_entries(site / "torch" / "lib", into / "torch" / "lib", but=without)
    return into


def _link_entries(folder: Path, into: Path, *, but: str) -> None:
    into.mkdir(parents=True)
    for entry in folder.iterdir():
        if entry.name != but:
            (into / entry.name).symlink_to(entry)
