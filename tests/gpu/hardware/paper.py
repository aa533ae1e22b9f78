"""The paper's throughput on this machine's GPUs: torch's single world, and a world for each sender."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.figures.sizes import KB, MB, size_name
from benchmarks.measuring.ranks import RankError
from benchmarks.paper.nccl import SIZES, figures, senders_for
from hardware.records import Check, Figure
from hardware.verify import checked

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hardware.placed import Placed

__all__ = ["PAPER", "paper"]

PAPER = "the paper's throughput, one leader and its senders"
_ROUNDS = 7
_FEW = (4 * KB, MB)


def paper(
    placed: Placed, backend: str, gpus: int, packages: tuple[Path, ...]
) -> list[tuple[str, Callable[[], Check]]]:
    """Name it, and give what measures it; nothing for a backend other than torch's default for NCCL.

    Args:
        placed: the launcher.
        backend: which.
        gpus: how many there are.
        packages: folders with what processes need beyond torch.
    """
    if backend != "nccl":
        return []
    return [(PAPER, partial(checked, PAPER, partial(_measure, placed, gpus, packages)))]


def _measure(placed: Placed, gpus: int, packages: tuple[Path, ...]) -> tuple[list[Any], dict[str, Any]]:
    env = dict(placed.placement.of_all(os.environ.get("CUDA_VISIBLE_DEVICES", "")))
    if packages:
        env["PYTHONPATH"] = os.pathsep.join(map(str, packages))
    if placed.launcher.library is not None:
        env["LD_PRELOAD"] = str(placed.launcher.library)
    senders = 1 if placed.placement.one_gpu else senders_for(gpus)
    rounds, sizes = (1, _FEW) if placed.disguise else (_ROUNDS, SIZES)
    told = []
    try:
        for each in figures(
            senders, sizes, rounds, python=placed.python, env=env, hosts=placed.placement.hosts
        ):
            words = each.series
            if "topology" in words and each.baseline is not None:
                name = f"{words['form']}, {words['topology']}, {words['senders']} senders, {size_name(words['bytes'])}"
                told.append(Figure(name, "MB/s", round(each.absolute or 0.0, 1), round(each.baseline, 1)))
    except RankError as error:
        return [error], {}
    return [], {"done": len(told), "figures": tuple(told)}
