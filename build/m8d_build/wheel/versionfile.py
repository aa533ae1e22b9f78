"""torch/version.py, parsed as a syntax tree: version, CUDA, commit."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from m8d_build.errors import WheelInvalid

__all__ = ["VERSION_ENTRY", "VersionFile", "parse_version_file"]

VERSION_ENTRY = "torch/version.py"

_AGAIN = "Download the official wheel again, or delete it so that it is downloaded anew"


@dataclass(frozen=True)
class VersionFile:
    """What torch/version.py says, read without running it."""

    version: str
    git_version: str
    cuda: str | None
    hip: str | None

    @property
    def local(self) -> str:
        """The local version label ("cu124"), "" if there is none."""
        return self.version.partition("+")[2]


def parse_version_file(data: bytes, *, where: str = VERSION_ENTRY) -> VersionFile:
    """Read torch/version.py as a syntax tree; nothing in it is run.

    Raises:
        WheelInvalid: it is no Python, or assigns no ``__version__`` and ``git_version`` strings.
    """
    values: dict[str, object] = {}
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError) as exc:
        raise WheelInvalid(f"{where} is no Python: {exc}", next_step=_AGAIN) from exc
    for node in tree.body:
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        value = getattr(node, "value", None)
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
                values[target.id] = value.value
    version, git_version = values.get("__version__"), values.get("git_version")
    if not isinstance(version, str) or not isinstance(git_version, str):
        raise WheelInvalid(
            f"{where} has no __version__ and git_version", rule="torch's has both", next_step=_AGAIN
        )
    cuda, hip = values.get("cuda"), values.get("hip")
    return VersionFile(
        version, git_version, cuda if isinstance(cuda, str) else None, hip if isinstance(hip, str) else None
    )
