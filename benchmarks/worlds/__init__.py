"""Cost of a world: join, keep, close; with 1 to 256 of them in one process."""

from __future__ import annotations
