"""Running ranks, as their test sees them: kill, stop, release; what they told, and how they ended."""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bed.forkserver import SHOW_STACKS
from bed.lines import Wire
from bed.refused import outlived, refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

__all__ = ["Event", "Exit", "Ranks"]

_TAIL = 40  # lines of a rank's output in a message
_STACKS = 0.5  # seconds for ranks to write their stacks
_KILLED = 10.0  # seconds until a killed rank is reported


@dataclass(frozen=True)
class Event:
    """Something a rank told: which rank, what, when (CLOCK_MONOTONIC, which all processes share), and details."""

    rank: int
    name: str
    at: float
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Exit:
    """How a rank ended: its code, or the signal's name, and when."""

    rank: int
    code: int | None
    signal: str | None
    at: float

    @classmethod
    def of(cls, rank: int, status: int, at: float) -> Exit:
        """Return the exit for a status as subprocess gives it: negative for a signal."""
        return (
            cls(rank, None, signal.Signals(-status).name, at) if status < 0 else cls(rank, status, None, at)
        )

    def __str__(self) -> str:
        return (
            f"rank {self.rank} ended by {self.signal}"
            if self.signal
            else f"rank {self.rank} ended with {self.code}"
        )


class Ranks:
    """The ranks of one start. A context manager: leaving it kills what is left and waits for it.

    It raises AssertionError where a rank hit a stub of the double or launched a kernel the double refused, and where
    NCCL would have used memory that it has freed, or may have.
    """

    def __init__(
        self,
        wires: list[Wire],
        report: Wire,
        outputs: list[Path],
        *,
        deadline: float,
        allow_refused: bool = False,
        allow_luck: bool = False,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._wires = wires
        self._report = report
        self._outputs = outputs
        self._deadline = deadline
        self._allow_refused = allow_refused
        self._allow_luck = allow_luck
        self._on_close = on_close
        self._pids: dict[int, int] = {}
        self._exits: dict[int, Exit] = {}
        self._events: list[Event] = []
        self._killed: set[int] = set()
        self._closed = False
        self.world_size = len(wires)

    def __enter__(self) -> Ranks:  # noqa: PYI034 -- typing.Self is not in Python 3.10
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.close()
        outputs = {rank: self.stderr(rank) for rank in self._all()}
        if used := outlived(outputs, luck=self._allow_luck):
            raise AssertionError("NCCL has freed this, or may have:\n" + "\n".join(used)) from error
        found = [] if self._allow_refused else refused(outputs)
        if found:
            raise AssertionError("the double does not know this:\n" + "\n".join(found)) from error

    def close(self) -> None:
        """Kill what is left, and wait until it is gone."""
        if self._closed:
            return
        self._closed = True
        try:
            self.kill(*self.alive())
            self._until(lambda: not self._left(), time.monotonic() + _KILLED)
            # Without its fork server nobody reports a rank's end; the kernel kills it then.
            left = [] if self._report.ended else self._left()
        finally:
            for wire in (*self._wires, self._report):
                wire.close()
            self._on_close()
        if left:
            raise AssertionError(f"ranks {left} are not reported gone {_KILLED:g} s after SIGKILL")

    def wait(
        self, name: str, *, ranks: Iterable[int] | None = None, timeout: float | None = None, count: int = 1
    ) -> list[Event]:
        """Wait until ranks have told something.

        Args:
            name: of the event.
            ranks: which; default: all that were not killed by `kill`.
            timeout: seconds; default: what is left of the start's.
            count: how many times each has told it; the last of them is returned.

        Returns:
            An event of each rank, in the order of ``ranks``.

        Raises:
            AssertionError: a rank ended without, or the time is over; with the ends of the ranks' output.
        """
        wanted = [rank for rank in self._all() if rank not in self._killed] if ranks is None else [*ranks]

        def missing() -> list[int]:
            return [rank for rank in wanted if len(self._told(rank, name)) < count]

        def over() -> bool:
            return not missing() or any(rank in self._exits and self._wires[rank].ended for rank in missing())

        self._until(over, self._when(timeout))
        if lack := missing():
            raise AssertionError(self._trouble(f"did not tell {name!r}", lack, timeout))
        return [self._told(rank, name)[count - 1] for rank in wanted]

    def tell(self, name: str, *, ranks: Iterable[int] | None = None, **fields: Any) -> None:
        """Let ``rank.hear(name)`` return these fields; default: in all that still run."""
        for rank in self.alive() if ranks is None else ranks:
            with suppress(OSError):  # it ended; whoever waits for it sees that
                self._wires[rank].send({"tell": name, "fields": fields})

    def kill(self, *ranks: int) -> float:
        """Send SIGKILL; return when (monotonic)."""
        self._killed |= {*ranks}
        return self._signal(signal.SIGKILL, ranks)

    def stop(self, *ranks: int) -> float:
        """Send SIGSTOP; return when."""
        return self._signal(signal.SIGSTOP, ranks)

    def resume(self, *ranks: int) -> float:
        """Send SIGCONT; return when."""
        return self._signal(signal.SIGCONT, ranks)

    def join(self, *, ranks: Iterable[int] | None = None, timeout: float | None = None) -> dict[int, Exit]:
        """Wait until ranks (default: all) have ended; return how.

        Raises:
            AssertionError: one has not when the time is over.
        """
        wanted = self._all() if ranks is None else [*ranks]

        def left() -> list[int]:
            return [rank for rank in wanted if rank not in self._exits or not self._wires[rank].ended]

        self._until(lambda: not left(), self._when(timeout))
        if lack := [rank for rank in wanted if rank not in self._exits]:
            raise AssertionError(self._trouble("did not end", lack, timeout))
        return {rank: self._exits[rank] for rank in wanted}

    @property
    def exits(self) -> dict[int, Exit]:
        """How the ranks ended that have."""
        self._pump(0.0)
        return dict(self._exits)

    def events(self, rank: int | None = None, name: str | None = None) -> list[Event]:
        """Return what was told so far, oldest first; of a rank, of a name."""
        self._pump(0.0)
        return self._told(rank, name)

    def stderr(self, rank: int) -> str:
        """Return what a rank wrote to stdout and stderr so far."""
        path = self._outputs[rank]
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    def alive(self) -> list[int]:
        """Return the ranks that have not ended."""
        return [rank for rank in self._all() if rank not in self.exits]

    def pid(self, rank: int) -> int:
        """Return a rank's process id."""
        return self._pids[rank]

    # --- how it is done

    def started(self, timeout: float) -> bool:
        """Wait for the fork server to name the processes; True if it did."""
        self._until(lambda: bool(self._pids), time.monotonic() + timeout)
        return bool(self._pids)

    def _all(self) -> list[int]:
        return [*range(self.world_size)]

    def _left(self) -> list[int]:
        return [rank for rank in self._pids if rank not in self._exits]

    def _when(self, timeout: float | None) -> float:
        return self._deadline if timeout is None else time.monotonic() + timeout

    def _told(self, rank: int | None, name: str | None) -> list[Event]:
        return [each for each in self._events if rank in (None, each.rank) and name in (None, each.name)]

    def _until(self, done: Callable[[], bool], deadline: float) -> None:
        """Take in messages until something is so. ``done`` only looks: what it took in would not wake the poll."""
        while not done():
            left = deadline - time.monotonic()
            if left <= 0 or (self._report.ended and all(wire.ended for wire in self._wires)):
                return
            self._pump(left)

    def _pump(self, timeout: float) -> None:
        """Take in what has come, waiting so long for the first."""
        poller = select.poll()
        by_fd = {wire.fileno(): (rank, wire) for rank, wire in enumerate(self._wires) if not wire.ended}
        if not self._report.ended:
            by_fd[self._report.fileno()] = (-1, self._report)
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        if not by_fd:
            return
        for fd, _ in poller.poll(max(0.0, timeout) * 1000):
            rank, wire = by_fd[fd]
            for message in wire.receive(0.0):
                self._take(rank, message)

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        if "event" in message:
            self._events.append(Event(rank, message["event"], message["at"], message["fields"]))
        elif "pids" in message:
            self._pids = {int(each): pid for each, pid in message["pids"].items()}
        elif "exit" in message:
            ended = Exit.of(message["exit"], message["code"], message["at"])
            self._exits[ended.rank] = ended

    def _signal(self, number: signal.Signals, ranks: Iterable[int]) -> float:
        now = time.monotonic()
        for rank in ranks:
            if rank in self._pids and rank not in self.exits:
                with suppress(ProcessLookupError):
                    os.kill(self._pids[rank], number)
        return now

    def _trouble(self, what: str, ranks: list[int], timeout: float | None) -> str:
        lines = []
        self._signal(SHOW_STACKS, ranks)
        self._until(lambda: False, time.monotonic() + _STACKS)
        for rank in ranks:
            told = self.events(rank)
            failed = [each.fields["trace"] for each in told if each.name == "failed"]
            if ended := self._exits.get(rank):
                state = str(ended)
            elif self._report.ended:
                state = f"rank {rank}: its fork server is gone"
            else:
                state = f"rank {rank} runs" if told else f"rank {rank} never started"
                state += (
                    f"; the time is over ({timeout:g} s)" if timeout is not None else "; the time is over"
                )
            names = ", ".join(each.name for each in told) or "nothing"
            tail = "\n".join(self.stderr(rank).splitlines()[-_TAIL:])
            lines += [f"{state}. It {what}; it told: {names}.", *failed, f"--- its output ends with:\n{tail}"]
        return "\n".join(lines)
