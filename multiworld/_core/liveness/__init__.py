"""Liveness of members: the protocol between watchdogs, and the failure detector."""
