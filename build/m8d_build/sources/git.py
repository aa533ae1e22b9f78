"""Sources from PyTorch's git repository: the tag, without history, and only the folders that are needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from m8d_build.errors import CommandFailed, PrerequisiteMissing
from m8d_build.files.disk import needs_room
from m8d_build.gitrepo.fetch import fetch_tag
from m8d_build.sources.base import Provided, Unavailable, last_words, without_password

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from m8d_build.targets import Target

__all__ = ["FetchTag", "GitSource"]

TIMEOUT = 900.0  # seconds; about 60 MB come over the line


class FetchTag(Protocol):
    """What m8d_build.gitrepo.fetch.fetch_tag does; a test puts another in its place."""

    def __call__(
        self, url: str, tag: str, *, repo: Path, tree: Path, folders: Sequence[str], timeout: float
    ) -> str:
        """Fetch a tag and return its commit."""


@dataclass(frozen=True)
class GitSource:
    """A git repository.

    Attributes:
        url: where it is.
        timeout: seconds for the whole fetch.
        fetch: how to fetch.
    """

    url: str
    timeout: float = TIMEOUT
    fetch: FetchTag = fetch_tag
    name: str = "git"
    resumable: bool = True

    def provide(self, target: Target, wanted: Sequence[str], into: Path) -> Provided | Unavailable:
        """Fetch the target's tag.

        The commit is told, not compared: a tag may have been moved, and what counts is each file's blob id.

        Raises:
            DiskFull: there is no room.
        """
        shown = without_password(self.url)
        place = f"git {shown}, tag {target.tag}"
        try:
            with needs_room(into, f"fetching PyTorch {target.version} with git"):
                commit = self.fetch(
                    self.url,
                    target.tag,
                    repo=into / "repo",
                    tree=into / "tree",
                    folders=wanted,
                    timeout=self.timeout,
                )
        except CommandFailed as exc:
            return Unavailable(place, last_words(exc).replace(self.url, shown))
        except PrerequisiteMissing as exc:
            return Unavailable(place, exc.value)
        return Provided(into / "tree", f"git {shown} at {commit}")
