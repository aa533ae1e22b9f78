"""Git repositories, through GitPython; nothing outside this package imports it."""

from __future__ import annotations

__all__: list[str] = []
