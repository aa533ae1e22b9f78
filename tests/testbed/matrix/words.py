"""A result in words: what one cell of a table says. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from matrix.outcome import ALIVE, BLOCKED, RETURNED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from matrix.outcome import Row, Seen, Step

__all__ = ["Said", "seconds", "together", "words"]

_TIME = "{time}"


@dataclass(frozen=True)
class Said:
    """Words, with the time left out so that cells can be compared.

    Attributes:
        text: with ``{time}`` where a time belongs.
        times: milliseconds, one for each place.
    """

    text: str
    times: tuple[int, ...] = ()


def words(row: Row) -> Said:
    """Tell a row."""
    if row.failure:
        return Said(f"did not run: {row.failure[:80]}".replace("|", "/"))
    parts = [_seen(seen) for seen in row.seen]
    if len(parts) == 1:
        return parts[0]
    text = "<br>".join(f"rank {seen.rank}: {part.text}" for seen, part in zip(row.seen, parts, strict=True))
    return Said(text, tuple(time for part in parts for time in part.times))


def together(said: Sequence[Said]) -> str:
    """Give the words of cells that say the same, each time as a range over them; distinct words stand one by one."""
    found: dict[str, list[Said]] = {}
    for each in said:
        found.setdefault(each.text, []).append(each)
    return " *or* ".join(_filled(text, [each.times for each in same]) for text, same in found.items())


def seconds(values: Iterable[int]) -> str:
    """Give milliseconds as seconds, as a range where they differ."""
    low, high = (f"{max(0, bound) / 1000:.1f}" for bound in _bounds(values))
    return f"{low} s" if low == high else f"{low}-{high} s"


def _bounds(values: Iterable[int]) -> tuple[int, int]:
    found = sorted(values)
    return found[0], found[-1]


def _filled(text: str, times: Sequence[tuple[int, ...]]) -> str:
    for column in zip(*times, strict=True):
        text = text.replace(_TIME, seconds(column), 1)
    return text


def _seen(seen: Seen) -> Said:
    if seen.end != ALIVE:
        return Said(f"**{seen.end}** after {_TIME}", (seen.ended_ms or 0,))
    times: list[int] = []
    parts = [*_caller(seen, times), *_work(seen), *_group(seen), *_others(seen), *_making(seen, times)]
    return Said("; ".join(part for part in parts if part), tuple(times))


def _caller(seen: Seen, times: list[int]) -> list[str]:
    caller, read = seen.step("caller"), seen.step("read")
    if caller is None:
        return []
    if seen.unblocked_ms is None:
        return ["**blocked**"]
    times.append(seen.unblocked_ms)
    if caller.raised:
        return [f"{_TIME}: {_raises(caller)}"]
    if read is None:
        return [f"{_TIME}: returns"]
    return [f"{_TIME}: {_raises(read) if read.raised else 'unblocked'}"]


def _work(seen: Seen) -> list[str]:
    found = []
    read, again, error = seen.step("read"), seen.step("again"), seen.step("exception")
    if again is not None:
        if again.raised:
            found.append(f"`wait()` {_raises(again)}")
        elif again.outcome == BLOCKED:
            found.append("**`wait()` blocks**")
        else:
            stale = " over stale data" if read is not None and read.result == "stale" else ""
            found.append(f"**`wait()` returns{stale}**")
        other = seen.step("again synchronize")
        if again.raised and other is not None and other.outcome == RETURNED:
            found.append("**`synchronize()` returns**")
    if error is not None and error.outcome == "TypeError":
        found.append("`exception()` cannot be asked")  # torch 2.6: the binding has no conversion
    elif error is not None and error.result is not None:
        found.append("no `exception()`" if error.result == "NoneType" else f"`exception()` is {error.result}")
    return found


def _group(seen: Seen) -> list[str]:
    found = []
    depth, later = seen.step("depth"), seen.step("later")
    if depth is not None and depth.result:
        found.append("**NCCL group left open**")
    for step, title in ((seen.step("at once"), "operation at once"), (later, "later operation")):
        if step is None:
            continue
        if step.raised:
            found.append(f"{title} {_raises(step)}")
        elif step.outcome == BLOCKED:
            found.append(f"**{title} blocks**")
        else:
            found.append(f"{title} is taken")
    return found


def _others(seen: Seen) -> list[str]:
    found = []
    names = {
        "healthy": "healthy group",
        "healthy again": "",
        "healthy meanwhile": "healthy world",
        "other thread": "other thread's",
    }
    for name, title in names.items():
        step = seen.step(name)
        if step is None:
            continue
        said = step.outcome if step.outcome != "returned" else str(step.result)
        if said == "right" and not title:
            continue
        found.append(f"{title or name} {said if said == 'right' else f'**{said}**'}")
    worst = seen.step("other thread's worst")
    if worst is not None and isinstance(worst.result, int) and worst.result > 2000:
        found.append(f"**held up {worst.result / 1000:.0f} s**")
    return found


def _making(seen: Seen, times: list[int]) -> list[str]:
    found = []
    for name, title in (("destroy", "destroyed in"), ("rebuilt", "new group in")):
        step = seen.step(name)
        if step is None:
            continue
        if step.outcome == BLOCKED:
            found.append(f"**{name}: blocked**")
        elif step.raised:
            found.append(f"{name}: {_raises(step)}")
        else:
            times.append(step.took_ms or 0)
            wrong = f" **{step.result}**" if name == "rebuilt" and step.result != "right" else ""
            found.append(f"{title} {_TIME}{wrong}")
    return found


def _raises(step: Step) -> str:
    return f"raises {step.outcome}" + (" (ncclRemoteError)" if step.remote else "")
