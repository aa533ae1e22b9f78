"""Worlds and members as the page's view has them, from what a process says of its world. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["VERSION", "member", "world"]

VERSION = 1
"""Of the view. Keys may be added within a version; none changes its meaning."""


def member(
    status: dict[str, Any],
    row: Sequence[Any],
    process: str,
    worker: int | None,
    *,
    state: str = "",
    received: int = 0,
    total: int = 0,
) -> dict[str, Any]:
    """Return a member of the view.

    Args:
        status: of the world, by a process that is in it.
        row: rank, pid, host and seat of the member.
        process: its "host/pid".
        worker: its rank in the run; None: it is not known.
        state: as the member says itself; "" where only others speak of it.
        received: bytes of the world's state that it has, while they come.
        total: of them.
    """
    rank, _, _, seat = row
    lost = status["state"] == "broken" and rank in status["ranks"]
    busy = rank in status["busy"]
    told = state or status["state"]
    if lost and not state:
        told = "lost"
    elif busy and told == "active":
        told = "busy"
    return {
        "rank": rank,
        "process": process,
        "worker": worker,
        "state": told,
        "generation": status["generation"],
        "seat": seat,
        "cause": status["cause"] if lost else "",
        "evidence": status["detail"] if lost else "runs, but does not answer" if busy else "",
        "since": status["since"],
        "received": received,
        "total": total,
    }


def world(
    status: dict[str, Any],
    members: list[dict[str, Any]],
    waits: dict[str, Any] | None,
    links: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return a world of the view.

    Args:
        status: of the world; of one that is joined for the first time, name and state.
        members: of the view.
        waits: of `multiworld.status.waits_of`; None: nothing does.
        links: of `multiworld.web.links`.
    """
    broken = status["state"] == "broken"
    return {
        "name": status["name"],
        "state": status["state"],
        "generation": status.get("generation", 0),
        "backend": status.get("backend", ""),
        "size": status.get("size", 0),
        "sizes": status.get("sizes", ""),
        "since": status.get("since"),
        "note": "",
        "cause": status.get("cause", "") if broken else "",
        "detail": status.get("detail", "") if broken else "",
        "members": sorted(members, key=lambda each: (each["rank"] < 0, each["rank"])),
        "candidates": 0,
        "left": status["state"] in {"broken", "joining"} and status.get("cause") == "left",
        "pending": waits["pending"] if waits and not broken else [],
        "links": links,
        "waited": waits["waited"] if waits and not broken else {},
    }
