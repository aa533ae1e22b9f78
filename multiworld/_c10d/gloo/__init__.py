"""gloo: a world's groups, their sockets, and waiting for their operations."""
