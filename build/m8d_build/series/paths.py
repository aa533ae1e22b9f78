"""Paths that a tree's own notes name: inside the tree, or the notes are not trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["require_inside"]

_NOT_PATHS = frozenset({"", ".", ".."})
_NOT_OURS = frozenset({".git", ".m8d"})


def require_inside(tree: Path, paths: Iterable[object], *, also: str = "") -> None:
    """Hold the paths of a journal or receipt to what apply can have written.

    A tree comes with its notes, so a tree of others has the notes of others: they must not lead out of it.

    Args:
        tree: the folder they are relative to.
        paths: as they stand in the file.
        also: the one path below ``.m8d`` that may be among them.

    Raises:
        ValueError: one is no relative path of plain parts, or a symbolic link is on the way to it.
    """
    for path in paths:
        parts = path.split("/") if isinstance(path, str) and "\0" not in path else [""]
        if (path != also and not _NOT_OURS.isdisjoint(parts)) or not _NOT_PATHS.isdisjoint(parts):
            raise ValueError(f"{path!r} is no path inside the tree")
        for count in range(1, len(parts)):
            if tree.joinpath(*parts[:count]).is_symlink():
                raise ValueError(f"{'/'.join(parts[:count])!r}, on the way to {path!r}, is a symbolic link")
