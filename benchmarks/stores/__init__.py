"""Stores: what joins notice of the loss of their store."""

from __future__ import annotations
