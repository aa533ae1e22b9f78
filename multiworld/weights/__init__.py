"""Weights of a trainer for any number of engines that come and go: whole versions, in place.

Each engine shares a world of two with the trainer. An engine's death breaks that world alone: the trainer's
steps and the other engines go on. One world of all would break with each death, and have to be reformed by
all, the trainer too, while no weights travel; and a broadcast ends when the slowest engine has it. The price
is that the trainer's host sends the weights once for each engine.

Importing this loads torch. See docs/rl-weights.md.
"""

from __future__ import annotations

from multiworld.weights.publisher import Publisher
from multiworld.weights.subscriber import Subscriber
from multiworld.weights.tensors import BUCKET, digest

__all__ = ["BUCKET", "Publisher", "Subscriber", "digest"]
