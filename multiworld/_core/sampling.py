"""Sampling: the samples of an epoch that the members of a world take in each step.

An epoch is an order of all samples. A step takes the next ones of it, each member its share. They count as
taken once the step has ended; a step that was lost in a breakage is made again, of the same samples.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Epochs", "Place", "share"]


class Place(NamedTuple):
    """How far a training has come.

    Attributes:
        epoch: counts from 0.
        taken: samples of the epoch's order that were taken.
    """

    epoch: int = 0
    taken: int = 0


class Epochs(NamedTuple):
    """The epochs of a data set as the present members go through them.

    Attributes:
        length: samples of the data set, 1 at least.
        per_step: samples that all members together take in a step, 1 at least.
        drop_last: what is left at the end of an epoch and makes no whole step is not taken. Otherwise the
            last step is filled up from the beginning of the epoch's order.
    """

    length: int
    per_step: int
    drop_last: bool

    def steps_left(self, place: Place) -> int:
        """Return how many steps there are from `place` to the end of its epoch."""
        left = self.length - place.taken
        return left // self.per_step if self.drop_last else -(-left // self.per_step)

    def here(self, place: Place) -> Place:
        """Return `place`, or the beginning of the next epoch where there is no step left in this one."""
        return place if self.steps_left(place) > 0 else Place(place.epoch + 1)

    def after(self, place: Place, steps: int) -> Place:
        """Return the place `steps` after `place`.

        Raises:
            ValueError: the epoch has not so many.
        """
        left = self.steps_left(place)
        if steps > left:
            raise ValueError(f"{steps} steps were made where the epoch had {left}")
        taken = place.taken + steps * self.per_step
        return Place(place.epoch, taken) if taken < self.length else Place(place.epoch + 1)


def share(taken: int, per_step: int, rank: int, members: int) -> range:
    """Return the samples of one member in the step that begins at `taken`, as positions in the epoch's order.

    Those beyond the order's end count from its beginning. The shares of two members differ by one at most.
    """
    return range(taken + per_step * rank // members, taken + per_step * (rank + 1) // members)
