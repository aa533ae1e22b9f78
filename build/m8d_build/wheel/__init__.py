"""Wheels: validated, their entries replaced, RECORD and METADATA rewritten, inspected."""

from __future__ import annotations

__all__: list[str] = []
