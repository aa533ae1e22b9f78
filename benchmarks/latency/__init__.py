"""Latency and throughput of each operation, beside plain torch.distributed in the same processes."""

from __future__ import annotations
