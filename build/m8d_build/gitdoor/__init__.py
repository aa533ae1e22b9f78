"""The one door to git. Nothing outside this package imports GitPython."""

from __future__ import annotations

__all__: list[str] = []
