"""From a world's break to the first good operation of its next generation, with four members."""

from __future__ import annotations
