"""``python -m multiworld.run``: the same as ``m8d-run``."""

from __future__ import annotations

import sys

from multiworld.run.main import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
