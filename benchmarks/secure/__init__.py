"""Secure mode: what mutual TLS adds to joins, control messages, the store's answers, and messages."""

from __future__ import annotations
