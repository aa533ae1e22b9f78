"""What multiworld costs: `python -m benchmarks --help`, and the same for each part (`python -m benchmarks.latency`)."""
