"""Members of a world as the sampler sees them, without processes: they step, break, come and go."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from multiworld.elastic import ElasticBatchSampler


class AsWorld:
    """What the sampler asks of a world.

    Args:
        behind: advances of the member's own state, while the latest is still to come; None: it has that.
    """

    def __init__(self, generation, rank, world_size, step, behind=None):
        self.generation, self.rank, self.world_size, self.step = generation, rank, world_size, step
        self.behind = behind

    @property
    def _state_step(self):
        return self.step if self.behind is None else self.behind


@dataclass
class Member:
    """A process: its sampler, its handle of the world, and the loop's iterator over its loader.

    Attributes:
        learned: what its model has learned, by epoch and sample; it travels with the state.
    """

    sampler: ElasticBatchSampler
    ahead: int = 0
    world: AsWorld | None = None
    learned: Counter = field(default_factory=Counter)
    batches: object = None

    def state(self):
        return self.sampler.state_dict(), Counter(self.learned)

    def load(self, state):
        self.sampler.load_state_dict(state[0])
        self.learned = Counter(state[1])

    def enter(self, world):
        if self.world is None:
            self.world = world
            self.sampler.follow(world)
        else:
            vars(self.world).update(vars(world))
        self.batches = None

    def begin_step(self):
        """Return the epoch and the samples of this member's share; some are fetched in advance."""
        if self.batches is None:
            self.batches = self._fetching(iter(self.sampler))
        epoch, batch = self.sampler.epoch, next(self.batches, None)
        if batch is None:  # the epoch's last was the one before
            self.batches = self._fetching(iter(self.sampler))
            epoch, batch = self.sampler.epoch, next(self.batches)
        return epoch, batch

    def end_step(self, everyones):
        """The model has learned from all shares (their gradients were averaged), and the world advances."""
        self.learned.update((epoch, each) for epoch, batch in everyones for each in batch)
        self.world.step += 1

    def _fetching(self, batches):
        fetched = []
        for each in batches:
            fetched.append(each)
            if len(fetched) > self.ahead:
                yield fetched.pop(0)
        yield from fetched


class Stage:
    """A world of such members; `make` makes a sampler."""

    def __init__(self, make, sizes=2, ahead=0):
        self._make, self._ahead = make, ahead
        self._generation = 0
        self.members = []
        self.change(come=sizes)

    def change(self, lost=(), come=0):
        """The next generation: without the lost, with newcomers, all with the latest state."""
        rest = [each for each in self.members if each not in lost]
        self._generation += 1
        made = [each.world._state_step for each in rest]
        step = max(made, default=0)
        latest = next((each for each, steps in zip(rest, made, strict=True) if steps == step), None)
        behind = [each for each, steps in zip(rest, made, strict=True) if steps < step]
        new = [Member(self._make(), self._ahead) for _ in range(come)]
        self.members = [*rest, *new]
        worlds = [
            AsWorld(self._generation, rank, len(self.members), step) for rank in range(len(self.members))
        ]
        for each, world in zip(rest, worlds, strict=False):
            each.enter(world)
        for each in (*behind, *new):
            if latest is not None:
                each.load(latest.state())
        for each, world in zip(new, worlds[len(rest) :], strict=True):
            each.enter(world)

    def fail(self, lost=()):
        """The next generation begins without the lost, and breaks before a state has come; all are asked then."""
        self.members = [each for each in self.members if each not in lost]
        self._generation += 1
        made = [each.world._state_step for each in self.members]
        for rank, (each, steps) in enumerate(zip(self.members, made, strict=True)):
            behind = None if steps == max(made) else steps
            each.enter(AsWorld(self._generation, rank, len(self.members), max(made), behind))
            each.sampler.state_dict()

    def step(self, ended=None):
        """One step; `ended` are the ranks of those that end it before the world breaks, None for all."""
        shares = [each.begin_step() for each in self.members]
        for rank, each in enumerate(self.members):
            if ended is None or rank in ended:
                each.end_step(shares)
