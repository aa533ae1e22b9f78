"""Reads a worlds file from the disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from multiworld.run.errors import PlanError
from multiworld.run.worldsfile.parse import parse

if TYPE_CHECKING:
    from multiworld.run.worldsfile.worlds_plan import WorldsPlan

__all__ = ["load"]

_MOST_BYTES = 1 << 20


def load(path: str) -> WorldsPlan:
    """Read a worlds file.

    Args:
        path: of the file.

    Raises:
        PlanError: it cannot be read, is no TOML, or breaks a rule.
    """
    try:
        with Path(path).open("rb") as file:
            octets = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as exc:
        raise PlanError(
            getattr(exc, "strerror", None) or str(exc),
            path=path,
            rule="--worlds names a file that can be read",
            next_step="Give its path",
        ) from exc
    if len(octets) > _MOST_BYTES:
        raise PlanError(
            f"more than {_MOST_BYTES} bytes",
            path=path,
            rule=f"A worlds file has at most {_MOST_BYTES} bytes",
            next_step='Use patterns: [worlds."w{i}"] with for = "ROLE"',
        )
    try:
        text = octets.decode()
    except UnicodeDecodeError as exc:
        raise PlanError(
            f"byte {octets[exc.start]:#04x} is no UTF-8",
            path=path,
            line=octets.count(b"\n", 0, exc.start) + 1,
            rule="A worlds file is TOML, which is UTF-8",
            next_step="Save it as UTF-8",
        ) from exc
    return parse(text, path)
