"""Wheels: opened and validated, their entries replaced, RECORD and METADATA rewritten, and what they say of themselves."""

from __future__ import annotations

__all__: list[str] = []
