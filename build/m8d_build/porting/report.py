"""The report on a port: what became of each topic, what was checked, what to send. JSON, beside the wheel."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from m8d_build.errors import OutputUnwritable
from multiworld import __version__ as builder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from m8d_build.errors import BuildError
    from m8d_build.progress import Reporter
    from m8d_build.series.carrying import CarriedTopic

__all__ = ["SUFFIX", "PortReport", "Recorder", "add_behaviour", "write"]

SCHEMA = 1
SUFFIX = ".port.json"
"""Beside the wheel: its name, and this."""

NOT_SHOWN = (
    "The port shows that each change has one place in these sources, and the build that the library stands "
    "in for the official one. Neither shows that the patches do what they did: new code of this version may "
    "need changes that they do not have. `nox -s check-wheel` compares behaviour, and adds what it found "
    "here; `nox -s testbed` runs the patches' tests on the test bed."
)
SEND = (
    "this file",
    "the folder `patches` that it names: the ported series, and the entry in targets.toml",
    "what check-wheel and the test bed said, if they were run",
)


class Recorder:
    """A reporter that hands on, and remembers each step, its notes and how it ended.

    Args:
        reporter: who is told.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self.steps: list[dict[str, Any]] = []

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Hand the step on, and remember whether it passed."""
        step: dict[str, Any] = {"name": name, "result": "stopped", "notes": []}
        self.steps.append(step)
        with self._reporter.step(name):
            yield
        step["result"] = "passed"

    def note(self, text: str) -> None:
        """Hand the line on, and remember it."""
        if self.steps:
            self.steps[-1]["notes"].append(text)
        self._reporter.note(text)


@dataclass
class PortReport:
    """What is known of a port so far.

    Attributes:
        torch: the version that is built.
        python: Python tag.
        ported_from: whose series.
        patches: folder with the ported series.
        facts: sources and official wheel, by name, in words.
        topics: what became of each patch.
    """

    torch: str
    python: str
    ported_from: str
    patches: Path
    facts: dict[str, str] = field(default_factory=dict)
    topics: Sequence[CarriedTopic] = ()

    def as_json(
        self, recorder: Recorder, *, wheel: Mapping[str, str] | None = None, error: BuildError | None = None
    ) -> dict[str, Any]:
        """Return the whole report.

        Args:
            recorder: of the run.
            wheel: name, version and SHA-256 of the wheel, if one was made.
            error: what ended the run, if it did not make one.
        """
        refused = any(topic.refused for topic in self.topics)
        return {
            "schema": SCHEMA,
            "torch": self.torch,
            "python": self.python,
            "ported_from": self.ported_from,
            "outcome": "built" if wheel else "refused" if refused else "failed",
            "builder": builder,
            **self.facts,
            "topics": [topic.as_json() for topic in self.topics],
            "checks": recorder.steps,
            "error": _plain(error) if error else None,
            "wheel": dict(wheel) if wheel else None,
            "behaviour": None,
            "not_shown": NOT_SHOWN,
            "patches": str(self.patches),
            "send": list(SEND),
        }


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report.

    Raises:
        OutputUnwritable: it cannot be written.
    """
    aside = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        aside.replace(path)
    except OSError as exc:
        raise OutputUnwritable(
            f"{path} cannot be written: {exc.strerror}",
            rule="the report on a port goes there",
            next_step="Correct its permissions, or name another folder with --out",
        ) from exc


def add_behaviour(wheel: Path, found: Mapping[str, Any]) -> Path | None:
    """Add what check-wheel found to the report beside a ported wheel; return its path, None without one.

    Raises:
        OutputUnwritable: it cannot be read as a report, or written.
    """
    path = wheel.with_name(wheel.name + SUFFIX)
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        report["behaviour"] = dict(found)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as exc:
        raise OutputUnwritable(
            f"{path} is no report: {exc}",
            rule="what check-wheel finds is added to it",
            next_step="Build the wheel again, or move that file away",
        ) from exc
    write(path, report)
    return path


def _plain(error: BuildError) -> dict[str, str]:
    return {
        "kind": type(error).__name__,
        "value": error.value,
        "rule": error.rule,
        "next_step": error.next_step,
        "tail": error.tail,
        "log": str(error.log or ""),
    }
