"""Figures: measured values, their goals, records as JSON, tables on the terminal."""

from __future__ import annotations
