"""The patch toolchain on the real PyTorch: `verify`, `apply`, `revert`, and overlay builds."""

from __future__ import annotations
