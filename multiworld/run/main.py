"""``m8d-run``: the command. Errors become exit codes here and nowhere else.

Exit codes: 0 when all workers ended with 0; that of the first failed worker (128 + the signal's number, if one ended
it); 128 + the signal's number when a signal ended the launcher; 2 for wrong arguments or a wrong worlds file; else 1.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from multiworld.cli.console import complain
from multiworld.run.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

WRONG = 2
"""Exit code for wrong arguments, as argparse has it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``m8d-run``; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["status"]:
        from multiworld.run import status  # noqa: PLC0415  (answers without loading torch)

        return status.main(words[1:])
    from multiworld.run.launch import launch  # noqa: PLC0415  (loads torch)
    from multiworld.run.options import parse  # noqa: PLC0415

    try:
        return launch(parse(words), sys.stderr)
    except RunError as error:
        complain(f"m8d-run: {error}")
        return WRONG
