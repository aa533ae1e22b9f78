from __future__ import annotations

from benchmarks.latency.part import PART
from benchmarks.measuring.part import main

if __name__ == "__main__":
    raise SystemExit(main(PART))
