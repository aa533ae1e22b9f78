"""Builds of versions that have no series: the nearest one is ported, built, and reported on."""

from __future__ import annotations

__all__: list[str] = []
