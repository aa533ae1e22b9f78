from __future__ import annotations

from benchmarks.measuring.part import main
from benchmarks.worlds.part import PART

if __name__ == "__main__":
    raise SystemExit(main(PART))
