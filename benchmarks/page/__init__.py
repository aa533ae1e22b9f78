"""The page docs/benchmarks/index.md: its text, pictures, and notes by hand."""

from __future__ import annotations
