"""Starts: workers of `m8d-run` as new programs, and forked with their modules (--preload)."""
