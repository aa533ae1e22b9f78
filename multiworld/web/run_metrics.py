"""A run's numbers for Prometheus, from the page's view of it: the launcher's, for its workers.

Each worker's own numbers (`multiworld.metrics`) are finer; these need nothing of the workers' programs.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from multiworld.metrics.collector import client
from multiworld.metrics.text import answer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import Metric

__all__ = ["MOST_WORLDS", "exposition_of_run", "families"]

MOST_WORLDS = 512
"""Worlds with samples of their own, in the order of their names; the others are only counted by state."""

_Row = tuple[list[str], float]
"""Values of the labels, and the sample's."""

_WORLD_STATES = ("joining", "active", "broken", "closed", "failed", "gone")
_WORKER_STATES = ("starting", "up", "failed", "restarting", "retiring", "ended", "stopped")
_CAUSES = ("crashed", "hung", "unreachable", "failed")


def exposition_of_run(view: dict[str, Any], accept: str) -> tuple[bytes, str]:
    """Return the body and the content type of ``/metrics``.

    Args:
        view: see docs/web.md.
        accept: the request's header: which format it takes.

    Raises:
        MultiworldError: prometheus_client is not installed.
    """
    return answer(families(view), accept)


def families(view: dict[str, Any]) -> Iterable[Metric]:
    """Yield the families of metrics of a run's view."""
    core = client().core

    def filled(kind: Any, name: str, text: str, labels: list[str], rows: Iterable[_Row]) -> Metric:
        found = kind(f"multiworld_run_{name}", text, labels=labels)
        for values, value in rows:
            found.add_metric(values, value)
        return cast("Metric", found)

    gauge, counter = partial(filled, core.GaugeMetricFamily), partial(filled, core.CounterMetricFamily)
    run, totals, now = view["run"], view["totals"], view["now"]
    workers = Counter(each["state"] for each in view["processes"])
    worlds = Counter(each["state"] for each in view["worlds"])
    shown = view["worlds"][:MOST_WORLDS]
    yield gauge(
        "info", "The run; the value is 1.", ["run_id", "node", "restart"],
        [([run["run_id"], run["node"], run["restart"]], 1.0)],
    )  # fmt: skip
    yield gauge(
        "workers", "Workers of this node, by state.", ["state"],
        [([state], workers[state]) for state in _WORKER_STATES],
    )  # fmt: skip
    yield gauge(
        "worlds", "Worlds of this node's workers, by state.", ["state"],
        [([state], worlds[state]) for state in _WORLD_STATES],
    )  # fmt: skip
    yield gauge(
        "world_active", "Whether the world is active; none where members closed it in good order.", ["world"],
        [([each["name"]], float(each["state"] == "active")) for each in shown if not each["left"]],
    )  # fmt: skip
    yield gauge(
        "world_generation",
        "Its generation.",
        ["world"],
        [([each["name"]], each["generation"]) for each in shown],
    )
    yield gauge(
        "world_pending_seconds", "For how long its oldest operation that is not idle waits; 0: none does.",
        ["world"], [([each["name"]], _oldest(each, now)) for each in shown],
    )  # fmt: skip
    yield counter("worker_failures", "Workers' processes that failed.", [], [([], totals["failures"])])
    yield counter("worker_restarts", "Workers that were started again.", [], [([], totals["restarts"])])
    yield counter("nodes_lost", "Other nodes that were lost.", [], [([], totals["nodes_lost"])])
    yield counter(
        "worlds_broken", "Generations that broke, by cause; not those that a member closed in good order.",
        ["cause"], [([cause], totals["broken"].get(cause, 0)) for cause in _CAUSES],
    )  # fmt: skip
    yield gauge("launcher_answers", "Whether the launcher answers.", [], [([], float(not view["note"]))])


def _oldest(world: dict[str, Any], now: float) -> float:
    return max((max(0.0, now - each["since"]) for each in world["pending"] if not each["idle"]), default=0.0)
