"""A batch sampler for members that come and go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data import Sampler

from multiworld._core.sampling import Epochs, Place, share

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["ElasticBatchSampler"]


class _World(Protocol):
    """What the sampler asks of a world."""

    @property
    def generation(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def step(self) -> int: ...


class ElasticBatchSampler(Sampler[list[int]]):
    """This member's samples of each step, in a world whose members come and go.

    ``DataLoader(data, batch_sampler=sampler)``. Each sample is taken once in an epoch, by one member, whoever
    they are. A step's samples are taken when the step has ended, which `World.advance` says, once for each
    batch. A step that is lost in a breakage is made again, of the same samples. Which samples a step has is
    decided by `seed`, the epoch and what was taken; not by the members, unless `per_member`.

    An iterator gives the batches from here to the end of the epoch, for the members of one generation: begin
    a new one after `advance` has returned True, and after a `reform`. How many batches a DataLoader has
    fetched before does not matter.

    Make it before the join, and give it there as a part of the world's ``state``; then say `follow`.

    Args:
        length: samples of the data set.
        batch_size: samples of a step, of all members together: at least one for each.
        per_member: `batch_size` is that of each member. A step has more samples the more members there are.
        shuffle: in an order of its own for each epoch; otherwise 0, 1, 2, ...
        seed: of the orders; the same on all members.
        drop_last: what is left at the end of an epoch and makes no whole step is not taken. Otherwise the
            last step is filled up from the beginning of the epoch's order: these samples are taken twice.

    Raises:
        ValueError: there are no samples, or fewer than a step has and `drop_last`; with `per_member` where
            an epoch is begun, or its steps are asked for, by so many members.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        per_member: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__()
        if length < 1 or batch_size < 1 or (drop_last and length < batch_size):
            raise _no_step(length, batch_size, drop_last)
        self._length, self._batch_size, self._per_member = length, batch_size, per_member
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self._world: _World | None = None
        self._place = Place()  # as it was left: which step comes next is decided by the members of its time
        self._step = 0  # the world's, when it was there
        # Of the present iterator: what it is told by, its epochs, and how many batches it gave since.
        self._iterator = object()
        self._epochs: Epochs | None = None
        self._given = 0

    def follow(self, world: _World) -> None:
        """From now on the steps are those of `world`, and the members its members.

        Args:
            world: a `multiworld.World`, joined.
        """
        self._settle()
        self._world, self._step = world, world.step
        self._forget()

    @property
    def epoch(self) -> int:
        """The epoch that the next step is of; counts from 0."""
        return self._settle().epoch

    @property
    def batch_size(self) -> int:
        """Samples that all members together take in a step."""
        return self._present().per_step

    def __len__(self) -> int:
        """How many steps there are from here to the end of the epoch, with the present members."""
        return self._stepping().steps_left(self._settle())

    def __iter__(self) -> Iterator[list[int]]:
        world, place, epochs = self._followed(), self._settle(), self._stepping()
        if epochs.per_step < world.world_size:
            raise ValueError(
                f"batch_size={epochs.per_step} for {world.world_size} members: each takes one sample at least"
            )
        self._forget()
        self._epochs = epochs
        return self._batches(self._iterator, world, place, epochs)

    def state_dict(self) -> dict[str, Any]:
        """Return how far the training has come: ``epoch`` and ``taken``, samples of its order."""
        self._settle()
        return {"epoch": self._place.epoch, "taken": self._place.taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another member is, or where a checkpoint was made."""
        self._place = Place(int(state["epoch"]), int(state["taken"]))
        self._step = 0 if self._world is None else self._world.step
        self._forget()

    def _batches(self, me: object, world: _World, place: Place, epochs: Epochs) -> Iterator[list[int]]:
        generation, rank, members = world.generation, world.rank, world.world_size
        order = self._order(place.epoch)
        for number in range(epochs.steps_left(place)):
            if me is not self._iterator or generation != world.generation:
                raise RuntimeError(
                    "this iterator's batches are those of other members, or were taken already. Begin a new "
                    "one in each generation, and where a state was loaded"
                )
            taken = place.taken + number * epochs.per_step
            positions = [each % self._length for each in share(taken, epochs.per_step, rank, members)]
            self._given += 1
            yield positions if order is None else order[positions].tolist()

    def _order(self, epoch: int) -> torch.Tensor | None:
        if not self._shuffle:
            return None
        source = torch.Generator("cpu")
        source.manual_seed(self._seed + epoch)
        return torch.randperm(self._length, generator=source, device="cpu")

    def _followed(self) -> _World:
        if self._world is None:
            raise RuntimeError("the sampler follows no world yet: say sampler.follow(world)")
        return self._world

    def _present(self) -> Epochs:
        """Return the epochs as the present members go through them."""
        members = self._followed().world_size if self._per_member else 1
        return Epochs(self._length, self._batch_size * members, self._drop_last)

    def _stepping(self) -> Epochs:
        """Return `_present`, whose epochs have one step at least."""
        epochs = self._present()
        if epochs.steps_left(Place()) < 1:
            raise _no_step(self._length, epochs.per_step, self._drop_last)
        return epochs

    def _forget(self) -> None:
        """No iterator is the present one."""
        self._iterator, self._epochs, self._given = object(), None, 0

    def _settle(self) -> Place:
        """Take what the steps had that have ended since the last time; return where the next one begins."""
        world = self._world
        if world is None:
            return self._place
        # While the latest state is still to come, `world.step` is that of the others. An object that stands
        # for the world of one process has no more than a step.
        own: int | None = getattr(world, "_state_step", world.step)
        steps = 0 if own is None else own - self._step
        if steps > 0:
            if self._epochs is None or steps > self._given:
                raise RuntimeError(
                    f"the world advanced {steps} times, and {self._given} batches were taken for that: say "
                    "advance() once for each batch"
                )
            self._place = self._epochs.after(self._epochs.here(self._place), steps)
            self._given -= steps
        self._step += steps  # less than 0 where the count began anew, with this state
        return self._present().here(self._place)


def _no_step(length: int, per_step: int, drop_last: bool) -> ValueError:
    return ValueError(
        f"length={length}, batch_size={per_step}, drop_last={drop_last}: an epoch has one step at least"
    )
