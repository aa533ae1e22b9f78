"""The curves: each size in the simulation, a row of plain numbers for `docs/scale.json`."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.scale.assumptions import Network
from benchmarks.scale.mesh import Mesh
from benchmarks.scale.reforming import reform

if TYPE_CHECKING:
    from collections.abc import Callable

LARGEST = 10_000
"""Members; of this world only a kill is simulated: what silence takes depends little on the size."""
WATCHED = (4, 16, 64, 256, 1000, LARGEST)
REFORMED = (4, 8, 16, 32, 64, 128, 256, 512, 1000)
ALONE = (4, 8, 16, 32, 64, 128, 256)
LOSSES = {0.3: 40, 0.15: 20}
"""Shares of packets that are lost, each with the number of worlds that see it."""
CUT_OFF = (1.0, 2.0, 3.0, 3.5, 4.0, 5.0)
REAL = {64: 16, 256: 8, 1000: 3, LARGEST: 1}
"""Members that run the whole protocol, by the size from which so few are enough: they are all alike."""
PER_HOST = Network().per_host
REFORM_FOR = 100_000.0
"""Seconds: the curve is of the time that a reform needs, also where no program would wait for it."""


def real_of(size: int) -> int:
    """How many members of a world run the whole protocol."""
    return next((REAL[each] for each in sorted(REAL, reverse=True) if size >= each), size)


def watching(size: int, seconds: float) -> dict[str, Any]:
    """A world that is joined, watched for so long, and loses a member; others lose one in other ways."""
    mesh = Mesh(size, real_of(size))
    join, steady, crash = mesh.join(), mesh.steady(seconds), mesh.kill()
    row = {
        "members": size,
        "connections": size - 1,
        "pairs": size * (size - 1) // 2,
        "join": join,
        "sent": steady.sent,
        "all": steady.sent * size,
        "turns": steady.turns,
        "cpu": steady.cpu,
        "scan": steady.looking,
        "crash": max(crash.took),
        "settled": crash.settled if crash.settled < math.inf else None,
        "told": crash.told,
    }
    for name, hit in (("stop", Mesh.stop), ("host", Mesh.lose_host)):
        if PER_HOST < size < LARGEST:
            mesh = Mesh(size, real_of(size), seed=2)
            mesh.join()
            mesh.loop.run(mesh.loop.now + 2.5)
            row[name] = max(hit(mesh).took)
    return row


def reforming(size: int, seed: int = 1, *, letters: bool = True) -> dict[str, Any]:
    """A reform, with a store that takes letters, or with one in which each member writes for itself."""
    done = reform(size, seed=seed, timeout=REFORM_FOR, letters=letters)
    if not done.together:
        raise RuntimeError(f"the survivors of {size} are not in one generation: {done}")
    return {
        "members": size,
        "agreed": done.agreed,
        "active": done.active,
        "tries": done.tries,
        "bytes": done.bytes,
        "probes": done.probes,
    }


def losses(loss: float, *, members: int, most: float, worlds: int) -> dict[str, Any]:
    """Worlds of members on hosts of their own, each until it breaks, or for `most` seconds.

    Returns:
        ``loss``; ``broken``: how many worlds broke; ``hours``: simulated, of one member's watch of one other;
        ``rate``: false verdicts in a second of that.
    """
    broken, watched = 0, 0.0
    for seed in range(1, worlds + 1):
        mesh = Mesh(members, seed=seed, network=Network(per_host=1))
        mesh.join()
        mesh.wires.about = replace(mesh.network, loss=loss)
        began = mesh.loop.now
        broken += mesh.breaks(most)
        watched += (mesh.loop.now - began) * members * (members - 1)
    return {"loss": loss, "broken": broken, "hours": watched / 3600, "rate": broken / watched}


def blackouts(seconds: float, seeds: int, members: int = 8) -> dict[str, Any]:
    """The share of worlds that break when one of their hosts is cut off for so long."""
    broken = 0
    for seed in range(1, seeds + 1):
        mesh = Mesh(members, seed=seed, network=Network(per_host=1))
        mesh.join()
        mesh.loop.run(mesh.loop.now + 2.5 + mesh.loop.random.random())
        mesh.wires.cut(0, mesh.loop.now + seconds)
        broken += mesh.breaks(15.0)
    return {"seconds": seconds, "broken": broken / seeds}


def jobs() -> dict[str, Callable[[], dict[str, Any]]]:
    """What makes each row, by its table and its name in it; in the order of the tables."""
    made: dict[str, Callable[[], dict[str, Any]]] = {}
    for size in WATCHED:
        made[f"watching/{size}"] = partial(
            watching, size, 5.0 if size < 1000 else 2.0 if size < LARGEST else 1.0
        )
    for size in REFORMED:
        made[f"reforming/{size}"] = partial(reforming, size)
    for size in ALONE:
        made[f"alone/{size}"] = partial(reforming, size, letters=False)
    for loss, worlds in LOSSES.items():
        made[f"losses/{loss:g}"] = partial(losses, loss, members=8, most=2000.0, worlds=worlds)
    for seconds in CUT_OFF:
        made[f"blackouts/{seconds:g}"] = partial(blackouts, seconds, 10)
    return made
