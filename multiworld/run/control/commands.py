"""``m8d-run scale`` and ``retire``: requests to the launcher of a running run. Neither loads torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multiworld.cli.console import complain, say
from multiworld.run.control.client import LauncherSilentError, question
from multiworld.run.control.sockets import sockets
from multiworld.run.view.status import NONE, SILENT, ask_all
from multiworld.run.workers.scaling import DRAIN, POLICIES

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["REFUSED", "find_run", "retire", "scale"]

REFUSED = 2
"""Exit code where the run cannot be changed like this, as for wrong arguments."""

_FINDING = 2.0
_ANSWER = 30.0
"""Seconds: the launcher starts the workers before it answers."""
_CODES = (
    f"Exit code: 0; {NONE}: there is no such run here; {REFUSED}: it cannot be changed like this; "
    f"{SILENT}: its launcher does not answer."
)


def scale(argv: Sequence[str]) -> int:
    """Run ``m8d-run scale``; return its exit code."""
    parser = _parser(
        "scale",
        "Start or retire workers of a running run, whose worlds file has a role of a range. Workers that are "
        "started join their worlds as newcomers; those that are retired leave them at their next advance.",
    )
    number = parser.add_mutually_exclusive_group(required=True)
    number.add_argument("--workers", type=int, metavar="N", help="have N workers of the role on this node")
    number.add_argument("--world", metavar="W", help="have as many workers as this world needs for --size")
    parser.add_argument("--role", metavar="R", help="of --workers (default: the only one of a range)")
    parser.add_argument("--size", type=int, metavar="N", help="of --world: its number of members")
    parser.add_argument(
        "--policy",
        choices=POLICIES,
        default=POLICIES[0],
        help="who is retired first: who was started last, who was started first, or who has the highest "
        f"rank; those in no world go before (default: {POLICIES[0]})",
    )
    args = parser.parse_args(argv)
    if (args.world is None) != (args.size is None) or (args.world and args.role):
        parser.error("--world goes with --size, and without --role")
    said = {key: getattr(args, key) for key in ("workers", "world", "role", "size", "policy", "drain")}
    return _ask(args.run, "scale", said)


def retire(argv: Sequence[str]) -> int:
    """Run ``m8d-run retire``; return its exit code."""
    parser = _parser(
        "retire",
        "Have a worker leave its worlds of a range at their next advance, and end; none takes its place.",
    )
    parser.add_argument("worker", metavar="WORKER", help='its rank in the run, or "role:index"')
    args = parser.parse_args(argv)
    return _ask(args.run, "retire", {"worker": args.worker, "drain": args.drain})


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"m8d-run {name}", description=description, epilog=_CODES)
    parser.add_argument(
        "run",
        metavar="RUN",
        help="id of the run, or how it begins: see m8d-run status; or the pid of its launcher",
    )
    parser.add_argument(
        "--drain",
        type=float,
        default=DRAIN,
        metavar="SECONDS",
        help="after so long a retired worker gets SIGTERM, and SIGKILL when the run's --grace is over "
        f"(default: {DRAIN:g})",
    )
    return parser


def _ask(run: str, name: str, said: dict[str, Any]) -> int:
    command = {key: value for key, value in said.items() if value is not None}
    path, code, why = find_run(run)
    answer: object = None
    if path is not None:
        try:
            answer = question(path, {"hello": "command", "command": command}, _ANSWER)
        except LauncherSilentError as error:
            code, why = (
                SILENT,
                f"{path}: {error}, or waits for other nodes or imports. The request is dropped",
            )
        else:
            code, why = NONE, f"run {run} has just ended"
    if isinstance(answer, dict) and isinstance(answer.get("done"), list):
        for line in answer["done"] or ["nothing to do"]:
            say(str(line))
        return 0
    if answer is not None:
        said_so = answer.get("error") if isinstance(answer, dict) else None
        code, why = REFUSED, str(said_so or "its answer is none: another version of multiworld?")
    complain(f"m8d-run {name}: {why}")
    return code


def find_run(run: str) -> tuple[Path | None, int, str]:
    """Return the socket of a run's launcher; without one, an exit code and why.

    Args:
        run: its id, the name of its launcher's folder (``job7-3f0c9a5e-4711``), that launcher's pid, or how
            the id begins; "": the only one.
    """
    answers = ask_all(sockets(), _FINDING)
    ids = {each.path: str(each.snapshot.get("run_id")) for each in answers if each.snapshot is not None}
    exact = [path for path, known in ids.items() if known == run]
    names = {path: Path(path).parent.name for path in ids}
    if len(exact) != 1:  # several launchers of one run: nodes that share a host
        exact = [
            path
            for path, name in names.items()
            if name == run or (run.isdigit() and name.endswith(f"-{run}"))
        ] or exact
    found = exact or [path for path, known in ids.items() if known.startswith(run)]
    if len(found) == 1:
        return Path(found[0]), 0, ""
    if found:
        known = ", ".join(sorted(f"{ids[path]} ({names[path]})" for path in found))
        which = f" {run}" if run else ""
        rest = "Give the whole id, or the name in parentheses"
        return None, REFUSED, f"{len(found)} launchers here have a run{which}: {known}. {rest}"
    for each in answers:
        if each.snapshot is None:
            return None, SILENT, f"{each.path}: {each.fault}"
    return None, NONE, f"no launcher{f' of run {run}' if run else ''} runs on this host for this user"
