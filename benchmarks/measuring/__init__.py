"""What parts measure with: processes told what to do by JSON lines, clocks, stores, the order of rounds."""

from __future__ import annotations
