"""Operations that wait in the worlds of a run, asked of its workers through their launcher.

Two questions: how the workers' worlds stand, and then one worker of each world in which an operation waits
asks that world's members who is missing.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from multiworld.run.control.client import LauncherSilentError, look

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

__all__ = ["ASK_AFTER", "blocked_operations", "pending_operations", "waiting_worlds", "waits_in"]

ASK_AFTER = 0.5
"""Seconds that an operation waits before members are asked who is missing."""

_MOST_ASKED = 64
"""Worlds of which members are asked at a time."""


def waiting_worlds(statuses: Mapping[int, dict[str, Any]]) -> dict[str, list[str]]:
    """Return what to ask the workers: rank in the run, as text -> names of worlds, each asked of one worker.

    Args:
        statuses: by rank in the run, of `multiworld.status.process_status`.
    """
    chosen: dict[str, int] = {}
    for rank, status in sorted(statuses.items()):
        for each in status["worlds"]:
            if each.get("waits", 0.0) >= ASK_AFTER:
                chosen.setdefault(each["name"], rank)
    asked: dict[str, list[str]] = {}
    for name, rank in list(chosen.items())[:_MOST_ASKED]:
        asked.setdefault(str(rank), []).append(name)
    return asked


def pending_operations(path: Path, timeout: float) -> dict[str, list[dict[str, Any]]]:
    """Return what waits in the worlds of a launcher's workers, by world; rows of `multiworld.status`.

    Args:
        path: of the launcher's socket.
        timeout: seconds, for both questions together.

    Raises:
        LauncherSilentError: it does not answer.
    """
    deadline = time.monotonic() + timeout
    told = look(path, {}, timeout, {}) or []
    asked = waiting_worlds({each["rank"]: each["status"] for each in told})
    if not asked:
        return {}
    told = look(path, asked, max(0.1, deadline - time.monotonic()), {}) or []
    return {name: waits["pending"] for name, waits in waits_in(told).items() if waits["pending"]}


def blocked_operations(path: Path, timeout: float) -> dict[str, list[dict[str, Any]]]:
    """Return the same, without what only waits to be given something to do; {}: the launcher is silent."""
    try:
        found = pending_operations(path, timeout)
    except LauncherSilentError:
        return {}
    told = {name: [each for each in rows if not each["idle"]] for name, rows in sorted(found.items())}
    return {name: rows for name, rows in told.items() if rows}


def waits_in(told: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return by world what waits there, from workers' answers: ``pending`` and ``waited``."""
    return {
        name: {"pending": waits.get("pending") or [], "waited": waits.get("waited") or {}}
        for each in told
        for name, waits in (each.get("waits") or {}).items()
        if isinstance(waits, dict)
    }
