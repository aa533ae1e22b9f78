"""What a scenario is: a program, a fault, and what is looked at. Data only; the catalogue has the scenarios."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from matrix.modes import ENDINGS

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["KILL", "NOTHING", "STOP", "Fault", "Scenario", "Verb"]

Verb = str
KILL: Verb = "kill"
STOP: Verb = "stop"
NOTHING: Verb = "nothing"


@dataclass(frozen=True)
class Fault:
    """What the runner does to a rank once every observer is ready.

    Attributes:
        verb: "kill" (SIGKILL), "stop" (SIGSTOP), or "nothing": the program lets it happen by a knob and says when.
        rank: whom it is done to.
    """

    verb: Verb = NOTHING
    rank: int = -1


@dataclass(frozen=True)
class Scenario:
    """One thing that goes wrong.

    Attributes:
        id: "group.rest", unique.
        group: heading of its table on the page.
        title: one line.
        program: "file:function" of tests/testbed/programs.
        shows: the defects it would show on a build that has them.
        world_size: ranks.
        config: what the program is told.
        env: variables beside the mode's; they win.
        fault: what is done, and to whom.
        observers: the ranks whose fate is the result.
        deadline: seconds from the fault to the end of the observation; who is blocked then counts as blocked.
        modes: ids of the modes it is run in.
        everywhere: whether the modes that are not CleanUpOnly are of interest on every build. Elsewhere only
            torch's default and CleanUpOnly are, beside the pair stock and patched, which is compared in all.
    """

    id: str
    group: str
    title: str
    program: str
    shows: tuple[str, ...] = ()
    world_size: int = 2
    config: Mapping[str, object] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    fault: Fault = field(default_factory=Fault)
    observers: tuple[int, ...] = (0,)
    deadline: float = 8.0
    modes: tuple[str, ...] = ENDINGS
    everywhere: bool = False
