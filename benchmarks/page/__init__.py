"""docs/benchmarks/index.md: its text, its pictures, the notes by hand."""

from __future__ import annotations
