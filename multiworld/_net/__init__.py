"""Sockets, stores and the helper process."""
