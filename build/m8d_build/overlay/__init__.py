"""The overlay build: only the touched units are compiled, and a library made of them is grafted into the official wheel."""

from __future__ import annotations

__all__: list[str] = []
