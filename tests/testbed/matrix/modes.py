"""How a process asks torch to handle NCCL's errors: environments with names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CLEAN_UP", "ENDINGS", "MODES", "MONITOR", "OTHERS", "WAITING", "Mode"]

_AEH = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_WAIT = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
_BEAT = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "4"}
_DUMP = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
_NO_DUMP = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
_NO_MONITOR = {"TORCH_NCCL_ENABLE_MONITORING": "0"}


@dataclass(frozen=True)
class Mode:
    """One way to set torch's error handling.

    Attributes:
        id: short name, used in results and on the page.
        title: what it means, one line.
        env: the variables it sets; what it does not name is torch's default.
    """

    id: str
    title: str
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def clean_up_only(self) -> bool:
        """Whether the process asked for CleanUpOnly, the mode that the patches are about."""
        return self.env.get(_AEH) == "2"


def _aeh(value: int, *more: Mapping[str, str]) -> dict[str, str]:
    env = {_AEH: str(value)}
    for each in more:
        env.update(each)
    return env


_ALL = (
    Mode("unset", "nothing set: torch's default"),
    Mode("aeh0", "0: NoHandling", _aeh(0)),
    Mode("aeh1", "1: TearDown", _aeh(1)),
    Mode("aeh2", "2: CleanUpOnly", _aeh(2)),
    Mode("aeh3", "3: SkipCleanUp", _aeh(3)),
    Mode("unset-wait", "default, blocking wait", _WAIT),
    Mode("aeh2-wait", "CleanUpOnly, blocking wait", _aeh(2, _WAIT)),
    Mode("unset-dump", "default, dump on", _DUMP),
    Mode("aeh2-dump", "CleanUpOnly, dump on", _aeh(2, _DUMP)),
    Mode("aeh2-nodump", "CleanUpOnly, dump off", _aeh(2, _NO_DUMP)),
    Mode("unset-beat-dump", "default, heartbeat timeout 4 s, dump on", {**_BEAT, **_DUMP}),
    Mode("aeh2-beat", "CleanUpOnly, heartbeat timeout 4 s", _aeh(2, _BEAT)),
    Mode("aeh2-beat-dump", "CleanUpOnly, heartbeat timeout 4 s, dump on", _aeh(2, _BEAT, _DUMP)),
    Mode("aeh2-beat-nodump", "CleanUpOnly, heartbeat timeout 4 s, dump off", _aeh(2, _BEAT, _NO_DUMP)),
    Mode(
        "aeh2-beat-nomon",
        "CleanUpOnly, heartbeat timeout 4 s, monitoring off",
        _aeh(2, _BEAT, _NO_MONITOR),
    ),
)

MODES: dict[str, Mode] = {mode.id: mode for mode in _ALL}

CLEAN_UP = tuple(mode.id for mode in _ALL if mode.clean_up_only)
"""Where the patches act."""

OTHERS = tuple(mode.id for mode in _ALL if not mode.clean_up_only)
"""Where a patched build must end every scenario as the stock one does."""

ENDINGS = ("unset", "aeh0", "aeh1", "aeh2", "aeh3")
"""What a failure leads to: every scenario is run in these."""

WAITING = ("unset-wait", "aeh2-wait")
MONITOR = ("unset-beat-dump", "aeh2-beat", "aeh2-beat-dump", "aeh2-beat-nodump", "aeh2-beat-nomon")
