"""Ranks of `growth` that train: a small model by DDP, plain and in a world, in the same processes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

import multiworld as mw
from benchmarks.measuring.rounds import order, quiet
from benchmarks.measuring.stock import Stock
from multiworld._c10d.routing import router

if TYPE_CHECKING:
    from collections.abc import Callable

FORMS = ("stock", "elastic")
_WIDTH, _DEPTH, _BATCH = 256, 4, 32


def make(rank: int, count: int, args: dict[str, Any]) -> Trainer:
    """Rank 0 serves stock's store."""
    torch.set_num_threads(1)
    return Trainer(rank, count)


class Trainer(Stock):
    """Commands of a rank; its world's store is stock's."""

    def meet(self, port: int) -> None:
        """Join stock's group and a world of a range, and make a model with each."""
        self._join_stock(port)
        self._world = mw.join(
            "training", None, (1, self._count), store=f"tcp://127.0.0.1:{port}", seat=str(self._rank),
            timeout=60.0, hang_timeout=30.0,
        )  # fmt: skip
        # First: a member whose router is uninstalled cannot make the world's gloo group when the other asks.
        self._elastic = _step_of(self._world.elastic_group, self._world.advance)
        router.uninstall()
        self._stock = _step_of(None, lambda: None)
        router.install()

    def rounds(self, first: int, rounds: int, repeat: int) -> dict[str, list[float]]:
        """Rounds of both forms in turn: ms of a step, by form and round."""
        found: dict[str, list[float]] = {form: [] for form in FORMS}
        with quiet():
            for number in range(first, first + rounds):
                for form in order(FORMS, number):
                    found[form].append(self._timed(form, repeat))
        return found

    def _timed(self, form: str, repeat: int) -> float:
        if form != "stock":
            return _timed(self._elastic, repeat)
        router.uninstall()
        try:
            return _timed(self._stock, repeat)
        finally:
            router.install()


def _step_of(group: Any, advance: Callable[[], Any]) -> Callable[[], None]:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_DEPTH)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(_BATCH, _WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()  # type: ignore[no-untyped-call, unused-ignore]
        optimizer.step()
        advance()

    return step


def _timed(step: Callable[[], None], repeat: int) -> float:
    step()
    began = time.perf_counter()
    for _ in range(repeat):
        step()
    return 1e3 * (time.perf_counter() - began) / repeat
