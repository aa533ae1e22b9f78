"""Cases become jobs of probes/supervise.py, and its answer becomes outcomes. Starts no process."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from m8d_build.errors import BehaviourFailed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from m8d_build.check.cases import Case

__all__ = ["PROBE_PREFIX", "End", "Observed", "observe", "read_ends", "supervisor_plan"]

PROBE_PREFIX = "M8D "


@dataclass(frozen=True)
class End:
    """How one program ended.

    Attributes:
        returncode: exit status, or minus the number of the signal that ended it.
        timed_out: it ran past its time and was ended.
        seconds: from its start to its end.
        stdout: last part of its standard output.
        stderr: last part of its standard error.
    """

    returncode: int
    timed_out: bool
    seconds: float
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Observed:
    """What came of a case in one environment.

    Attributes:
        outcome: one short phrase, compared with the expected one.
        seconds: the longest of its programs.
        details: what its first program told beyond the outcome.
        output: what its programs wrote, for the log.
    """

    outcome: str
    seconds: float
    details: Mapping[str, Any]
    output: str


def supervisor_plan(
    cases: Sequence[Case],
    *,
    kind: str,
    python: Path,
    probes: Path,
    paths: Mapping[str, str],
    bytecode: Path | None,
    parallel: int,
) -> dict[str, Any]:
    """Return the plan of every case that has something to run in this kind of environment.

    Args:
        cases: what to run.
        kind: "patched" or "stock".
        python: the environment's interpreter.
        probes: folder of the scripts.
        paths: what the cases' placeholders stand for.
        bytecode: where Python keeps compiled files if nothing may be written into the environment.
        parallel: jobs side by side.
    """
    interpreter = [str(python), "-I", "-W", "ignore", "-X", "faulthandler"]
    if bytecode is not None:
        interpreter += ["-X", f"pycache_prefix={bytecode}"]
    return {
        "parallel": parallel,
        "jobs": [
            {
                "name": case.name,
                "programs": [
                    [*interpreter, str(probes / script), *(_fill(argument, paths) for argument in arguments)]
                    for script, *arguments in case.programs
                ],
                "env": {name: _fill(value, paths) for name, value in case.env.items()},
                "timeout": case.timeout,
            }
            for case in cases
            if case.expected(kind) is not None
        ],
    }


def read_ends(text: str) -> dict[str, tuple[End, ...]]:
    """Read the supervisor's answer: the ends of each job's programs.

    Raises:
        BehaviourFailed: it is not what the supervisor writes.
    """
    try:
        return {name: tuple(End(**end) for end in ends) for name, ends in json.loads(text)["jobs"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise BehaviourFailed(
            f"the probes' supervisor wrote something else than results: {exc}", next_step="Look at the log"
        ) from exc


def observe(case: Case, ends: Sequence[End]) -> Observed:
    """Return what came of a case.

    Programs that ended alike count as one; otherwise the first that did not do as it should is told.
    """
    told = [(_outcome(end), end) for end in ends]
    outcomes = list(dict.fromkeys(_with_sign(case, outcome, end) for (outcome, _), end in told))
    output = "\n".join(f"{end.stdout.rstrip()}\n{end.stderr.rstrip()}".strip() for end in ends)
    return Observed(
        outcome=" / ".join(outcomes) or "nothing was run",
        seconds=max((end.seconds for end in ends), default=0.0),
        details=told[0][0][1] if told else {},
        output=output,
    )


def _outcome(end: End) -> tuple[str, Mapping[str, Any]]:
    if end.timed_out:
        return f"no end within {end.seconds:.0f} s", {}
    if end.returncode < 0:
        return signal.Signals(-end.returncode).name, {}
    said = [line for line in end.stdout.splitlines() if line.startswith(PROBE_PREFIX)]
    if end.returncode > 0 or not said:
        last = (end.stderr.strip().splitlines() or ["no message"])[-1]
        return f"exit status {end.returncode}: {last}", {}
    try:
        details = json.loads(said[-1].removeprefix(PROBE_PREFIX))
        return str(details.pop("outcome")), details
    except (ValueError, KeyError, AttributeError):
        return f"unreadable answer: {said[-1]}", {}


def _with_sign(case: Case, outcome: str, end: End) -> str:
    written = end.stdout + end.stderr
    lacking = [text for which, text in case.signs if which == outcome and text not in written]
    return f"{outcome}, but not for this reason (no {lacking[0]!r})" if lacking else outcome


def _fill(text: str, paths: Mapping[str, str]) -> str:
    for name, path in paths.items():
        text = text.replace("{" + name + "}", path)
    return text
