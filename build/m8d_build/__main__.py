"""``python -m m8d_build COMMAND``: see ``m8d_build.cli``."""

from __future__ import annotations

import sys

try:
    from m8d_build.cli import main
except ModuleNotFoundError as exc:
    if exc.name is None or exc.name.split(".")[0] in {"m8d_build", "multiworld"}:
        raise
    # Raised, not printed: SystemExit with a text shows it and ends with 1.
    raise SystemExit(
        f"The toolchain needs the Python package {exc.name!r}, which is not installed here. "
        "`nox -s m8d -- COMMAND` installs what it needs by itself."
    ) from exc

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
