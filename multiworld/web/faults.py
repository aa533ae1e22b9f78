"""Faults as several launchers saw them, put together. Pure.

Each launcher has its own clock: between hosts the milliseconds are as good as their clocks agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from multiworld._core.timeline import LAST

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["merged"]

_SIGHT = frozenset({"seen", "told"})

_LATE = 30.0
"""Seconds by which a launcher may see a fault later than it ended for another one: it was cut off, or has
another time."""


def merged(told: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return one list of faults, the newest first.

    Args:
        told: by launcher; faults of `multiworld._core.timeline`.
    """
    same: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for faults in told:
        known = set()
        for each in faults:
            key = each["world"], each["generation"]
            if key not in known:  # else one of an earlier world of that name
                known.add(key)
                same.setdefault(key, []).append(each)
    found = [_together([each for each in some if _is_of(each, some)]) for some in same.values()]
    return sorted(found, key=lambda each: -each["at"])[:LAST]


def _is_of(fault: dict[str, Any], same: Sequence[dict[str, Any]]) -> bool:
    """Whether it is the newest of these, by one launcher; else it is of an earlier world of that name."""
    if not fault["healed"] and not fault["over"]:
        return True
    last = fault["at"] + fault["ms"] / 1000 if fault["healed"] else fault["steps"][-1]["at"]
    return bool(max(each["at"] for each in same) <= last + _LATE)


def _together(faults: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first = min(faults, key=lambda each: each["at"])
    steps: list[dict[str, Any]] = []
    for each in sorted((step for fault in faults for step in fault["steps"]), key=lambda step: step["at"]):
        seen = each["what"] in _SIGHT
        what = ("told" if steps else "seen") if seen else each["what"]
        steps.append({**each, "what": what, "ms": round(1000 * (each["at"] - first["at"]), 1)})
    healed = all(each["healed"] for each in faults)
    ends = [each["at"] + each["ms"] / 1000 for each in faults if each["ms"] is not None]
    return {
        **first,
        "id": f"{first['world']}/{first['generation']}",
        "steps": steps,
        "healed": healed,
        "over": all(each["over"] for each in faults),
        "ms": round(1000 * (max(ends) - first["at"]), 1) if healed else None,
    }
