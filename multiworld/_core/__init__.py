"""Decisions without I/O: no torch, no threads, no sockets, no clock."""
