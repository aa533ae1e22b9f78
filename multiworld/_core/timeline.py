"""Faults of worlds and their healing, step by step, from what members reported.

A fault begins with the first report that a generation broke, and is healed when a later generation is
active. A world that a member closed in good order had no fault.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

__all__ = ["LAST", "Fault", "FaultTimeline", "Step"]

LAST = 50
"""Faults that a timeline keeps."""

_MOST_STEPS = 200
_MOST_WORLDS = 4096
_LEFT = "left"


@dataclass(frozen=True)
class Step:
    """One step of a fault.

    Attributes:
        what: "seen" (the first report of it), "told" (another member's), "unblocked" (the calls of a member
            that were blocked have raised), "joining", "active".
        at: seconds.
        who: who reported it.
    """

    what: str
    at: float
    who: str


@dataclass
class Fault:
    """One fault of one world.

    Attributes:
        number: counts the faults of a timeline, from 1 on.
        world, generation: that broke.
        cause, ranks, detail: as reported first; ranks of the world.
        steps: in the order of the reports.
        healed: seconds when a later generation was active; None before.
        over: whether the world was closed since: a world of that name begins anew.
    """

    number: int
    world: str
    generation: int
    cause: str
    ranks: tuple[int, ...]
    detail: str
    steps: list[Step] = field(default_factory=list)
    healed: float | None = None
    over: bool = False

    @property
    def at(self) -> float:
        """When it was seen."""
        return self.steps[0].at

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it; each step with the milliseconds since the fault was seen."""
        return {
            "id": f"{self.world}/{self.generation}/{self.number}",
            "world": self.world,
            "generation": self.generation,
            "cause": self.cause,
            "ranks": list(self.ranks),
            "detail": self.detail,
            "at": self.at,
            "steps": [
                {"what": each.what, "at": each.at, "ms": _ms(each.at - self.at), "text": each.who}
                for each in self.steps
            ],
            "healed": self.healed is not None,
            "over": self.over,
            "ms": None if self.healed is None else _ms(self.healed - self.at),
        }


class FaultTimeline:
    """The last faults of several worlds. Not thread-safe."""

    def __init__(self) -> None:
        self._count = 0
        self._faults: deque[Fault] = deque(maxlen=LAST)
        # The newest generation with a fault, by world: more worlds may break at once than faults are kept.
        self._newest: dict[str, int] = {}

    def broke(
        self, at: float, world: str, generation: int, who: str, cause: str,
        ranks: tuple[int, ...] = (), detail: str = "",
    ) -> bool:  # fmt: skip
        """A member reported that a generation of a world broke; returns whether that is a new fault."""
        known = self._open(world, generation)
        if known is not None:
            if not any(each.what in {"seen", "told"} and each.who == who for each in known.steps):
                self._add(known, "told", at, who)
            return False
        if cause == _LEFT or generation <= self._newest.get(world, -1):
            return False
        self._newest.pop(world, None)  # the newest is the last
        self._newest[world] = generation
        if len(self._newest) > _MOST_WORLDS:
            del self._newest[next(iter(self._newest))]
        self._count += 1
        fault = Fault(self._count, world, generation, cause, ranks, detail)
        fault.steps.append(Step("seen", at, who))
        self._faults.append(fault)
        return True

    def closed(self, world: str) -> None:
        """All members have closed the world: its faults are over, and its generations may begin anew."""
        self._newest.pop(world, None)
        for each in self._faults:
            if each.world == world:
                each.over = True

    def unblocked(self, at: float, world: str, generation: int, who: str) -> None:
        """The calls of a member have raised that were blocked when this generation broke; told late."""
        for fault in reversed(self._faults):
            if (fault.world, fault.generation) == (world, generation):
                step = Step("unblocked", max(at, fault.at), who)
                if len(fault.steps) < _MOST_STEPS:
                    later = (place for place, each in enumerate(fault.steps) if each.at > step.at)
                    fault.steps.insert(next(later, len(fault.steps)), step)
                return

    def joining(self, at: float, world: str, who: str) -> None:
        """A member joins the world."""
        fault = self._open(world)
        if fault is not None:
            self._add(fault, "joining", at, who)

    def active(self, at: float, world: str, generation: int, who: str, *, whole: bool) -> None:
        """A member is active in a generation of the world.

        Args:
            at: seconds.
            world: its name.
            generation: in which it is active.
            who: the member.
            whole: whether all members are.
        """
        fault = self._open(world)
        if fault is None or generation <= fault.generation:
            return
        self._add(fault, "active", at, who)
        if whole:
            for each in self._faults:  # an older one of the world that broke again before it was whole
                if each.world == world and each.healed is None and not each.over:
                    each.healed = at

    def faults(self) -> list[dict[str, Any]]:
        """Return the faults as JSON has them, the newest first."""
        return [each.as_dict() for each in reversed(self._faults)]

    def _open(self, world: str, generation: int | None = None) -> Fault | None:
        """Return the world's last fault, if it is not healed; of a generation, if one is given."""
        for each in reversed(self._faults):
            if each.world == world and (generation is None or each.generation == generation):
                return each if each.healed is None and not each.over else None
        return None

    @staticmethod
    def _add(fault: Fault, what: str, at: float, who: str) -> None:
        if len(fault.steps) < _MOST_STEPS:  # a member that joins again and again must not fill the memory
            fault.steps.append(Step(what, at, who))


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
