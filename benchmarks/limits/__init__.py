"""Limits beside messages and sums: copying the same bytes, and MPI."""

from __future__ import annotations
