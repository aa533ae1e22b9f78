"""From the events and exits of a run to what its observers saw. Pure.

A program of the matrix sends ``begin`` and ``end`` for each step it takes, ``fault`` where it lets the fault happen
itself, and ``done``. A step that began and never ended was blocked, or cut short by the death of the process.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["ALIVE", "BLOCKED", "CUT", "RETURNED", "Row", "Seen", "Step", "observe"]

ALIVE = "alive"
RETURNED = "returned"
BLOCKED = "blocked"
CUT = "cut short"
_TEXT = 240


class _Event(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def at(self) -> float: ...
    @property
    def fields(self) -> Mapping[str, Any]: ...


class _Exit(Protocol):
    @property
    def code(self) -> int | None: ...
    @property
    def signal(self) -> str | None: ...
    @property
    def at(self) -> float: ...


@dataclass(frozen=True)
class Step:
    """One thing an observer did.

    Attributes:
        name: "caller" is the call that the fault meets.
        outcome: "returned", "blocked", "cut short" (by the end of the process), or the exception's type.
        ms: from the fault to its end; None where it has none. Negative: it ended before the fault.
        took_ms: from its beginning to its end.
        result: what it returned, in a word; None where that says nothing.
        text: beginning of the exception's message.
        remote: whether that message names ncclRemoteError.
    """

    name: str
    outcome: str
    ms: int | None = None
    took_ms: int | None = None
    result: Any = None
    text: str = ""
    remote: bool = False

    @property
    def raised(self) -> bool:
        """Whether it ended by an exception."""
        return self.outcome not in {RETURNED, BLOCKED, CUT}


@dataclass(frozen=True)
class Seen:
    """What became of one observer.

    Attributes:
        rank: its number.
        end: "alive", a signal's name, or "exit N".
        ended_ms: from the fault to its end, where it did not stay alive.
        steps: in order.
        notes: what the double said that a reader should know (a stub that was hit).
    """

    rank: int
    end: str
    ended_ms: int | None = None
    steps: tuple[Step, ...] = ()
    notes: tuple[str, ...] = ()

    def step(self, name: str) -> Step | None:
        """Return a step by name, None where it was not taken."""
        return next((step for step in self.steps if step.name == name), None)

    @property
    def unblocked_ms(self) -> int | None:
        """From the fault until the thread has come through its call and, if that returned, through the read.

        None where it never did. Waiting for an NCCL work only queues on a stream, so that the call may have been
        over before the fault; then the read is what was blocked.
        """
        caller, read = self.step("caller"), self.step("read")
        if caller is None or caller.ms is None:
            return None
        if caller.raised or read is None:
            return caller.ms
        return None if read.ms is None else max(caller.ms, read.ms)


@dataclass(frozen=True)
class Row:
    """One cell of the matrix, filled.

    Attributes:
        build: name.
        backend: name given to init_process_group.
        scenario: id.
        mode: id.
        repeat: 0 for the first run of this cell.
        seen: by each observer; empty where the run itself failed.
        failure: why there is no result, or why it does not count.
    """

    build: str
    backend: str
    scenario: str
    mode: str
    repeat: int = 0
    seen: tuple[Seen, ...] = ()
    failure: str = ""

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """What it is the result of."""
        return (self.build, self.backend, self.scenario, self.mode, self.repeat)

    @property
    def observer(self) -> Seen:
        """The first observer."""
        return self.seen[0]

    def as_json(self) -> dict[str, Any]:
        """Return it without what is empty."""
        found = asdict(self)
        found["seen"] = [
            {**_bare(seen), "steps": [_bare(step) for step in seen["steps"]]} for seen in found["seen"]
        ]
        return _bare(found)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        """Read what `as_json` wrote."""
        seen = tuple(
            Seen(
                rank=each["rank"],
                end=each["end"],
                ended_ms=each.get("ended_ms"),
                steps=tuple(Step(**step) for step in each.get("steps", ())),
                notes=tuple(each.get("notes", ())),
            )
            for each in data.get("seen", ())
        )
        plain = {name: value for name, value in data.items() if name != "seen"}
        return cls(**plain, seen=seen)


def _bare(data: Mapping[str, Any]) -> dict[str, Any]:
    kept = {"rank", "repeat"}  # 0 says something
    return {
        key: value
        for key, value in data.items()
        if key in kept or not (value is None or value is False or value in ("", (), []))
    }


def observe(
    rank: int,
    events: Iterable[_Event],
    exited: _Exit | None,
    *,
    fault_at: float,
    notes: Iterable[str] = (),
) -> Seen:
    """Tell what one rank saw.

    Args:
        rank: its number.
        events: its own, in order.
        exited: how it ended by itself; None if it was still there at the end of the observation.
        fault_at: when the fault happened, monotonic seconds.
        notes: passed on.
    """
    begun: dict[str, float] = {}
    steps: dict[str, Step] = {}
    done = False
    for event in events:
        if event.name == "begin":
            begun[event.fields["step"]] = event.at
        elif event.name == "end":
            name = event.fields["step"]
            steps[name] = _step(event, begun[name], fault_at)
        elif event.name == "done":
            done = True
    dead = exited is not None and not (done and exited.code == 0)
    left = CUT if dead else BLOCKED
    ordered = tuple(steps.get(name, Step(name, left)) for name in begun)
    if not dead:
        return Seen(rank, ALIVE, None, ordered, tuple(notes))
    end = exited.signal or f"exit {exited.code}"
    return Seen(rank, end, _ms(exited.at - fault_at), ordered, tuple(notes))


def _step(event: _Event, begun: float, fault_at: float) -> Step:
    fields = event.fields
    text = str(fields.get("text") or "")
    return Step(
        name=fields["step"],
        outcome=RETURNED if fields["ok"] else str(fields["type"]),
        ms=_ms(event.at - fault_at),
        took_ms=_ms(event.at - begun),
        result=fields.get("result"),
        text=" ".join(text.split())[:_TEXT],
        remote="ncclRemoteError" in text,
    )


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
