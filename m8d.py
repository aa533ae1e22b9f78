"""The commands of the distribution ``m8d``, behind a look at whose package ``multiworld`` is installed.

A module of its own, because the look comes before ``import multiworld``: Cisco's distribution ``multiworld``
has the same import name, and patches torch and ends the process when it is imported (docs/install.md).
"""

from __future__ import annotations

import importlib.util
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main", "post_setup", "run"]

_FOREIGN = 9
"""Exit code where ``import multiworld`` would not give this distribution's package."""

_AGAIN = "Run python -m pip install --force-reinstall --no-deps m8d; docs/install.md says more"


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``m8d``, which is ``python -m multiworld``."""
    return _command("m8d", "multiworld.cli.main", argv)


def run(argv: Sequence[str] | None = None) -> int:
    """Run ``m8d-run``."""
    return _command("m8d-run", "multiworld.run.main", argv)


def post_setup(argv: Sequence[str] | None = None) -> int:
    """Run ``m8d-post-setup``."""
    return _command("m8d-post-setup", "multiworld.cli.post_setup", argv)


def _command(name: str, module: str, argv: Sequence[str] | None) -> int:
    wrong = _what_is_wrong()
    if wrong:
        sys.stderr.write(f"{name}: {wrong}.\n")
        return _FOREIGN
    code: int = import_module(module).main(argv)
    return code


def _what_is_wrong() -> str:
    spec = importlib.util.find_spec("multiworld")  # a top-level name: found, not run
    places = list(spec.submodule_search_locations or ()) if spec else []
    if spec is None or not places:
        return f"the package multiworld is not installed, the distribution m8d brings it. {_AGAIN}"
    look = Path(places[0]) / "shim" / "clash.py"
    if not look.is_file():
        return f"the package multiworld in {places[0]} is not that of the distribution m8d. {_AGAIN}"
    if spec.origin is None:
        return (
            f"{places[0]} has no __init__.py: another distribution's files were removed from it, and this package's"
            f" with them. {_AGAIN}"
        )
    found = importlib.util.spec_from_file_location("m8d_clash", look)
    if found is None or found.loader is None:
        return f"{look} cannot be read. {_AGAIN}"
    clashes = importlib.util.module_from_spec(found)
    sys.modules[found.name] = clashes  # dataclasses look their module up
    found.loader.exec_module(clashes)
    clash = clashes.find(Path(places[0]))
    return f"{clash.says}. {clash.next_step}" if clash is not None and clash.in_front else ""


if __name__ == "__main__":
    sys.exit(main())
