"""Overheads without communication: entering a world, asking for a rank, importing, events."""

from __future__ import annotations
