"""Identity of a source tree: whether it holds the files a target names, by git blob id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from m8d_build.errors import BlobMismatch
from m8d_build.files.blobs import blob_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from m8d_build.targets import Target

__all__ = ["Difference", "differences", "mismatch", "not_recorded", "unrecorded"]


@dataclass(frozen=True)
class Difference:
    """One file that is not the one the target names.

    Attributes:
        path: relative to the tree.
        expected: blob id the target names.
        found: blob id of what is there, "" if nothing is.
        hint: the likely cause, "" if none is seen.
    """

    path: str
    expected: str
    found: str
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.path}: found {self.found or 'no such file'}, expected {self.expected}"
        return f"{text} ({self.hint})" if self.hint else text


def differences(root: Path, target: Target) -> tuple[Difference, ...]:
    """Compare every file the target names with the one in a tree; those without a recorded id are left out.

    Raises:
        OSError: a file is there and cannot be read.
    """
    found = (_compare(root, file.path, file.blob) for file in target.files if file.blob)
    return tuple(difference for difference in found if difference is not None)


def unrecorded(target: Target) -> tuple[str, ...]:
    """Return the files whose blob id the target does not know."""
    return tuple(file.path for file in target.files if not file.blob)


def mismatch(
    origin: str, found: Sequence[Difference], target: Target, *, allowable: bool = True
) -> BlobMismatch:
    """Return the error for a tree that differs; every differing file is listed with both ids.

    Args:
        origin: where the tree is from.
        found: what differs.
        target: what it should be.
        allowable: whether the command takes --allow-unverified.
    """
    listed = "".join(f"\n  {difference}" for difference in found)
    return BlobMismatch(
        f"{origin}: {len(found)} of {len(target.files)} files are not those of {target.tag}:{listed}",
        rule="Each file must have the git blob id patches/targets.toml names",
        next_step=f"Use the untouched sources of {target.tag}"
        + (", or --allow-unverified if you know why they differ" if allowable else ""),
    )


def not_recorded(found: Mapping[str, bytes], target: Target, *, proven: bool = False) -> BlobMismatch:
    """Return the error for files that a build has read, and whose blob ids the target does not know.

    Args:
        found: contents by path.
        target: what the build is for.
        proven: the tree is a checkout at the right commit, and these files are not of that commit.
    """
    listed = "".join(f'\n  "{path}" = "{blob_id(data)}"' for path, data in found.items())
    if proven:
        return BlobMismatch(
            f"{len(found)} of the files that were compiled are not committed in the checkout:{listed}",
            rule=f"What is compiled from a checkout of {target.tag} is in its commit",
            next_step="Remove them, or take --source git; or --allow-unverified if you know what they are",
        )
    return BlobMismatch(
        f"{len(found)} of the files that were compiled have no blob id on record for {target.tag}:{listed}",
        rule="Each file of PyTorch's sources that a build reads is in [target.files] of patches/targets.toml",
        next_step="Compare them with the release and add these lines there, or --allow-unverified",
    )


def _compare(root: Path, path: str, expected: str) -> Difference | None:
    try:
        data = (root / path).read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return Difference(path, expected, "")
    found = blob_id(data)
    if found == expected:
        return None
    crlf = b"\r\n" in data and blob_id(data.replace(b"\r\n", b"\n")) == expected
    return Difference(path, expected, found, "only its line endings differ: CRLF" if crlf else "")
