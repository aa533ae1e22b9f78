"""The full build: PyTorch compiled from its sources, in conda or a venv, and made a wheel that installs anywhere."""

from __future__ import annotations

__all__: list[str] = []
