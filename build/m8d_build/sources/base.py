"""The interface of all places that sources can come from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit, urlunsplit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from m8d_build.errors import CommandFailed
    from m8d_build.targets import Target

__all__ = [
    "SPARSE",
    "Provided",
    "Source",
    "SourceTree",
    "Unavailable",
    "is_wanted",
    "last_words",
    "without_password",
]

# The folders an overlay build reads: the units and headers it compiles, headers wheels do not carry, and the
# Python files that patches touch. Files at the top of the tree (version.txt, LICENSE) always come along.
SPARSE: tuple[str, ...] = ("torch/csrc", "torch/distributed", "c10", "aten/src/ATen")


@dataclass(frozen=True)
class SourceTree:
    """PyTorch's sources, checked, ready to be read. Copy it before changing it: a kept tree is shared.

    Attributes:
        root: folder with torch/, c10/, version.txt.
        origin: where they come from, for people ("git https://… at <commit>").
        target: what they are the sources of.
        verified: every file the target names has the blob id it names.
        notes: what was not checked or differs; empty if nothing.
    """

    root: Path
    origin: str
    target: Target
    verified: bool = True
    notes: tuple[str, ...] = ()

    @property
    def commit(self) -> str:
        """The commit they were fetched at, 40 hex digits; "" where they did not come from a repository."""
        found = re.search(r" at ([0-9a-f]{40})$", self.origin)
        return found[1] if found else ""


@dataclass(frozen=True)
class Provided:
    """A source's answer: a whole tree, not checked yet.

    Attributes:
        root: the tree; under ``into``, unless ``in_place``.
        origin: as in SourceTree.
        in_place: it stays where it is and is not ours.
    """

    root: Path
    origin: str
    in_place: bool = False


@dataclass(frozen=True)
class Unavailable:
    """A source's other answer: why not.

    Attributes:
        place: what was tried ("git https://…").
        reason: what happened there.
    """

    place: str
    reason: str


class Source(Protocol):
    """One place sources can come from."""

    @property
    def name(self) -> str:
        """A short name, fit for a folder ("git")."""

    @property
    def resumable(self) -> bool:
        """Whether what it left in ``into`` when it was stopped helps its next run."""

    def provide(self, target: Target, wanted: Sequence[str], into: Path) -> Provided | Unavailable:
        """Get the tree.

        Args:
            target: whose sources.
            wanted: folders of PyTorch's repository that must be in it; files at its top always are.
            into: a folder of its own to work in; empty, or as this source left it if it is resumable.

        Raises:
            DiskFull: there is no room.
            WrongTree: what is there is another version's tree, or none of PyTorch's.
        """


def is_wanted(path: str, wanted: Sequence[str]) -> bool:
    """Tell whether a file of PyTorch's repository is in one of the wanted folders, or at the top."""
    return "/" not in path or any(path.startswith(f"{folder}/") for folder in wanted)


def last_words(exc: CommandFailed) -> str:
    """Return one line for a program's failure: what we could not do, and what it said itself."""
    said = [line.strip() for line in exc.tail.splitlines() if line.strip()]
    telling = [line for line in said if line.startswith(("E:", "fatal:", "error:", "ERROR:"))] or said[-1:]
    return f"{exc.value}: {' / '.join(telling[:3])}" if telling else exc.value


def without_password(url: str) -> str:
    """Return a URL with user name and password left out, so that it may be shown and stored."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
