"""ELF: read through pyelftools, written by an editor of our own. No other room imports elftools."""

from __future__ import annotations

__all__: list[str] = []
