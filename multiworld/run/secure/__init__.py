"""Secure runs: where the certificates of a run's processes come from, and their files."""
