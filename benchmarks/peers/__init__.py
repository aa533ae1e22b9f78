"""Comparison with pymultiworld 0.2.3, on the same torch 2.4.0: the same program on both."""

from __future__ import annotations
