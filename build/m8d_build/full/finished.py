"""Finished steps of a full build: a file, replaced after each, from which a stopped build is resumed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from m8d_build.full.steps import Step

__all__ = ["Finished", "load_state", "remaining", "save_state"]

SCHEMA = 1


@dataclass(frozen=True)
class Finished:
    """A finished step.

    Attributes:
        key: of the step when it was finished.
        seconds: how long it took.
    """

    key: str
    seconds: float


def load_state(path: Path) -> dict[str, Finished]:
    """Return the finished steps by id; an absent or unreadable file means that none is."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            return {}
        return {name: Finished(str(raw["key"]), float(raw["seconds"])) for name, raw in data["steps"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def save_state(path: Path, state: Mapping[str, Finished]) -> None:
    """Write the state beside its place and move it in.

    Raises:
        OSError: it cannot be written.
    """
    steps = {name: {"key": done.key, "seconds": round(done.seconds, 3)} for name, done in state.items()}
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps({"schema": SCHEMA, "steps": steps}, indent=2) + "\n", encoding="utf-8")
    beside.replace(path)


def remaining(
    steps: Sequence[Step], state: Mapping[str, Finished], present: Mapping[str, bool]
) -> tuple[Step, ...]:
    """Return the steps to be done: from the first that is not finished as it is now on; else those done in every run.

    Args:
        steps: of the plan, in order.
        state: the finished ones.
        present: for every path that steps make, whether it is there.
    """
    for number, step in enumerate(steps):
        done = state.get(step.id)
        if step.always:
            continue
        if done is None or done.key != step.key or not all(present.get(path, False) for path in step.makes):
            return tuple(steps[number:])
    return tuple(step for step in steps if step.always)
