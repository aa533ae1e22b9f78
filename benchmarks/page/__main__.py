from __future__ import annotations

from benchmarks.page.write import main

if __name__ == "__main__":
    raise SystemExit(main())
