"""Tools of the parts: processes driven by JSON lines, clocks, stores, the order of rounds."""

from __future__ import annotations
