from __future__ import annotations

from benchmarks.cli import run_alone
from benchmarks.stores.part import PART

if __name__ == "__main__":
    raise SystemExit(run_alone(PART))
