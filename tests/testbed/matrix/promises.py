"""What a patched build promises under CleanUpOnly, asked of one run. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matrix.catalogue import SILENT, by_id
from matrix.modes import CLEAN_UP
from matrix.outcome import ALIVE, BLOCKED, RETURNED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from matrix.outcome import Row, Seen
    from matrix.scenario import Scenario

__all__ = ["SOON_MS", "broken", "kept"]

SOON_MS = 2000
"""From the error to the unblocked caller."""

_AT_ONCE_MS = 1000
_BOUNDED_MS = 10_000
_UNHELD_MS = 2000
_ONE_OPERATION = ("healthy", "healthy again")


def broken(row: Row, scenario: Scenario, *, slack_ms: int = 0) -> list[str]:
    """Say which promises a run breaks; nothing: all were kept.

    Args:
        row: of a patched build, in a mode with CleanUpOnly.
        scenario: the row's.
        slack_ms: added to every bound in time: what a busy machine may take for itself.
    """
    if row.failure:
        return [f"it did not run: {row.failure}"]
    return [
        f"rank {seen.rank}: {what}"
        for seen in row.seen
        for what in (*_of_the_process(seen), *_of_the_rest(seen, scenario, row.mode, slack_ms))
    ]


def kept(rows: Iterable[Row]) -> dict[tuple[str, str], list[str]]:
    """Judge a patched build's column: for each cell under CleanUpOnly the promises that any of its runs broke."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.mode in CLEAN_UP:
            broke = found.setdefault((row.scenario, row.mode), [])
            broke += [what for what in broken(row, by_id(row.scenario)) if what not in broke]
    return found


def _of_the_process(seen: Seen) -> Iterable[str]:
    return () if seen.end == ALIVE else (f"the process ended: {seen.end}",)


def _of_the_rest(seen: Seen, scenario: Scenario, mode: str, slack_ms: int) -> Iterator[str]:
    if seen.end != ALIVE:
        return
    kind = scenario.id.partition(".")[0]
    if kind in {"enqueue", "group-end"}:
        yield from _of_the_call(seen)
    elif kind != "making":
        yield from _of_the_caller(seen, scenario, mode, slack_ms)
        yield from _of_the_work(seen, scenario)
    yield from _of_others(seen, slack_ms)
    yield from _of_what_follows(seen, slack_ms)


def _of_the_call(seen: Seen) -> Iterator[str]:
    caller, depth = seen.step("caller"), seen.step("depth")
    if caller is not None and not caller.raised:
        yield f"the failing call {caller.outcome}"
    if depth is not None and depth.result:
        yield "the thread's NCCL group is open"


def _of_the_caller(seen: Seen, scenario: Scenario, mode: str, slack_ms: int) -> Iterator[str]:
    caller = seen.step("caller")
    if caller is None:
        return
    if seen.unblocked_ms is None:
        if not _stuck(scenario):
            yield "the caller is blocked"
        return
    unheard = scenario.group == SILENT and scenario.id != "silent.ignored"
    heard_ms = 1000 * float(scenario.config["timeout"]) if unheard else 0
    if seen.unblocked_ms > heard_ms + SOON_MS + slack_ms and not _stuck(scenario):
        yield f"the caller was unblocked only after {seen.unblocked_ms} ms"
    if mode == "aeh2-wait" and scenario.config.get("caller") == "wait" and not caller.raised:
        yield "wait() returned, with blocking wait on"


def _of_the_work(seen: Seen, scenario: Scenario) -> Iterator[str]:
    remote = scenario.id.startswith(("lost.", "again.", "others.")) or scenario.id.endswith("ncclRemoteError")
    for name in ("again", "again synchronize", "later"):
        step = seen.step(name)
        if step is None:
            continue
        if step.outcome == RETURNED:
            yield f"'{name}' returns after the failure"
        elif step.outcome == BLOCKED:
            yield f"'{name}' is blocked"
        elif remote and not step.remote:
            yield f"'{name}' does not name ncclRemoteError: {step.text[:80]}"
    error = seen.step("exception")
    if error is not None and error.result == "NoneType":
        yield "exception() is None"


def _stuck(scenario: Scenario) -> bool:
    """Whether NCCL itself never lets go of what is pending: a stream then waits for as long, whatever torch does."""
    return scenario.config.get("knobs", {}).get("ABORT_HANG_PHASE") == "before"


def _of_others(seen: Seen, slack_ms: int) -> Iterator[str]:
    bound = _UNHELD_MS + slack_ms
    for name in ("healthy", "healthy again", "healthy meanwhile", "other thread"):
        step = seen.step(name)
        if step is None:
            continue
        if step.outcome != RETURNED or step.result != "right":
            yield f"{name}: {step.outcome if step.outcome != RETURNED else step.result}"
        elif name in _ONE_OPERATION and (step.took_ms or 0) > bound:
            yield f"{name}: held up {step.took_ms} ms"
    worst = seen.step("other thread's worst")
    if worst is not None and isinstance(worst.result, int) and worst.result > bound:
        yield f"another thread's operation on a healthy group was held up {worst.result} ms"


def _of_what_follows(seen: Seen, slack_ms: int) -> Iterator[str]:
    later = seen.step("at once")
    if later is not None and later.raised and (later.took_ms or 0) > _AT_ONCE_MS + slack_ms:
        yield f"an operation raised only after {later.took_ms} ms"
    destroy, rebuilt = seen.step("destroy"), seen.step("rebuilt")
    if destroy is not None and (
        destroy.outcome == BLOCKED or (destroy.took_ms or 0) > _BOUNDED_MS + slack_ms
    ):
        yield f"destroying the group: {destroy.outcome}, {destroy.took_ms} ms"
    if rebuilt is not None and rebuilt.result != "right":
        yield f"the new group: {rebuilt.result or rebuilt.outcome}"
