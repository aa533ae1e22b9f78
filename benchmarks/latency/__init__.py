"""Latency and throughput: each operation in each form, beside plain torch.distributed in the same processes."""

from __future__ import annotations
