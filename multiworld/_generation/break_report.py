"""The report of a breakage: why a world broke, and what all its members were doing, as a file.

Each member writes one where ``M8D_REPORTS`` names a folder; ``python -m multiworld report`` puts those of one
breakage together and explains them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from typing import TYPE_CHECKING

from multiworld._core.operations.report import as_dict
from multiworld.logs.source import about, logger

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from multiworld._core.membership.roster import Roster
    from multiworld._core.operations.report import MemberReport
    from multiworld.events import Breakage
    from multiworld.pending import PendingOperation

__all__ = ["generation_id", "write", "write_flight"]

_log = logger(__name__)


def write(
    folder: Path,
    roster: Roster,
    breakage: Breakage,
    reports: Mapping[int, MemberReport | None],
    pending: Iterable[PendingOperation],
) -> Path | None:
    """Write the report; None where the folder cannot be written to, which is logged.

    Args:
        folder: made if it is not there.
        roster: of the generation that broke.
        breakage: why.
        reports: of all members; None of one that has not answered.
        pending: made from these.
    """
    found = {
        "format": 1,
        "world": roster.world,
        "generation": roster.generation,
        "id": generation_id(roster),
        "rank": roster.rank,
        "broke_at": time.time() - (time.monotonic() - breakage.at),
        "cause": breakage.cause.value,
        "ranks": list(breakage.ranks),
        "detail": breakage.detail,
        "members": [
            {"rank": each.rank, "pid": each.pid, "hostname": each.hostname, "process": each.process}
            for each in roster.members
        ],
        "pending": [str(each) for each in pending],
        "reports": [as_dict(each) for each in reports.values() if each is not None],
    }
    path = folder / _name(roster)
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(found, indent=1) + "\n")
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        _log.warning(
            "no report of the breakage of world %r: %s",
            roster.world,
            error,
            extra=about(roster.world, roster.generation),
        )
        return None
    _log.info(
        "world %r (generation %d): report in %s",
        roster.world,
        roster.generation,
        path,
        extra=about(roster.world, roster.generation),
    )
    return path


def write_flight(report: Path, roster: Roster, record: bytes) -> None:
    """Write torch's record of this process's operations beside its report.

    Args:
        report: as `write` returned it.
        roster: of the generation that broke.
        record: content of the file, whose name is one that ``torchfrtrace --prefix`` reads: the same for
            all members, but for the rank at its end.
    """
    path = report.parent / f"{_stem(roster)}.flight{roster.rank}"
    try:
        path.write_bytes(record)
    except OSError as error:
        text = "world %r: torch's record is not beside the report: %s"
        _log.warning(text, roster.world, error, extra=about(roster.world, roster.generation))


def _name(roster: Roster) -> str:
    return f"{_stem(roster)}.rank{roster.rank}.json"


def _stem(roster: Roster) -> str:
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", roster.world)[:80]
    if plain != roster.world:  # two names that differ in other characters have two files
        plain += "-" + hashlib.sha256(roster.world.encode()).hexdigest()[:8]
    return f"{plain}.{roster.generation}.{generation_id(roster)}"


def generation_id(roster: Roster) -> str:
    """Return what members of a generation have in common, and no other one of that name and number has."""
    return hashlib.sha256(b"report" + roster.token).hexdigest()[:8]
