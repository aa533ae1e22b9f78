"""Fetched sources, cached under the cache folder.

<cache>/sources/v2.6.0/git/tree/         the files
<cache>/sources/v2.6.0/git/origin.json   where they come from, which folders, how many files and bytes
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from m8d_build.files.disk import move_into_place, remove_tree
from m8d_build.sources.base import Provided, Unavailable
from m8d_build.sources.identity import differences

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from m8d_build.targets import Target

__all__ = ["CacheSource", "Kept", "keep"]

SCHEMA = 1


@dataclass(frozen=True)
class Kept:
    """What origin.json says of a kept tree.

    Attributes:
        origin: where it came from.
        wanted: the folders it has.
        verified: every blob id was right when it was kept.
        files: how many files.
        size: their bytes in all.
    """

    origin: str
    wanted: tuple[str, ...]
    verified: bool
    files: int
    size: int


def keep(root: Path, final: Path, *, origin: str, wanted: Sequence[str], verified: bool) -> Path:
    """Move a whole tree into the cache and return its new root.

    Args:
        root: the tree, on the cache's disk.
        final: its folder there (``<cache>/sources/v2.6.0/git``); an earlier one is replaced.
        origin: where it came from.
        wanted: the folders it has.
        verified: every blob id was right.

    Raises:
        OSError: it cannot be moved.
    """
    making = final.with_name(f".new-{final.name}")
    remove_tree(making)
    making.mkdir(parents=True)
    try:
        root.rename(making / "tree")
        files, size = _measure(making / "tree")
        kept = Kept(origin, tuple(wanted), verified, files, size)
        (making / "origin.json").write_text(
            json.dumps({"schema": SCHEMA, **asdict(kept)}, indent=1), encoding="utf-8"
        )
        move_into_place(making, final)
    except BaseException:
        remove_tree(making)
        raise
    return final / "tree"


@dataclass(frozen=True)
class CacheSource:
    """Trees that earlier runs kept.

    Attributes:
        folder: the version's folder in the cache.
        kinds: names of the sources whose trees may be used, best first.
        allow_unverified: trees kept with differing blob ids may be used too.
    """

    folder: Path
    kinds: tuple[str, ...]
    allow_unverified: bool = False
    name: str = "cache"
    resumable: bool = False

    def provide(self, target: Target, wanted: Sequence[str], into: Path) -> Provided | Unavailable:  # noqa: ARG002  (one interface)
        """Return the first kept tree that has all that is wanted and is still as it was kept.

        Raises:
            OSError: a kept file cannot be read.
        """
        reasons = []
        for kind in self.kinds:
            answer = self._kept(kind, target, wanted)
            if isinstance(answer, Provided):
                return answer
            reasons.append(answer)
        return Unavailable(f"cache {self.folder}", "; ".join(reasons))

    def _kept(self, kind: str, target: Target, wanted: Sequence[str]) -> Provided | str:
        root = self.folder / kind / "tree"
        if not root.is_dir():
            return f"nothing kept from {kind}"
        kept = _read(self.folder / kind / "origin.json")
        if kept is None:
            return f"the tree from {kind} has no readable origin.json"
        if not set(wanted) <= set(kept.wanted):
            return f"the tree from {kind} has only {', '.join(kept.wanted)}"
        if _measure(root) != (kept.files, kept.size):
            return f"the tree from {kind} was changed since it was kept"
        differing = differences(root, target)
        # A tree kept as verified that differs now is damaged, or the target has changed: never for use
        # unverified.
        if differing and (kept.verified or not self.allow_unverified):
            return f"the tree from {kind} does not have the blob ids: {differing[0]}"
        return Provided(root, kept.origin, in_place=True)


def _measure(root: Path) -> tuple[int, int]:
    """Count files and bytes: cheap, and notices a file lost, cut or added where no blob id is recorded."""
    sizes = [path.lstat().st_size for path in root.rglob("*") if path.is_symlink() or path.is_file()]
    return len(sizes), sum(sizes)


def _read(path: Path) -> Kept | None:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        if said["schema"] != SCHEMA:
            return None
        return Kept(
            str(said["origin"]),
            tuple(said["wanted"]),
            bool(said["verified"]),
            int(said["files"]),
            int(said["size"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
