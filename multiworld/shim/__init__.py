"""Shim: the parts of multiworld that attach it to a torch installation.

| name | what it does |
|---|---|
| `status` | tells what this torch can do, and how far faults of NCCL worlds are managed |
| `enable`, `disable` | turn the router and ``torch.distributed.WorldManager`` on and off |
| `attach` | what importing ``torch.distributed.multiworld`` does |

Importing this package loads no torch and changes nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiworld.shim.report import Status, status
    from multiworld.shim.switch import attach, disable, enable, enabled

__all__ = ["Status", "attach", "disable", "enable", "enabled", "status"]

_LAZY = {
    "Status": "multiworld.shim.report",
    "status": "multiworld.shim.report",
    **dict.fromkeys(("attach", "disable", "enable", "enabled"), "multiworld.shim.switch"),
}


def __getattr__(name: str) -> object:
    """Load a public name from the module that defines it (PEP 562)."""
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
