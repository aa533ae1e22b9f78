"""Rebuild: time from a world's break to the first good operation of its next generation, four members."""

from __future__ import annotations
