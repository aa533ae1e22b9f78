"""Elastic: time from the kill of a member to the first good operation of the world without it."""

from __future__ import annotations
