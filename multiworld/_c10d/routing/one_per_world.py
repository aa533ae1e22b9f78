"""Groups that torch's compiler makes once for a process: one for each generation of each world instead.

`torch._dynamo` and `torch._inductor` keep the group through which ranks compare what they compile in a
global of their module, and make it when they first ask for it.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import TYPE_CHECKING, Any

from multiworld._c10d.routing.selection import unasked

if TYPE_CHECKING:
    from multiworld._c10d.monkeypatch import Patches

__all__ = ["MODULES", "carry", "install"]

MODULES = {
    "torch._dynamo.distributed": {"get_compile_pg": "_COMPILE_PG", "get_guard_pg": "_GUARD_PG"},
    "torch._inductor.distributed_autotune": {"get_autotune_pg": "_AUTOTUNE_PG"},
}
"""By module: the function that makes the group, and the global that keeps it. No version has all of them."""

_IMPORTERS = {"torch._dynamo.convert_frame": "get_compile_pg"}
"""Modules that keep such a function under its own name, as they had it at their import."""


def install(patches: Patches) -> None:
    """Replace those functions where their modules are loaded.

    Args:
        patches: records what was replaced.
    """
    for name in MODULES.keys() & sys.modules.keys():
        carry(sys.modules[name], patches)


def carry(module: types.ModuleType, patches: Patches) -> None:
    """Replace them in `module`, of `MODULES`, once it has run.

    Args:
        module: just imported, or long ago.
        patches: records what was replaced.
    """
    for function, kept in MODULES[module.__name__].items():
        if function not in vars(module) or kept not in vars(module):
            continue
        original = vars(module)[function]
        asking = _asking(original, kept)
        patches.set(module, function, asking)
        for name, imported in _IMPORTERS.items():
            importer = sys.modules.get(name)
            if importer is not None and vars(importer).get(imported) is original:
                patches.set(importer, imported, asking)


def _asking(original: types.FunctionType, kept: str) -> Any:
    @functools.wraps(original)
    def get() -> Any:
        state = unasked()
        if state is None:
            return original()
        # With globals of its own: other threads may ask in other worlds.
        variables = {**original.__globals__, kept: state.compiler_groups.get(kept)}
        found = types.FunctionType(original.__code__, variables)()
        state.compiler_groups[kept] = variables[kept]
        return found

    return get
