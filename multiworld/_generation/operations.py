"""Operations of a generation's members: this one's answer, and the question to the others."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from multiworld import settings
from multiworld._c10d.waiter_pool import ending
from multiworld._core.operations import lateness
from multiworld._core.operations.log import OperationLog
from multiworld._core.operations.report import from_json, to_json
from multiworld._core.operations.waiting import pending_operations
from multiworld._generation import break_report
from multiworld._generation.process_totals import process_totals
from multiworld._generation.stacks import stacks
from multiworld._net.foreign_stack import foreign_stack
from multiworld.errors import MultiworldError
from multiworld.events import Cause
from multiworld.logs.source import about, logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from multiworld._core.membership.roster import Roster
    from multiworld._core.operations.log import Entry
    from multiworld._core.operations.report import MemberReport
    from multiworld._generation.busy_members import BusyMembers
    from multiworld._net.liveness.attachment import Attachment
    from multiworld.events import Breakage
    from multiworld.pending import PendingOperation

__all__ = ["GenerationOperations"]

_ANSWERS = 1.0
"""Seconds that the members of a broken world have to say what they were doing."""

_SAME = 0.25
"""Seconds for which an answer with stacks is given again."""

_log = logger(__name__)
_ROOTED = frozenset({"broadcast", "reduce"})

_BUSY = "runs and does not answer: most likely it holds the GIL"


class GenerationOperations:
    """See the module.

    Args:
        roster: of the generation.
        attachment: the generation's place in the watchdog.
        busy: the members that run and do not answer.
        readable: by rank, the pids of members whose memory this process may read, as the kernel names them.
        flight: returns torch's record of this process's operations, empty: it has none.

    Attributes:
        log: of this member's operations.
        totals: of the log.
    """

    def __init__(
        self,
        roster: Roster,
        attachment: Attachment,
        busy: BusyMembers,
        readable: Mapping[int, int],
        flight: Callable[[], bytes],
    ) -> None:
        self.log = OperationLog(roster.rank, roster.size)
        self.totals = self.log.totals
        self._roster = roster
        self._attachment = attachment
        self._busy = busy
        self._readable = readable
        self._flight = flight
        self._told = -math.inf, b""
        attachment.describe_with(self._describe)
        process_totals.begin(roster.world, self.totals)

    def _describe(self, deep: bool) -> bytes:
        now = time.monotonic()
        if not deep:
            return to_json(self.log.report(now))
        # All that wait ask at about the same time, each of them.
        at, answer = self._told
        if now - at > _SAME:
            answer = to_json(self.log.report(now, stacks()))
            self._told = now, answer
        return answer

    def reports(self, timeout: float, *, deep: bool = False) -> dict[int, MemberReport | None]:
        """Ask all members what they are doing; None of one that does not answer in time.

        Args:
            timeout: seconds.
            deep: whether the stacks of the others' threads are wanted.
        """
        return self.begin_asking(deep=deep)(time.monotonic() + timeout)

    def begin_asking(self, *, deep: bool = False) -> Callable[[float], dict[int, MemberReport | None]]:
        """Ask as `reports` does; return what waits for the answers, to be called once with a deadline."""
        answers = self._attachment.begin_asking(deep=deep)

        def reports(deadline: float) -> dict[int, MemberReport | None]:
            told = answers(deadline)
            found: dict[int, MemberReport | None] = {
                rank: from_json(told[rank]) if rank in told else None for rank in range(self._roster.size)
            }
            found[self._roster.rank] = self.log.report(time.monotonic())
            return found

        return reports

    def pending(self, timeout: float) -> tuple[PendingOperation, ...]:
        """Return the operations of all members that are not over; see `pending_operations`."""
        return self.pending_among(self.reports(timeout))

    def pending_among(self, reports: Mapping[int, MemberReport | None]) -> tuple[PendingOperation, ...]:
        """The same from `reports`."""
        return pending_operations(reports, dict.fromkeys(self._busy.ranks, _BUSY))

    def waited_for(self, timeout: float) -> dict[int, float]:
        """Return the seconds that members have waited for each other; see `lateness.waited_for`."""
        return lateness.waited_for(self.reports(timeout))

    def stack_from_outside(self, rank: int) -> str:
        """Return the stacks of a member that does not answer; "" where they cannot be read from here."""
        pid = self._readable.get(rank)  # not the one that the member has told
        return "" if pid is None else foreign_stack(pid)

    def report_later(self, breakage: Breakage) -> None:
        """The generation broke: write a report of it, in another thread, where ``M8D_REPORTS`` is set.

        Not where a member left in good order: every program ends so.
        """
        folder = "" if breakage.cause is Cause.LEFT else _reports_folder()
        if folder:
            with contextlib.suppress(RuntimeError):  # the host has no thread left for this process
                ending.run(lambda: self._report(Path(folder), breakage))

    def _report(self, folder: Path, breakage: Breakage) -> None:
        try:
            reports = self.reports(_ANSWERS)
            path = break_report.write(folder, self._roster, breakage, reports, self.pending_among(reports))
            process_totals.reported(written=path is not None)
            if path is not None and (record := self._flight()):
                break_report.write_flight(path, self._roster, record)
        except Exception:  # noqa: BLE001  (logged: a thread of the pool must not raise)
            _log.exception(
                "no report of the breakage of world %r", self._roster.world, extra=about(self._roster.world)
            )

    def freeze(self) -> None:
        """The generation is over."""
        self.log.freeze(time.monotonic())
        process_totals.end(self._roster.world, self.totals)

    def begun(self, kind: str, args: tuple[object, ...]) -> Entry:
        """Log a collective of the world's own group, and return its entry: its end is the caller's to write.

        Args:
            kind: of those that are called directly on the backend (`multiworld.operation_table`).
            args: of the world's method; tensors, as that way takes no others.
        """
        group = self.log.world
        group.begun = number = next(group.count)
        given = None if kind == "barrier" else args[kind.startswith("all_gather")]
        # A sparse one has no nbytes.
        size = given.numel() * given.element_size() if isinstance(given, Tensor) else 0
        root = args[1] if kind in _ROOTED else None
        entry: Entry = [group, kind, number, size, root, None, time.monotonic(), None]
        self.log.append(entry)
        return entry


def _reports_folder() -> str:
    try:
        return settings.load().reports
    except MultiworldError:  # the join has said it
        return ""
