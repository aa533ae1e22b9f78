"""``m8d-run status``: prints the state of each run that this user's launchers have on this host.

Each launcher serves a socket in a folder of its own; all are asked at once, each with a deadline. Neither
torch nor any other slow module is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from multiworld._net.blocking import BlockingCall
from multiworld.cli.console import complain, say
from multiworld.run.control.client import LauncherSilentError, own_snapshot
from multiworld.run.control.pending import blocked_operations
from multiworld.run.control.sockets import sockets
from multiworld.run.errors import RunError
from multiworld.run.view.layout import layout, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["NONE", "SILENT", "Answer", "ask_all", "main"]

NONE = 1
"""Exit code where no launcher runs (with --run-id: none of that run)."""

SILENT = 3
"""Exit code where a launcher did not answer in time, or answered with something else than a snapshot."""

_TIMEOUT = 2.0
_PENDING = 2.0
"""Seconds, more, that its workers have to say what waits in their worlds."""
_EVERY = 1.0
_VERSION = 1


class Answer(NamedTuple):
    """One launcher's answer.

    Attributes:
        path: of its socket.
        snapshot: of its run; None without a valid answer.
        fault: why there is no snapshot.
    """

    path: str
    snapshot: dict[str, Any] | None
    fault: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``m8d-run status``; return its exit code: 0, or `NONE`, or `SILENT`."""
    parser = argparse.ArgumentParser(
        prog="m8d-run status",
        description="Tell how the runs of this user on this host stand.",
        epilog=f"Exit code: 0; {NONE}: nothing runs; {SILENT}: a launcher did not answer within "
        f"{_TIMEOUT:g} s.",
    )
    parser.add_argument("--run-id", metavar="ID", help="only this run (default: all)")
    parser.add_argument(
        "--json", action="store_true", help="print a list of snapshots; with --watch a list on each line"
    )
    parser.add_argument(
        "--watch", action="store_true", help="ask again each second, until the runs have ended"
    )
    args = parser.parse_args(argv)
    try:
        return _watch(args) if args.watch else _once(args)
    except KeyboardInterrupt:
        return 0


def ask_all(paths: Sequence[Path], timeout: float, *, waits: bool = False) -> list[Answer]:
    """Ask all launchers at once; return the answers of those that live, in order.

    Args:
        paths: of sockets.
        timeout: seconds for each, from connecting to the snapshot's last byte.
        waits: whether workers are asked, too, what waits in their worlds.
    """
    calls = [_call(path, partial(_ask, path, timeout, waits=waits)) for path in paths]
    deadline = time.monotonic() + timeout + waits * _PENDING + 1.0
    late = f"no answer within {timeout:g} s"
    answers: list[Answer | None] = []
    for path, call in zip(paths, calls, strict=True):
        if isinstance(call, Answer):
            answers.append(call)
        elif call.wait(deadline - time.monotonic()):
            answers.append(call.result())
        else:
            answers.append(Answer(str(path), None, late))
    return [each for each in answers if each is not None]


def _call(path: Path, ask: Callable[[], Answer | None]) -> BlockingCall[Answer | None] | Answer:
    try:
        return BlockingCall(ask, name="m8d-run-status")
    except RuntimeError as error:  # can't start new thread
        return Answer(str(path), None, f"not asked: {error}")


def _ask(path: Path, timeout: float, *, waits: bool) -> Answer | None:
    """Return a launcher's answer; None if it has ended."""
    try:
        found = own_snapshot(path, timeout)
    except LauncherSilentError as error:
        return Answer(str(path), None, str(error))
    if found is None:
        return None
    return Answer(str(path), {**found, "pending": blocked_operations(path, _PENDING)} if waits else found)


def _told(run_id: str | None) -> tuple[list[dict[str, Any]], list[Answer]]:
    """Return the snapshots, and the answers without one; of one run, or of all."""
    answers = [_checked(each) for each in ask_all(sockets(), _TIMEOUT, waits=True)]
    snapshots = [each.snapshot for each in answers if each.snapshot is not None]
    silent = [each for each in answers if each.snapshot is None]
    if run_id is not None:
        snapshots = [each for each in snapshots if each.get("run_id") == run_id]
        silent = [] if snapshots else silent  # any of the silent ones may have that run
    return snapshots, silent


def _checked(answer: Answer) -> Answer:
    """Return the answer; without its snapshot where that cannot be shown."""
    try:
        if answer.snapshot is not None:
            _plain(answer.snapshot)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return Answer(answer.path, None, f"its answer is no snapshot: {type(error).__name__}: {error}")
    return answer


def _once(args: argparse.Namespace) -> int:
    snapshots, silent = _told(args.run_id)
    if args.json:
        say(json.dumps(snapshots, indent=1))
    elif snapshots:
        _show(snapshots)
    for each in silent:
        complain(f"m8d-run status: {each.path}: {each.fault}")
    if silent:
        return SILENT
    if not snapshots:
        complain(_nothing(args.run_id))
        return NONE
    return 0


def _watch(args: argparse.Namespace) -> int:
    terminal, before = os.isatty(1) and not args.json, ""
    while True:
        snapshots, silent = _told(args.run_id)
        if not snapshots and not silent:
            if before:
                return 0
            complain(_nothing(args.run_id))
            return NONE
        if args.json:
            before = json.dumps(snapshots)
            say(before)
        else:
            lines = [_plain(each, height=_height(len(snapshots)) if terminal else None) for each in snapshots]
            text = "\n\n".join([*lines, *(f"{each.path}: {each.fault}" for each in silent)])
            if text != before:
                say(f"\x1b[H\x1b[2J{text}" if terminal else f"{text}\n")
            before = text
        time.sleep(_EVERY)


def _height(runs: int) -> int:
    return max(8, shutil.get_terminal_size().lines // runs - 1)


def _nothing(run_id: str | None) -> str:
    of_run = f" of run {run_id}" if run_id is not None else ""
    return f"m8d-run status: no launcher{of_run} runs on this host for this user"


def _show(snapshots: Sequence[dict[str, Any]]) -> None:
    for place, snapshot in enumerate(snapshots):
        text = _plain(snapshot)
        if os.isatty(1) and snapshot.get("version") == _VERSION:
            text = _coloured(snapshot) or text
        say(f"\n{text}" if place else text)


def _plain(snapshot: dict[str, Any], height: int | None = None) -> str:
    if snapshot.get("version") != _VERSION:
        version = snapshot.get("version")
        return f"run {snapshot.get('run_id')}: its snapshot is of version {version}; see it with --json"
    return plain(layout(snapshot, _width(), height))


def _width() -> int:
    return max(40, shutil.get_terminal_size().columns) if os.isatty(1) else 120


def _coloured(snapshot: dict[str, Any]) -> str:
    """Return the layout with a terminal's colours; "" without rich."""
    try:
        from multiworld.run.view.screen import coloured  # noqa: PLC0415  (rich: a pipe does not need it)

        return coloured(layout(snapshot, _width()), _width())
    except RunError:
        return ""
