"""The overlay build: touched units are compiled into a library that is grafted into the official wheel."""

from __future__ import annotations

__all__: list[str] = []
