"""Defaults of ``m8d-run``'s options, from what a scheduler's environment says of a run's nodes."""
