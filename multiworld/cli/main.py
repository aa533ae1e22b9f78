"""The commands of ``python -m multiworld``, put together. Errors become exit codes here and nowhere else."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from multiworld import __version__
from multiworld.cli import doctor, post_setup, report, sign, verify
from multiworld.cli.console import UnreadError, complain
from multiworld.cli.exits import INTERRUPTED, exit_code
from multiworld.errors import MultiworldError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "doctor": doctor,
    "post-setup": post_setup,
    "report": report,
    "sign": sign,
    "verify": verify,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m multiworld``; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m multiworld",
        description="Fault domains for torch.distributed: what is around the library.",
    )
    parser.add_argument("--version", action="version", version=f"multiworld {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        command.configure_parser(commands.add_parser(name, help=command.SUMMARY))
    args = parser.parse_args(argv)
    try:
        code: int = COMMANDS[args.command].execute(args)
    except MultiworldError as error:
        complain(f"multiworld {args.command}: {error}")
        return exit_code(error)
    except KeyboardInterrupt:
        complain(f"multiworld {args.command}: stopped by Ctrl-C; run the same again.")
        return INTERRUPTED
    except UnreadError:
        return 0
    return code
