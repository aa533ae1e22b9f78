"""NCCL: backends, works under way, coalescing, hooks."""
