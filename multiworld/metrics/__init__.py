"""Numbers of this process's worlds for Prometheus, and answers to probes. See docs/metrics.md.

Importing this does not load prometheus_client; without it, numbers raise `MultiworldError`.
"""

from __future__ import annotations

from multiworld.metrics.collector import WorldsCollector
from multiworld.metrics.health import Health
from multiworld.metrics.recorder import recorder as _recorder
from multiworld.metrics.server import MetricsServer, serve_metrics
from multiworld.metrics.text import exposition

__all__ = ["Health", "MetricsServer", "WorldsCollector", "begin", "exposition", "serve_metrics"]


def begin() -> None:
    """Count joins, breakages and the other events from now on; harmless when repeated, and needs no extra."""
    _recorder.begin()
