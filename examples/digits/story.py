"""Story of an example that trains: its members, and its losses beside an undisturbed run's."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from _common import PATIENCE, say

__all__ = ["Progress", "compared"]


class Progress:
    """The step at which the members are, and their result, told through the store beside the world's records."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    @classmethod
    def of(cls, args: argparse.Namespace) -> Progress:
        """A member's, once there is a store.

        In terminals no process asks for it, and the store is lost with the member that serves it: it stays here then.
        """
        if not args.tell:
            return cls(dist.HashStore())
        return cls(dist.TCPStore(args.addr, args.port, is_master=False, wait_for_workers=False))

    def tell(self, step: int, result: dict[str, Any] | None = None) -> None:
        """Say it; at the end with a result."""
        if result is not None:
            self._store.set("example/result", json.dumps(result))
        self._store.set("example/step", str(step))

    def wait(self, step: int) -> None:
        """Wait until the members are there."""
        deadline = time.monotonic() + PATIENCE
        while not self._store.check(["example/step"]) or int(self._store.get("example/step")) < step:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the members are not at step {step} after {PATIENCE:.0f} s")
            time.sleep(0.02)

    def result(self) -> dict[str, Any]:
        """What the members came to."""
        found: dict[str, Any] = json.loads(self._store.get("example/result"))
        return found


def compared(disturbed: dict[str, Any], calm: dict[str, Any], record: str) -> int:
    """Say what two runs came to, and write it to the file `record`, if it is named; 0 if they are alike."""
    for name, each in (("disturbed", disturbed), ("undisturbed", calm)):
        losses, sizes = zip(*each["steps"], strict=True)
        changes = [
            f"{size} from step {at}" for at, size in enumerate(sizes) if not at or size != sizes[at - 1]
        ]
        say(
            "%s: members %s; loss %.4f to %.4f in %d steps, accuracy %.1f %%",
            name, ", ".join(changes), losses[0], losses[-1], len(losses), 100 * each["accuracy"],
        )  # fmt: skip
    pairs = zip(disturbed["steps"], calm["steps"], strict=True)
    difference = max(abs(one[0] - other[0]) for one, other in pairs)
    say("largest difference of a step's loss: %.1e", difference)
    if record:
        Path(record).write_text(json.dumps({"disturbed": disturbed, "undisturbed": calm}) + "\n")
    return 0 if difference < 0.01 else 1
