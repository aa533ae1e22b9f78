"""Chaos: a world of eight that loses and takes in members, and loses its store, all the time."""

from __future__ import annotations
