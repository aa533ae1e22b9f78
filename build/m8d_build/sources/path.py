"""Sources from a folder the user names; read there, never changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from m8d_build.errors import WrongTree
from m8d_build.sources.base import Provided, Unavailable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from m8d_build.targets import Target

__all__ = ["PathSource"]


@dataclass(frozen=True)
class PathSource:
    """A git checkout or an unpacked archive.

    Attributes:
        path: its top folder.
    """

    path: Path
    name: str = "path"
    resumable: bool = False

    def provide(self, target: Target, wanted: Sequence[str], into: Path) -> Provided | Unavailable:  # noqa: ARG002  (one interface)
        """Look at the folder.

        Raises:
            WrongTree: it is another version's tree, or none of PyTorch's.
        """
        place = f"folder {self.path}"
        if not self.path.exists():
            return Unavailable(place, "there is no such folder")
        if not self.path.is_dir():
            return Unavailable(place, "it is a file; unpack it and name the folder")
        root = self.path.resolve()
        if not (root / "torch" / "csrc").is_dir():
            raise WrongTree(
                f"{self.path} has no torch/csrc",
                rule=f"it must be the top folder of PyTorch {target.version}'s sources",
                next_step=f"Name a checkout of {target.tag}, or leave --source away",
            )
        version = _version_of(root)
        if version and not _is_version(version, target.version):
            raise WrongTree(
                f"{self.path} holds PyTorch {version} (version.txt)",
                rule=f"it must hold {target.version}",
                next_step=f"Check out {target.tag} there, or ask for that version with --torch",
            )
        return Provided(root, f"folder {root}", in_place=True)


def _version_of(root: Path) -> str:
    file = root / "version.txt"
    return file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""


def _is_version(found: str, wanted: str) -> bool:
    """Releases are made with "2.6.0a0" in version.txt, so what follows the numbers does not count."""
    return found.startswith(wanted) and not found[len(wanted) :].startswith(tuple("0123456789."))
