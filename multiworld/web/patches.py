"""Patch between two views of the page, as its event stream sends it. Pure."""

from __future__ import annotations

from typing import Any

__all__ = ["patch"]

_HEAD = ("title", "note", "run", "totals")
_LISTS = {"processes": "id", "worlds": "name", "faults": "id"}


def patch(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return what a reader of `before` needs for `after`; only ``now`` where nothing has changed.

    Keys: ``set`` (of the head), ``processes``, ``worlds`` and ``faults`` (those that changed, whole),
    ``processes_gone``, ``worlds_gone``, ``faults_gone``, ``events`` (new).
    """
    found: dict[str, Any] = {"now": after["now"]}
    head = {key: after[key] for key in _HEAD if after[key] != before[key]}
    if head:
        found["set"] = head
    for name, key in _LISTS.items():
        old = {each[key]: each for each in before[name]}
        new = {each[key]: each for each in after[name]}
        changed = [each for each in after[name] if old.get(each[key]) != each]
        gone = [each for each in old if each not in new]
        found |= {name: changed} if changed else {}
        found |= {f"{name}_gone": gone} if gone else {}
    last = max((each["id"] for each in before["events"]), default=0)
    if events := [each for each in after["events"] if each["id"] > last]:
        found["events"] = events
    return found
