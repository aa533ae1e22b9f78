"""The wheel under test, read; whether an environment holds it, decided from its files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from m8d_build.environments.venvs import Recipe
from m8d_build.errors import WheelInvalid, WheelMismatch
from m8d_build.files.blobs import file_sha256
from m8d_build.wheel.versionfile import VERSION_ENTRY, parse_version_file
from m8d_build.wheel.wheelfile import MARKER_ENTRY, open_wheel
from multiworld.errors import MarkerError
from multiworld.shim.marker import parse_marker, read_marker

if TYPE_CHECKING:
    from pathlib import Path

    from m8d_build.environments.venvs import Environment
    from m8d_build.wheel.wheelfile import WheelFile
    from multiworld.shim.marker import Marker

__all__ = ["NO_MARKER", "Subject", "marker_outcome", "read_subject", "require_stock"]

NO_MARKER = "no marker"


@dataclass(frozen=True)
class Subject:
    """The wheel under test, read.

    Attributes:
        wheel: the file, validated.
        sha256: of the file.
        marker: what it says of itself.
        python_tag: the interpreter it is installed for ("cp311").
    """

    wheel: WheelFile
    sha256: str
    marker: Marker
    python_tag: str

    @property
    def recipe(self) -> Recipe:
        """What its environment is made from."""
        brings = tuple(sorted({name.split("/", 1)[0] for name in self.wheel.entries}))
        return Recipe(self.marker.torch, self.sha256, self.python_tag, str(self.wheel.path), brings)


def read_subject(path: Path) -> Subject:
    """Read the wheel under test.

    Raises:
        WheelInvalid: it is no whole wheel, or its marker breaks the schema.
        WheelMismatch: it is not a patched wheel for one CPython.
    """
    wheel = open_wheel(path.absolute())
    if not wheel.patched:
        raise WheelMismatch(
            f"{path.name} carries no {MARKER_ENTRY}",
            rule="check-wheel is for patched wheels",
            next_step="Build one: nox -s build-torch",
        )
    if len(wheel.python_tags) != 1:
        raise WheelMismatch(
            f"{path.name} is for {', '.join(wheel.python_tags)}", rule="a torch wheel is for one Python"
        )
    try:
        marker = parse_marker(wheel.read(MARKER_ENTRY), where=f"{path.name}: {MARKER_ENTRY}")
    except MarkerError as exc:
        raise WheelInvalid(exc.value, rule=exc.rule, next_step="Build the wheel again") from exc
    return Subject(wheel, file_sha256(wheel.path), marker, wheel.python_tags[0])


def require_stock(environment: Environment, subject: Subject) -> None:
    """Check that an environment holds the unpatched torch a wheel was made from.

    Raises:
        WheelMismatch: it holds a patched torch, or another commit's.
    """
    next_step = "Give the official wheel's environment, or leave it to us with --stock auto"
    entry = environment.site / VERSION_ENTRY
    found = parse_version_file(entry.read_bytes(), where=str(entry))
    if marker_outcome(environment, subject) != NO_MARKER:
        raise WheelMismatch(
            f"{environment.name} has a patched torch", rule="stock is unpatched", next_step=next_step
        )
    if found.git_version != subject.marker.commit:
        raise WheelMismatch(
            f"{environment.name} has torch {found.version} of commit {found.git_version}",
            rule=f"the wheel under test was made from {subject.marker.torch}, commit {subject.marker.commit}",
            next_step=next_step,
        )


def marker_outcome(environment: Environment, subject: Subject) -> str:
    """Return "agrees", "no marker", or what is wrong with the marker of an installed torch."""
    try:
        marker = read_marker(environment.torch)
    except MarkerError as exc:
        return str(exc)
    if marker is None:
        return NO_MARKER
    if not marker.agrees:
        return "; ".join(marker.disagreements)
    return "agrees" if marker == subject.marker else "not the marker in the wheel"
