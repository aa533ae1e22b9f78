"""D0 to D8 and N1 to N4 as predicates over rows: what must be seen for a build to show a defect. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from matrix.cells import LEGACY, NCCL2
from matrix.modes import MODES
from matrix.outcome import ALIVE, BLOCKED, RETURNED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from matrix.outcome import Row, Seen, Step

__all__ = ["DEFECTS", "Defect", "Finding", "Verdict", "verdict"]

_BOTH = (LEGACY, NCCL2)
_BEATS = ("aeh2-beat", "aeh2-beat-dump", "aeh2-beat-nodump")
_ABORTED = "SIGABRT"
_SLEPT_MS = 3500  # the scenario's dump sleep is 4000
_HUNG_MS = 6000  # an injected hang is 8000
_IGNORED_MS = 4000  # the operation's timeout is 6000, an error is heeded in less than 2000


@dataclass(frozen=True)
class Defect:
    """One thing that is wrong in torch.

    Attributes:
        id: "D1".
        text: one line, what happens.
        scenarios: beginnings of the scenario ids that can show it.
        modes: those in which it counts; empty: every mode with CleanUpOnly.
        implementations: where it was found, or could be.
        seen: says of one observer in one of those scenarios whether it is there; None: this run cannot tell.
    """

    id: str
    text: str
    scenarios: tuple[str, ...]
    seen: Callable[[Seen], bool | None]
    implementations: tuple[str, ...] = _BOTH
    modes: tuple[str, ...] = ()

    def applies(self, row: Row) -> bool:
        """Whether this row can tell."""
        fits = row.mode in self.modes if self.modes else MODES[row.mode].clean_up_only
        return fits and not row.failure and row.scenario.startswith(self.scenarios)


class Verdict(str, Enum):
    """What a column of the summary says."""

    SHOWS = "shows"
    ENDED = "ended"
    NOT_RUN = "not run"
    NOT_APPLICABLE = "n. a."

    __str__ = str.__str__


@dataclass(frozen=True)
class Finding:
    """A verdict and what it rests on.

    Attributes:
        verdict: the word.
        shown: rows that show the defect, as "scenario (mode)".
        told: how many rows could tell.
    """

    verdict: Verdict
    shown: tuple[str, ...] = ()
    told: int = 0


def _alive(seen: Seen) -> bool:
    return seen.end == ALIVE


def _unconvertible(seen: Seen) -> bool | None:
    return any("Unconvertible NCCL type" in step.text for step in seen.steps)


def _silent(seen: Seen) -> bool | None:
    """After the abort, with the result never there, wait() or synchronize() returns as if all were well."""
    read = seen.step("read")
    asked = [step for name in ("again", "again synchronize") if (step := seen.step(name))]
    if not _alive(seen) or not asked or (read is not None and read.result == "new"):
        return None
    return any(step.outcome == RETURNED for step in asked)


def _slept(seen: Seen) -> bool | None:
    ms = seen.unblocked_ms
    return None if ms is None and not _alive(seen) else ms is None or ms > _SLEPT_MS


def _killed(seen: Seen) -> bool | None:
    return seen.end == _ABORTED


def _killed_after(seen: Seen) -> bool | None:
    """By the monitor: the clean-up had succeeded, the caller had gone on."""
    return seen.end == _ABORTED and seen.unblocked_ms is not None


def _left_open(seen: Seen) -> bool | None:
    depth, healthy = seen.step("depth"), seen.step("healthy")
    if healthy is None:
        return None
    return bool(depth and depth.result) or healthy.result != "right"


def _other_killed(seen: Seen) -> bool | None:
    """Or left alone by its peer, which was: its operation then came to nothing."""
    meanwhile = seen.step("healthy meanwhile")
    if seen.rank == 0:
        return None
    return not _alive(seen) or meanwhile is None or meanwhile.result != "right"


def _held_up(seen: Seen) -> bool | None:
    """By somebody's ncclCommAbort: another group's operations, or what is asked of the works and the group itself."""
    if not _alive(seen) or seen.step("healthy") is None:
        return None
    asked = ("healthy", "healthy again", "again", "again synchronize", "at once", "later", "other thread")
    if any(_long(seen.step(name)) for name in asked):
        return True
    worst = seen.step("other thread's worst")
    return worst is not None and float(worst.result or 0) > _HUNG_MS


def _long(step: Step | None) -> bool:
    return step is not None and (step.outcome == BLOCKED or (step.took_ms or 0) > _HUNG_MS)


def _ignored(seen: Seen) -> bool | None:
    if not _alive(seen):
        return None
    return seen.unblocked_ms is None or seen.unblocked_ms > _IGNORED_MS


def _hung(seen: Seen) -> bool | None:
    if not _alive(seen):
        return None
    return seen.unblocked_ms is None or seen.unblocked_ms > _HUNG_MS or _long(seen.step("at once"))


def _plain(seen: Seen) -> bool | None:
    later = seen.step("later")
    return None if later is None or not later.raised else later.outcome != "DistBackendError"


DEFECTS: tuple[Defect, ...] = (
    Defect("D0", "ncclRemoteError cannot be converted", ("lost.",), _unconvertible, (LEGACY,)),
    Defect(
        "D1",
        "after the abort `wait()` returns, the tensor is stale",
        ("lost.", "silent.killed", "silent.stopped", "error."),
        _silent,
        (LEGACY,),
    ),
    Defect(
        "D2",
        "the abort waits for the flight recorder's dump",
        ("later.dump-sleep",),
        _slept,
        modes=("aeh2", "aeh2-dump"),
    ),
    Defect(
        "D3",
        "the heartbeat monitor ends the process after a successful clean-up",
        ("later.cleaned-up",),
        _killed_after,
        modes=_BEATS,
    ),
    Defect(
        "D4",
        "a slow abort, or the watchdog's own sleep, ends the process",
        ("later.slow-abort", "later.dump-sleep-heartbeat", "abort.hangs-"),
        _killed,
        modes=_BEATS,
    ),
    Defect(
        "D5", "a failing call in a coalesced operation ends the process", ("enqueue.", "group-end."), _killed
    ),
    Defect(
        "D6",
        "a failing call leaves the thread's NCCL group open",
        ("enqueue.", "group-end."),
        _left_open,
    ),
    Defect("D7", "the dump signal ends processes of other worlds", ("others.same-store",), _other_killed),
    Defect(
        "D8",
        "while ncclCommAbort hangs, who asks the group or its works waits",
        ("others.abort-hangs",),
        _held_up,
    ),
    Defect(
        "N1",
        "after the abort `synchronize()` and `get_future()` return, the tensor is stale",
        ("lost.", "silent.killed", "silent.stopped", "error."),
        _silent,
        (NCCL2,),
    ),
    Defect(
        "N2",
        "blocking wait ignores the error until the operation's timeout",
        ("silent.ignored",),
        _ignored,
        modes=("aeh2-wait",),
    ),
    Defect(
        "N3",
        "while ncclCommAbort hangs, the caller or the group's next operation is blocked",
        ("abort.hangs-after",),
        _hung,
    ),
    Defect(
        "N4",
        "later operations raise RuntimeError, not DistBackendError",
        ("lost.",),
        _plain,
        (NCCL2,),
    ),
)


def verdict(defect: Defect, rows: Iterable[Row], implementation: str) -> Finding:
    """Judge one defect on the rows of one column.

    Args:
        defect: which.
        rows: all of the column; those that cannot tell are passed over.
        implementation: of the column's backend.
    """
    if implementation not in defect.implementations:
        return Finding(Verdict.NOT_APPLICABLE)
    told: dict[tuple[str, str], bool] = {}
    for row in rows:
        if not defect.applies(row):
            continue
        answers = [answer for answer in map(defect.seen, row.seen) if answer is not None]
        if answers:
            key = (row.scenario, row.mode)
            told[key] = told.get(key, False) or any(answers)
    if not told:
        return Finding(Verdict.NOT_RUN)
    shown = tuple(f"{scenario} ({mode})" for (scenario, mode), there in told.items() if there)
    return Finding(Verdict.SHOWS if shown else Verdict.ENDED, shown, len(told))
