"""The full build: PyTorch compiled from its sources, in conda or a venv, into a portable wheel."""

from __future__ import annotations

__all__: list[str] = []
