"""The numbers of this process's worlds as a collector of prometheus_client, made when it is asked.

Names of worlds are the only label that a program chooses: those beyond `max_worlds` share ``world="_other"``.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from multiworld._core.operations.log import BEGAN
from multiworld._core.operations.totals import Sums
from multiworld._generation.process_totals import process_totals
from multiworld._generation.stuck import stuck_watch
from multiworld.errors import MultiworldError
from multiworld.events import Cause, State
from multiworld.metrics.recorder import BROKEN, STATE_BYTES, STUCK, recorder
from multiworld.registry import registry

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from prometheus_client import Metric

    from multiworld.metrics.recorder import Histogram, Key
    from multiworld.world import World

__all__ = ["MAX_WORLDS", "OTHER", "WorldsCollector", "client"]

MAX_WORLDS = 512
"""Names of worlds that are a label."""

OTHER = "_other"

CAUSES = tuple(cause.value for cause in Cause)
RESULTS = ("active", "advanced", "failed")
"""What comes of a join; "advanced": the next generation was entered at an `advance`, without one."""

_CHECK = "check"
"""Label of the collective by which members compare their calls, whose name in the log is a sentence."""


def client() -> Any:
    """Return the module prometheus_client.

    Raises:
        MultiworldError: it is not installed.
    """
    try:
        import prometheus_client  # noqa: PLC0415  (an extra, which only numbers need)
        import prometheus_client.core  # noqa: PLC0415  (the same extra)
        import prometheus_client.exposition  # noqa: PLC0415  (the same extra)
    except ImportError as error:
        raise MultiworldError(
            "prometheus_client is not installed",
            rule="Numbers for Prometheus are of the extra m8d[metrics]",
            next_step="pip install 'm8d[metrics]'",
        ) from error
    return prometheus_client


class WorldsCollector:
    """What Prometheus collects: ``prometheus_client.REGISTRY.register(WorldsCollector())``.

    Events count from the first collector on; see docs/metrics.md for the metrics.

    Args:
        max_worlds: names of worlds that are a label. Those that come when so many have one share ``_other``.

    Raises:
        MultiworldError: prometheus_client is not installed.
    """

    def __init__(self, max_worlds: int = MAX_WORLDS) -> None:
        self._core = client().core
        self._max_worlds = max_worlds
        self._labels: dict[str, str] = {}
        recorder.begin()

    def describe(self) -> Iterable[Metric]:
        """Return nothing: so registering it asks for no numbers."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics. Quick: some milliseconds for hundreds of worlds; asks no other member."""
        now = time.monotonic()
        worlds = cast("Mapping[str, World]", registry.worlds())  # joins register nothing else
        joining = registry.joining()
        records, forgotten = recorder.records(now)
        sums, before = process_totals.sums()
        labels = self._labelled({*worlds, *joining}, (*records, *sums, *worlds, *joining))
        yield self._core.InfoMetricFamily(
            "multiworld", "The version of multiworld.", {"version": import_module("multiworld").__version__}
        )
        yield from self._of_worlds(worlds, joining, labels, records, now)
        yield from self._of_events(labels, records, forgotten)
        yield from self._of_operations(labels, sums, before)
        yield self._counter(
            "break_reports", "Reports of breakages in the folder that M8D_REPORTS names.", "result",
            {"written": process_totals.reports, "failed": process_totals.reports_failed},
        )  # fmt: skip

    # -- inside ----------------------------------------------------------------------------------------------

    def _labelled(self, living: Collection[str], names: Iterable[str]) -> dict[str, str]:
        """Return the label of each name. It goes to ``_other`` and not back: counters must rise.

        Args:
            living: names of worlds that are not closed.
            names: these and all of which something is known, those that closed last at the end.
        """
        found = {name: self._labels.get(name, "") for name in dict.fromkeys(names)}
        free = self._max_worlds - sum(label not in {"", OTHER} for label in found.values())
        closed = (name for name, label in found.items() if label not in {"", OTHER} and name not in living)
        for name in sorted(
            (name for name, label in found.items() if not label), key=lambda name: name not in living
        ):
            if free <= 0 and name in living and (given_up := next(closed, None)) is not None:
                found[given_up] = OTHER
                free += 1
            found[name] = name if free > 0 and name != OTHER else OTHER
            free -= found[name] is not OTHER
        self._labels = found  # replaced as a whole: several threads may collect
        return found

    def _of_worlds(
        self,
        worlds: Mapping[str, World],
        joining: tuple[str, ...],
        labels: Mapping[str, str],
        records: Mapping[str, tuple[Counter[Key], float | None]],
        now: float,
    ) -> Iterator[Metric]:
        states = dict.fromkeys((State.JOINING, State.ACTIVE, State.BROKEN), 0)
        states[State.JOINING] = sum(name not in worlds for name in joining)
        active: dict[str, float] = {}
        ready: dict[str, float] = {}
        generation: dict[str, float] = {}
        members: dict[str, float] = {}
        busy: dict[str, float] = {}
        broken: dict[str, float] = {}
        pending: dict[str, float] = {}
        stuck: dict[str, float] = {}
        for name in joining:
            if name not in worlds:
                active[labels[name]] = ready[labels[name]] = 0.0
        for name, world in worlds.items():
            label, state, gen = labels[name], world.state, world._gen  # noqa: SLF001  (the handle's own package)
            breakage = None if state is State.ACTIVE else gen.breakage
            if state in states:
                states[state] += 1
            since = records[name][1] if name in records else None
            waiting = gen.operations.log.waiting(now) if state is State.ACTIVE else ()
            is_active, is_ready = float(state is State.ACTIVE), float(world.ready)
            seconds = 0.0 if since is None or state is State.ACTIVE else max(0.0, now - since)
            waits = now - waiting[0][BEGAN] if waiting else 0.0
            told = stuck_watch.first_told(gen, waiting)
            hangs = 0.0 if told is None else now - told[BEGAN]
            if label is OTHER:  # the worst of them, and of what can be added the sum
                is_active, is_ready = min(is_active, active.get(label, 1)), min(is_ready, ready.get(label, 1))
                seconds, waits = max(seconds, broken.get(label, 0)), max(waits, pending.get(label, 0))
                hangs = max(hangs, stuck.get(label, 0))
            else:
                generation[label] = gen.number
            active[label], broken[label], pending[label] = is_active, seconds, waits
            # A member that left in good order may be done: then nothing is amiss, for ever.
            if breakage is None or breakage.cause is not Cause.LEFT:
                ready[label] = is_ready
            stuck[label] = hangs
            members[label] = members.get(label, 0) + gen.size
            busy[label] = busy.get(label, 0) + len(world.busy)
        yield self._gauge(
            "worlds", "Worlds of this process, by state; closed ones do not count.", "state",
            {state.value: count for state, count in states.items()},
        )  # fmt: skip
        yield self._gauge("world_active", "Whether the world is active.", "world", active)
        yield self._gauge(
            "world_ready",
            "Whether it is active and this member has its latest state; none after one left in good order.",
            "world",
            ready,
        )
        yield self._gauge("world_generation", "Number of its generation.", "world", generation)
        yield self._gauge("world_members", "Members of its generation, lost ones too.", "world", members)
        yield self._gauge("world_busy_members", "Members that run and give no sign of life.", "world", busy)
        yield self._gauge(
            "world_broken_seconds",
            "Seconds since it broke; 0 while it is not broken, or after a member left in good order.",
            "world",
            broken,
        )
        yield self._gauge(
            "world_pending_seconds",
            "Seconds since this member called the oldest of its operations that are not over; 0: none.",
            "world",
            pending,
        )
        yield self._gauge(
            "world_stuck_seconds",
            "Seconds since this member called the oldest of its operations that are stuck; 0: none.",
            "world",
            stuck,
        )

    def _of_events(
        self,
        labels: Mapping[str, str],
        records: Mapping[str, tuple[Counter[Key], float | None]],
        forgotten: Counter[Key],
    ) -> Iterator[Metric]:
        counts: dict[str, Counter[Key]] = {OTHER: forgotten} if forgotten else {}
        for name, (record, _) in records.items():
            label = labels[name]
            counts[label] = counts[label] + record if label in counts else record
        yield self._counters(
            "joins", "Joins by what came of them.", "result",
            _by_label(counts, "joins", RESULTS),
        )  # fmt: skip
        yield self._histogram(
            "join_duration_seconds",
            "Seconds from a try to join to the active world.",
            recorder.joins,
        )
        yield self._counters(
            "breakages", "Breakages by cause.", "cause",
            _by_label(counts, "breakages", CAUSES),
        )  # fmt: skip
        yield self._counter(
            "broken_seconds", "Seconds for which the world was broken.", "world", _of(counts, BROKEN)
        )
        yield self._histogram(
            "recovery_duration_seconds", "Seconds from a breakage to the active world.", recorder.recoveries
        )
        yield self._counter(
            "stuck_operations", "Operations that waited for M8D_STUCK_AFTER seconds.", "world",
            _of(counts, STUCK),
        )  # fmt: skip
        yield self._counter(
            "state_received_bytes", "Bytes of state that this member got from others.", "world",
            _of(counts, STATE_BYTES),
        )  # fmt: skip
        yield self._histogram(
            "state_transfer_duration_seconds", "Seconds that a state took to come.", recorder.transfers
        )

    def _of_operations(
        self, labels: Mapping[str, str], sums: Mapping[str, Sums], before: Sums
    ) -> Iterator[Metric]:
        totals: dict[str, Sums] = {OTHER: before} if before != Sums() else {}
        for name, each in sums.items():
            label = labels[name]
            totals[label] = totals[label] + each if label in totals else each
        yield self._counters(
            "operations", "Messages and collectives of this member that went well.", "kind",
            (
                (world, _kind(kind), count)
                for world, each in totals.items()
                for kind, count in each.operations.items()
            ),
        )  # fmt: skip
        yield self._counters(
            "message_bytes", "Bytes of its messages.", "direction",
            (
                (world, direction, count)
                for world, each in totals.items()
                for direction, count in (("sent", each.sent), ("received", each.received))
            ),
        )  # fmt: skip
        yield self._counters(
            "collective_bytes", "Bytes of the tensors that this member gave to collectives.", "kind",
            (
                (world, _kind(kind), count)
                for world, each in totals.items()
                for kind, count in each.collective_bytes.items()
            ),
        )  # fmt: skip

    def _gauge(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        found = self._core.GaugeMetricFamily(f"multiworld_{name}", text)
        return self._filled(found, f"multiworld_{name}", label, values)

    def _counter(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        found = self._core.CounterMetricFamily(f"multiworld_{name}", text)
        return self._filled(found, f"multiworld_{name}_total", label, values)

    def _filled(self, found: Any, name: str, label: str, values: Mapping[str, float]) -> Metric:
        sample = self._core.Sample
        found.samples.extend(sample(name, {label: key}, value) for key, value in values.items())
        return cast("Metric", found)

    def _counters(self, name: str, text: str, label: str, rows: Iterable[tuple[str, str, float]]) -> Metric:
        found, sample = self._core.CounterMetricFamily(f"multiworld_{name}", text), self._core.Sample
        full = f"multiworld_{name}_total"
        found.samples.extend(sample(full, {"world": world, label: key}, value) for world, key, value in rows)
        return cast("Metric", found)

    def _histogram(self, name: str, text: str, seen: Histogram) -> Metric:
        found = self._core.HistogramMetricFamily(f"multiworld_{name}", text)
        found.add_metric([], buckets=seen.cumulative(), sum_value=seen.sum)
        return cast("Metric", found)


def _by_label(
    counts: Mapping[str, Counter[Key]], what: str, values: Iterable[str]
) -> Iterator[tuple[str, str, float]]:
    # Zeros, too: Prometheus sees no increase where a number appears.
    return ((world, value, each[what, value]) for world, each in counts.items() for value in values)


def _of(counts: Mapping[str, Counter[Key]], key: Key) -> dict[str, float]:
    return {world: each[key] for world, each in counts.items()}


def _kind(kind: str) -> str:
    return kind if " " not in kind else _CHECK
