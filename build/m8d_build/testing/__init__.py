"""This repository's tests, run on other builds of torch: the version matrix and the NCCL test bed."""

from __future__ import annotations

__all__: list[str] = []
