"""``m8d-run``: the command. Errors become exit codes here and nowhere else.

Exit codes: 0 when all workers ended with 0; that of the first failed worker (128 + the signal's number, if
one ended it); 128 + the signal's number when a signal ended the launcher; 2 for wrong arguments, a wrong
variable ``M8D_*`` or a wrong worlds file; else 1.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from multiworld import __version__
from multiworld.cli.console import UnreadError, complain, say
from multiworld.errors import MultiworldError
from multiworld.run.errors import WRONG
from multiworld.run.signals import interrupts_at_once, keep_exit_codes

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

INTERRUPTED = 130
"""Exit code where Ctrl-C came before the launcher hears signals itself."""

NO_TORCH = 1
"""Exit code where torch is not installed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``m8d-run``; return its exit code."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except UnreadError:
        return 0


def _run(words: list[str]) -> int:
    if words[:1] == ["status"]:
        from multiworld.run.view import status  # noqa: PLC0415  (answers without loading torch)

        return status.main(words[1:])
    if words[:1] in (["scale"], ["retire"]):
        from multiworld.run.control import commands  # noqa: PLC0415  (they load no torch either)

        return (commands.scale if words[0] == "scale" else commands.retire)(words[1:])
    if words[:1] == ["make-authority"]:
        from multiworld.run.secure import commands as secure  # noqa: PLC0415  (it loads no torch either)

        return secure.make_authority(words[1:])
    if words[:1] == ["web"]:
        from multiworld.web import command  # noqa: PLC0415  (it loads no torch either)

        return command.main(words[1:])
    if words[:1] == ["--version"]:
        say(f"m8d-run {__version__}")
        return 0
    try:
        with interrupts_at_once():
            from multiworld.run.launcher import launch  # noqa: PLC0415  (loads torch)
            from multiworld.run.options import parse  # noqa: PLC0415  (loads torch)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torch":
            raise
        complain(
            f"m8d-run: {error}: this Python ({sys.executable}) has no torch with torch.distributed, which "
            "m8d-run is built on. Install torch 2.4 or newer, and see docs/install.md."
        )
        return NO_TORCH
    keep_exit_codes()
    try:
        return launch(parse(words), sys.stderr)
    except MultiworldError as error:  # an argument, or a variable M8D_* that is wrong
        complain(f"m8d-run: {error}")
        return WRONG
    except KeyboardInterrupt:
        return INTERRUPTED
