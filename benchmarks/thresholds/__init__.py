"""Collectives over the lane beside the same over gloo: where each is the faster one."""

from __future__ import annotations
