"""The control socket: where it is, and its server."""
