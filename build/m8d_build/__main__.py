"""``python -m m8d_build COMMAND``: see ``m8d_build.cli``."""

from __future__ import annotations

import sys

from m8d_build.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
