"""Spans made of the events of worlds, each when it is over.

A span is made at its end, with the time of its begin: what it is about (the generation, its members) is only
known then, and nothing stays open in a process that is killed.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from multiworld._generation.break_report import generation_id
from multiworld.errors import MultiworldError
from multiworld.events import (
    Cause,
    WorldActive,
    WorldBroken,
    WorldClosed,
    WorldJoinFailed,
    WorldJoining,
    WorldReady,
    WorldStateReceived,
    subscribe,
)
from multiworld.registry import registry
from multiworld.tracing.identity import generation_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from opentelemetry.trace import TracerProvider

    from multiworld.events import Breakage, Event

__all__ = ["Spans", "trace_worlds"]

Attributes = dict[str, str | int | float | list[int]]


def trace_worlds(tracer_provider: TracerProvider | None = None) -> Callable[[], None]:
    """Make a span of each join, each transfer of state to this member, and each recovery of a world.

    The spans of one generation have a link to the same span context in all members, and what its members have
    in common as the attribute ``multiworld.generation.id``.

    Args:
        tracer_provider: of OpenTelemetry; None: the global one.

    Returns:
        A function that ends it; idempotent.

    Raises:
        MultiworldError: opentelemetry-api is not installed.
    """
    try:
        from opentelemetry import trace  # noqa: PLC0415  (an extra, which only tracing needs)
    except ImportError as error:
        raise MultiworldError(
            "opentelemetry is not installed",
            rule="Spans are of the extra m8d[otel]",
            next_step="pip install 'm8d[otel]'",
        ) from error
    tracer = trace.get_tracer("multiworld", import_module("multiworld").__version__, tracer_provider)
    spans = Spans(trace, tracer)
    return subscribe(spans.apply)


@dataclass
class _World:
    """What is under way in one world.

    Attributes:
        joining: when the join began, ``time.monotonic()`` seconds.
        broke: the last breakage while it is not repaired, with the generation's number and id.
        received: bytes of state that have come in this generation.
    """

    joining: float | None = None
    broke: tuple[Breakage, int, str] | None = None
    received: int = 0


_KEPT = (WorldJoining, WorldActive, WorldBroken)
"""Events after which something of their world is under way."""


@dataclass(frozen=True)
class _Span:
    """A span that is over.

    Attributes:
        begin, end: ``time.monotonic()`` seconds.
        generations: whose members have a part in it: world, number and id.
        error: why it failed.
    """

    name: str
    begin: float
    end: float
    attributes: Attributes
    generations: tuple[tuple[str, int, str], ...]
    error: Exception | None = None


class Spans:
    """See the module.

    Args:
        trace: the module ``opentelemetry.trace``.
        tracer: that makes the spans.
    """

    def __init__(self, trace: Any, tracer: Any) -> None:
        self._trace = trace
        self._tracer = tracer
        self._pid = os.getpid()
        self._clear()

    def _clear(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may close a world in the middle
        self._worlds: dict[str, _World] = {}

    def apply(self, event: Event) -> None:
        """Take an event in; any thread."""
        if os.getpid() != self._pid:  # a forked child: the worlds were the parent's
            self._pid = os.getpid()
            self._clear()
        with self._lock:
            over = tuple(self._take(event))
        for each in over:  # without the lock: an exporter may block
            self._make(each)

    def _take(self, event: Event) -> Iterator[_Span]:
        world = self._worlds.get(event.world) or _World()
        if isinstance(event, _KEPT):  # others come after the close, too
            self._worlds[event.world] = world
        if isinstance(event, WorldJoining):
            world.joining = event.at
        elif isinstance(event, WorldActive):
            yield from self._active(event, world)
        elif isinstance(event, WorldJoinFailed):
            if world.joining is not None:
                yield _Span("multiworld.join", world.joining, event.at, _about(event, ""), (), event.error)
            world.joining = None
            if event.world not in registry.worlds():
                self._worlds.pop(event.world, None)
        elif isinstance(event, WorldBroken):
            world.broke = event.breakage, event.generation, _shared(event)
        elif isinstance(event, WorldStateReceived):
            world.received = event.received
        elif isinstance(event, WorldReady) and event.provider >= 0:
            shared = _shared(event)
            found = _about(event, shared)
            found |= {"multiworld.provider": event.provider, "multiworld.state.bytes": world.received}
            generations = ((event.world, event.generation, shared),)
            yield _Span("multiworld.state_transfer", event.at - event.seconds, event.at, found, generations)
        elif isinstance(event, WorldClosed):
            # One that a member closed in good order, as at the end of a program, needs no recovery.
            if world.broke is not None and world.broke[0].cause is not Cause.LEFT:
                error = MultiworldError(f"world {event.world!r} was closed before it was active again")
                yield _recovery(event, world.broke, _about(event, world.broke[2]), (), error)
            world.broke, world.received = None, 0
            if world.joining is None:  # else a join of it that is under way is told to have failed
                self._worlds.pop(event.world, None)

    def _active(self, event: WorldActive, world: _World) -> Iterator[_Span]:
        shared = _shared(event)
        found = _about(event, shared) | {"multiworld.world_size": event.world_size}
        generations = ((event.world, event.generation, shared),)
        if world.joining is not None:
            yield _Span("multiworld.join", world.joining, event.at, found, generations)
        if world.broke is not None:
            yield _recovery(event, world.broke, found, generations)
        world.joining, world.broke, world.received = None, None, 0

    def _make(self, over: _Span) -> None:
        # The host's clock may have been set since the last span. With the same offset for both ends, the
        # duration is right.
        ahead = time.time() - time.monotonic()
        begin, end = int((over.begin + ahead) * 1e9), int((over.end + ahead) * 1e9)
        span = self._tracer.start_span(
            over.name,
            attributes=over.attributes,
            links=[self._link(*each) for each in over.generations if each[2]],
            start_time=begin,
        )
        if over.error is not None:
            span.record_exception(over.error, timestamp=end)
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, str(over.error)))
        span.end(end)

    def _link(self, world: str, generation: int, shared: str) -> Any:
        trace_id, span_id = generation_ids(world, generation, shared)
        sampled = self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED)
        context = self._trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=sampled)
        return self._trace.Link(context, {"multiworld.generation": generation})


def _recovery(
    event: Event,
    broke: tuple[Breakage, int, str],
    found: Attributes,
    generations: tuple[tuple[str, int, str], ...],
    error: Exception | None = None,
) -> _Span:
    breakage, number, shared = broke
    found = found | {
        "multiworld.broken_generation": number,
        "multiworld.cause": breakage.cause.value,
        "multiworld.ranks": list(breakage.ranks),
        "multiworld.detail": breakage.detail,
    }
    both = ((event.world, number, shared), *generations)
    return _Span("multiworld.recovery", breakage.at, event.at, found, both, error)


def _about(event: Event, shared: str) -> Attributes:
    found: Attributes = {
        "multiworld.world": event.world,
        "multiworld.generation": event.generation,
        "multiworld.rank": event.rank,
    }
    return found | {"multiworld.generation.id": shared} if shared else found


def _shared(event: Event) -> str:
    """Return what only the members of a generation have; "" where this process is not in it any more."""
    found = registry.worlds().get(event.world)
    roster = None if found is None else found._gen.roster  # noqa: SLF001  (the handle's own package)
    return generation_id(roster) if roster is not None and roster.generation == event.generation else ""
