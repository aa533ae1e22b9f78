"""A launcher whose ranks are put on a machine's GPUs in one way."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from bed.ranks import Launcher

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bed.ranks import Ranks

    from hardware.placements import Placement

__all__ = ["Placed"]


class Placed:
    """Starts ranks as a `bed.ranks.Launcher` does, with a placement's environment below the caller's.

    Args:
        launcher: of the build.
        placement: how ranks are put on the GPUs.
        disguise: run programs so that they do not find the double (see `hardware.disguise`): for a test of this code.
    """

    def __init__(self, launcher: Launcher, placement: Placement, *, disguise: bool = False) -> None:
        self.launcher = launcher
        self.placement = placement
        self.python = launcher.python
        self.over = False
        self.disguise = disguise

    def start(
        self,
        program: str,
        world_size: int,
        *,
        env: Mapping[str, str | None] | None = None,
        as_rank: int | None = None,
        **more: Any,
    ) -> Ranks:
        """Start ranks; further arguments are those of ``Launcher.start``.

        Args:
            program: which.
            world_size: how many.
            env: of all of them.
            as_rank: a single rank that joins others: its place among them.

        Raises:
            AssertionError: it is `over`: who gave up wants no more ranks, though cells may still be queued.
        """
        if self.over:
            raise AssertionError("given up")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if as_rank is None:
            base, each = self.placement.of_all(visible), self.placement.of_rank
        else:
            base, each = self.placement.of_latecomer(as_rank, visible), lambda _: {}
        if self.disguise:
            program = f"hardware.disguise:{program.replace(':', '__')}"
        return self.launcher.start(program, world_size, env={**base, **(env or {})}, rank_env=each, **more)
