"""Collectives among two and four members, beside plain torch.distributed."""

from __future__ import annotations
