"""What a world costs: to join, to have, to close; with 1 to 256 of them in one process."""

from __future__ import annotations
