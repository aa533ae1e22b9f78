"""ELF: read through pyelftools, written by our own small editor. Nothing outside this folder imports elftools."""

from __future__ import annotations

__all__: list[str] = []
