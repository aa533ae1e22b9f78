"""A version's patch series: read, verified, applied to a source tree, exported from it, ported to another version."""

from __future__ import annotations

__all__: list[str] = []
