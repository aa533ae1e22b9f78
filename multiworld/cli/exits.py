"""Exit codes of the commands: 0 good, 1 something to do, 2 wrong arguments, one per kind of error, 130 Ctrl-C."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiworld.errors import InstallError, MarkerError, PatchRequiredError, ProvenanceError, ShimError

if TYPE_CHECKING:
    from multiworld.errors import MultiworldError

__all__ = ["EXIT_CODES", "INTERRUPTED", "exit_code"]

EXIT_CODES: dict[type[MultiworldError], int] = {
    InstallError: 3,
    MarkerError: 4,
    PatchRequiredError: 5,
    ShimError: 6,
    ProvenanceError: 7,
}
"""The first class that an error is of, in this order."""

_OTHER = 9

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells give it."""


def exit_code(error: MultiworldError) -> int:
    """Return the exit code for an error."""
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), _OTHER)
