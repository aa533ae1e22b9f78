"""What worlds on NCCL cost on this machine: operations beside plain torch's, and the memory of many worlds."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from hardware.records import Check, Figure
from hardware.verify import checked

if TYPE_CHECKING:
    from collections.abc import Callable

    from hardware.placed import Placed

__all__ = ["COSTS", "costs"]

_LONG = 300.0
_SIZES = (4, 64 << 10, 1 << 20, 64 << 20, 1 << 30)
_NAMES = {4: "4 B", 64 << 10: "64 KB", 1 << 20: "1 MB", 64 << 20: "64 MB", 1 << 30: "1 GB"}
_WORLDS = (1, 10, 30)
_MIB = 1 << 20

TIMES, MEMORY = "operations beside plain torch, 2 members", "memory of 1, 10, 30 worlds, 2 members"
COSTS = (TIMES, MEMORY)
"""Names of both."""


def costs(placed: Placed, backend: str) -> list[tuple[str, Callable[[], Check]]]:
    """Name what is measured, and give what measures it.

    Args:
        placed: the launcher.
        backend: which.
    """
    return [
        (name, partial(checked, name, partial(run, placed, backend)))
        for name, run in ((TIMES, _times), (MEMORY, _memory))
    ]


def _times(placed: Placed, backend: str) -> tuple[list[Any], dict[str, Any]]:
    sizes = _SIZES[:2] if placed.disguise else _SIZES
    config = {"backend": backend, "sizes": sizes, "rounds": 1 if placed.disguise else 5}
    with placed.start("costs:times", 2, config=config, timeout=_LONG) as ranks:
        found = ranks.wait("times")[0].fields["found"]
        ranks.join()
    figures = []
    for key, seconds in found.items():
        op, size, way = key.rsplit(" ", 2)
        if way != "plain":
            plain = found[f"{op} {size} plain"]
            told = f"{op}, {_NAMES[int(size)]}" + (", awaited" if way == "awaited" else "")
            figures.append(Figure(told, "us", round(seconds * 1e6, 1), round(plain * 1e6, 1)))
    return [], {"done": len(figures), "figures": tuple(figures)}


def _memory(placed: Placed, backend: str) -> tuple[list[Any], dict[str, Any]]:
    worlds = _WORLDS[:1] if placed.disguise else _WORLDS
    config = {"backend": backend, "worlds": (0, *worlds)}
    with placed.start("costs:memory", 2, config=config, timeout=_LONG) as ranks:
        ranks.wait("closed")
        told = [event.fields for event in ranks.events(0, "held")]
        ranks.join()
    first, figures = told[0], []
    for each in told[1:]:
        many = f"{each['worlds']} worlds" if each["worlds"] > 1 else "1 world"
        # Both members' processes are on the GPU where they share it.
        figures += [
            Figure(f"{many}: memory of the GPU, both members", "MiB", _mib(each["gpu"] - first["gpu"])),
            Figure(f"{many}: memory of the host, a member", "MiB", each["host"] - first["host"]),
            Figure(f"{many}: a join", "ms", round(1000 * each["join"], 1)),
        ]
    return [], {"done": max(worlds), "figures": tuple(figures)}


def _mib(count: int) -> float:
    return round(count / _MIB, 1)
