"""Wheels through pip, and environments with a torch wheel in them, kept in the cache."""

from __future__ import annotations

__all__: list[str] = []
