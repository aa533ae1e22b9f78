"""The command line: one module per command, found by its name; errors become exit codes here alone.

A command's module has ``NAME``, ``HELP``, ``configure_parser(parser)`` and ``execute(args, settings,
console)``; ``execute`` returns the exit code. What it adds as ``--out`` or ``--jobs`` is taken into the
settings; ``--patches`` and ``--cache`` go before the command and are there for all of them.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import json
import os
import pkgutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from rich.console import Console

from m8d_build.cli._stopping import Stop, stopping
from m8d_build.errors import BuildError, DiskFull, Interrupted
from m8d_build.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Command", "commands", "main", "print_json"]

BAD_ARGUMENTS = 2
UNREAD = 128 + signal.SIGPIPE
"""What a shell says of a program whose output is read no more: of one that builds, 0 would claim a wheel."""
WITH_VALUE = ("--patches", "--cache")  # before the command, each with a value


class Command(Protocol):
    """What a command's module looks like."""

    NAME: str
    HELP: str

    def configure_parser(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""

    def execute(self, args: argparse.Namespace, settings: Settings, console: Console) -> int:
        """Run the command and return its exit code."""


def commands(only: str = "") -> dict[str, Command]:
    """Return the commands by name; with ``only``, just the one in the module of that name."""
    names = [only] if only else _modules()
    loaded = [cast("Any", importlib.import_module(f"{__name__}.{name}")) for name in sorted(names)]
    return {module.NAME: module for module in loaded if hasattr(module, "NAME")}


def _modules() -> list[str]:
    return [info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_")]


def print_json(console: Console, data: Any) -> None:
    """Print data as JSON for programs: no colours, no wrapping."""
    console.file.write(json.dumps(data, indent=2) + "\n")


class _Output(Console):
    """Standard output; where no program reads it any more, that is for `main` to say."""

    def on_broken_pipe(self) -> None:  # rich's own ends the process with 1
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def main(argv: Sequence[str] | None = None, *, console: Console | None = None) -> int:
    """Run a command line and return its exit code; see ``m8d_build.errors`` for what each means."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # In a file or a CI log nothing is gained by breaking lines at 80 columns.
    width = None if sys.stdout.isatty() else 160
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Paths, and what pip and compilers say, may have letters that the locale's encoding lacks.
            stream.reconfigure(errors="backslashreplace")
    out = console or _Output(highlight=False, width=width)
    messages = console or Console(stderr=True, highlight=False)
    stop = Stop()
    try:
        with stopping() as stop:
            code = _run(arguments, out)
            out.file.flush()
            return code
    except BrokenPipeError:  # by `head`, for example
        if console is None:
            # The interpreter writes what is left when it ends, and would complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except Interrupted as exc:
        _explain(messages, exc)
        return stop.exit_code(exc.exit_code)
    except BuildError as exc:
        _explain(messages, exc)
        return exc.exit_code
    except KeyboardInterrupt:
        stopped = Interrupted(
            f"stopped by {stop.by}", next_step="Run it again: it goes on from the last finished step"
        )
        _explain(messages, stopped)
        return stop.exit_code(stopped.exit_code)
    except OSError as exc:
        if exc.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        full = DiskFull(
            f"no room left ({exc.filename or exc.strerror})", next_step="Make room and run it again"
        )
        _explain(messages, full)
        return DiskFull.exit_code


def _run(arguments: list[str], console: Console) -> int:
    # The command that is asked for is loaded alone: it should not wait for the others' libraries.
    found = commands(_asked(arguments))
    parser = argparse.ArgumentParser(
        prog="python -m m8d_build",
        description="From an official PyTorch wheel and PyTorch's sources to a patched wheel.",
    )
    patches, cache = WITH_VALUE
    parser.add_argument(patches, type=Path, metavar="DIR", help="folder with targets.toml and the series")
    parser.add_argument(cache, type=Path, metavar="DIR", help="downloads and objects (default: M8D_CACHE)")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, command in found.items():
        command.configure_parser(subparsers.add_parser(name, help=command.HELP, description=command.HELP))
    try:
        args = parser.parse_args(arguments)
    except SystemExit as exc:  # argparse ends the program; our callers want the code
        return int(exc.code or 0)
    try:
        settings = Settings.load(
            cache=args.cache,
            patches=args.patches,
            out=getattr(args, "out", None),
            jobs=getattr(args, "jobs", None),
        )
    except ValueError as exc:
        console.print(str(exc), markup=False)
        return BAD_ARGUMENTS
    return found[args.command].execute(args, settings, console)


def _asked(arguments: Sequence[str]) -> str:
    """Return the module of the command that is asked for, "" if that is not certain."""
    words = iter(arguments)
    for word in words:
        if not word.startswith("-"):
            name = word.replace("-", "_")
            return name if name in _modules() else ""
        if any(option.startswith(word) for option in WITH_VALUE):  # argparse takes shortened ones, too
            next(words, None)
    return ""


def _explain(console: Console, error: BuildError) -> None:
    """Print an error: what it is, the last lines of the log, where the log is."""
    lines = [f"{type(error).__name__}: {error.value.rstrip('.')}."]
    lines += [f"  {part.rstrip('.')}." for part in (error.rule, error.next_step) if part]
    if error.tail:
        lines += ["", *(f"  {line}" for line in error.tail.splitlines()), ""]
    if error.log is not None:
        lines.append(f"  Full log: {error.log}")
    console.print("\n".join(lines), markup=False, soft_wrap=True)
