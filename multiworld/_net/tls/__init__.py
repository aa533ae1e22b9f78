"""Mutual TLS 1.3 on the connections of this package (secure mode, docs/security.md)."""
