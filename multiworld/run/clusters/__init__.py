"""What a scheduler's environment says of a run's nodes: defaults of ``m8d-run``'s options."""
