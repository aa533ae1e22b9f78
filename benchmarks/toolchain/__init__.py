"""The patch toolchain on the real PyTorch: `verify`, `apply`, `revert`, and (alone, or with --full) overlay builds."""

from __future__ import annotations
