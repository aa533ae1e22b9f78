"""multiworld: fault domains for PyTorch.

Importing this package sets up nothing: no torch, no logging, no signals, no environment. Public names are
loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiworld.errors import MarkerError, MultiworldError

__version__ = "0.1.0.dev0"

__all__ = ["MarkerError", "MultiworldError", "__version__"]

_LAZY = {"MarkerError": "multiworld.errors", "MultiworldError": "multiworld.errors"}


def __getattr__(name: str) -> object:
    """Load a public name from the module that defines it (PEP 562)."""
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415  (nothing is imported before a name is asked for)

    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
