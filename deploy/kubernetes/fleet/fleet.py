"""Workers of a fleet count together; newcomers get the count, and a retired one leaves between two steps."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch

import multiworld as mw


class Count:
    """What members have in common, as a model and its optimizer would be."""

    def __init__(self) -> None:
        self.steps = torch.zeros(1, dtype=torch.int64)

    def state_dict(self) -> dict[str, Any]:
        """Return what a newcomer needs."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the others are."""
        self.steps = state["steps"]


def say(line: str) -> None:
    """Print a line in one write."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Count until this worker is retired."""
    torch.set_num_threads(1)
    count, generation = Count(), 0
    world = mw.join_all(state={"fleet": count})["fleet"]
    while world.state is not mw.State.CLOSED:
        if generation != world.generation:
            generation = world.generation
            say(f"worker {os.environ['RANK']}: {world.world_size} members, step {int(count.steps)}")
        try:
            world.all_reduce(torch.ones(1))
            count.steps += 1
            world.advance()
        except mw.BrokenWorldException:
            mw.join_all()
        time.sleep(0.05)
    say(f"worker {os.environ['RANK']} has left after step {int(count.steps)}")


if __name__ == "__main__":
    main()
