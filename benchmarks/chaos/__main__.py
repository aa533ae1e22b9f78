from __future__ import annotations

from benchmarks.chaos.part import PART
from benchmarks.cli import run_alone

if __name__ == "__main__":
    raise SystemExit(run_alone(PART))
