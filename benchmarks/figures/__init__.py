"""Measured values: what they are, their goals, records as JSON, tables on the terminal."""

from __future__ import annotations
