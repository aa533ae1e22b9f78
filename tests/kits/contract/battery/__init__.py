"""Features of torch, each run in two worlds of one process at once."""
