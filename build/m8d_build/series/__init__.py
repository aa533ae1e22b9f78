"""Patch series: read, verified, applied, exported, ported to another version."""

from __future__ import annotations

__all__: list[str] = []
