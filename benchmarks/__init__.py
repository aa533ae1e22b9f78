"""Costs of multiworld, measured: `python -m benchmarks --help`; one part: `python -m benchmarks.messages`."""

from __future__ import annotations

import sys
from pathlib import Path

# The toolchain is a plain folder, not installed: what is measured with it is found there.
sys.path.append(str(Path(__file__).resolve().parents[1] / "build"))
