"""Costs of multiworld, measured: `python -m benchmarks --help`; one part: `python -m benchmarks.latency`."""
