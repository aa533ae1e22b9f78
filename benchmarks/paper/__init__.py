"""The tables of the MultiWorld paper (arXiv 2407.08980), measured on gloo and the lane, and on NCCL."""

from __future__ import annotations
