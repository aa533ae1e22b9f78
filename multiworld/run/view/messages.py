"""One-line messages of a run's events, for the log, the live view and ``status``. Pure."""

from __future__ import annotations

import logging
import re
import signal
from typing import TYPE_CHECKING

from multiworld.run.events import (
    CallsRaised,
    NodeJoined,
    NodeLost,
    Note,
    RunEnded,
    RunStarted,
    SlotTaken,
    StateProgress,
    WorkerEnded,
    WorkerFailed,
    WorkerRestarting,
    WorkerRetiring,
    WorkerStarted,
    WorkerStopped,
    WorldChanged,
)

if TYPE_CHECKING:
    from multiworld.run.events import RunEvent

__all__ = ["count", "describe", "ending", "level_of", "natural", "one_line", "span"]

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def describe(event: RunEvent) -> str:
    """Return the message of an event, without the worker that it is about."""
    match event:
        case RunStarted(run_id=run_id, node=node, entrypoint=entrypoint):
            return f"run {run_id} starts on {node}: {entrypoint}"
        case SlotTaken(slot=None):
            return "this node is a spare: it starts workers when a seat is free"
        case SlotTaken(slot=slot, nodes=nodes):
            return f"this node has seat {slot} of {nodes}"
        case WorkerStarted(pid=pid, attempt=attempt):
            return f"started again, pid {pid}" if attempt else f"started, pid {pid}"
        case WorkerFailed(message=message, exitcode=exitcode):
            return f"failed: {message or ending(exitcode)}"
        case WorkerRestarting(delay=delay, left=left):
            when = f"in {delay:g} s" if delay > 0 else "at once"
            return f"is started again {when}, {count(left, 'restart')} left"
        case WorkerRetiring(drain=drain):
            return f"retires, within {drain:g} s"
        case StateProgress(world=world, received=received, total=total):
            return f"{world}: {received} of {total} bytes of its state"
        case CallsRaised(world=world, generation=generation):
            return f"{world}, generation {generation}: its blocked calls have raised"
        case WorkerEnded():
            return "ended"
        case WorkerStopped(exitcode=exitcode):
            return f"was stopped: {ending(exitcode)}"
        case WorldChanged(
            world=world, state=state, generation=generation, detail=detail, size=size, sizes=sizes
        ):
            said = f"{world} {state}" + (f", generation {generation}" if generation else "")
            said += f", {count(size, 'member')}" if sizes else ""
            return f"{said}: {detail}" if detail else said
        case NodeJoined(node=node, slot=None):
            return f"node {node} stands by as a spare"
        case NodeJoined(node=node, slot=slot):
            return f"node {node} has seat {slot}"
        case NodeLost(node=node, slot=slot, cause=cause, worlds=worlds):
            place = "a spare" if slot is None else f"seat {slot}"
            broken = f"; not whole without it: {', '.join(worlds)}" if worlds else ""
            return f"node {node} ({place}) is lost: {cause}{broken}"
        case Note(text=text):
            return text
        case RunEnded(exitcode=exitcode, reason=reason):
            return f"run ends with exit code {exitcode}" + (f": {reason}" if reason else "")
    return type(event).__name__


def level_of(event: RunEvent) -> int:
    """Return the level of an event, one of logging's numbers."""
    match event:
        case Note(level=level):
            return level
        case RunEnded(exitcode=exitcode) if exitcode:
            return logging.ERROR
        case WorldChanged(cause="left"):
            return logging.INFO  # a member that is done closed it: no action is needed
        case WorkerFailed() | NodeLost() | WorldChanged(state="broken" | "failed"):
            return logging.WARNING
    return logging.INFO


def ending(exitcode: int | None) -> str:
    """Return how a process ended; a negative exit code is the signal that ended it."""
    if exitcode is None:
        return "exit code not known"
    if exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        return f"killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"killed by signal {-exitcode}"


def span(seconds: float) -> str:
    """Return a duration as text, coarser the longer it is, so that a view of it seldom changes."""
    whole = max(0, int(seconds))
    if whole < 10:
        return f"{whole} s"
    if whole < _MINUTE:
        return f"{whole // 5 * 5} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE:02} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR} h"


def count(number: int, noun: str) -> str:
    """Return "1 world", "2 worlds"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def one_line(text: str) -> str:
    """Return `text` on one line, without control characters: it may come from a worker."""
    return "".join(each if each.isprintable() else " " for each in text).strip()


def natural(name: str) -> list[tuple[str, int]]:
    """Return a sort key that puts "w2" before "w10"."""
    parts = re.split(r"([0-9]+)", name)
    return [(parts[at], int(parts[at + 1]) if at + 1 < len(parts) else -1) for at in range(0, len(parts), 2)]
