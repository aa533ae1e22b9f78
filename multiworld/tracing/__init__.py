"""Spans of OpenTelemetry for joins, transfers of state and recoveries. See docs/metrics.md.

Importing this does not load opentelemetry; without it `trace_worlds` raises `MultiworldError`.
"""

from __future__ import annotations

from multiworld.tracing.identity import generation_ids
from multiworld.tracing.spans import trace_worlds

__all__ = ["generation_ids", "trace_worlds"]
