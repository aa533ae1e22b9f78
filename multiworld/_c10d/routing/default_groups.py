"""Fix default groups that torch's modules capture at import, now or later.

Functions such as ``def all_reduce(tensor, group=group.WORLD)`` keep the default group of the moment of their
import: the group of the world selected then, for all other worlds too. None instead means the default group
at the time of the call; torch itself has None there when the module is imported before `init_process_group`,
as is usual.

Other modules start threads (`threads.py`) or compile (`compiled.py`) and are hooked at import, too.
"""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any

import torch

from multiworld._c10d.routing import one_per_world, threads, torch_compile
from multiworld._c10d.routing.selection import selected
from multiworld._c10d.routing.state import WorldState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from multiworld._c10d.monkeypatch import Patches

__all__ = ["install"]

_MODULES = frozenset(
    {
        "torch.distributed.nn.functional",
        "torch.distributed.fsdp.sharded_grad_scaler",
        "torch.distributed.optim.zero_redundancy_optimizer",
    }
)

_HOOKS = (threads, torch_compile, one_per_world)


def install(patches: Patches) -> None:
    """Look those defaults up at each call, and hook threads, in modules loaded now or later.

    Args:
        patches: records what was replaced.
    """
    for name in _MODULES & sys.modules.keys():
        for function in _functions(sys.modules[name]):
            defaults = function.__defaults__ or ()
            late = tuple(None if _is_group(value) else value for value in defaults)
            if late != defaults:
                patches.set(function, "__defaults__", late)
    for each in _HOOKS:
        each.install(patches)
    # Not imported now: they cost seconds, and some versions make a directory for them.
    nothing = WorldState(name="", generation=0)
    nothing.forget()
    patches.insert(sys.meta_path, _Finder(nothing, patches))


class _Finder:
    """Import finder that executes those modules while no default group is visible."""

    def __init__(self, nothing: WorldState, patches: Patches) -> None:
        self._nothing = nothing
        self._patches = patches

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """As importlib asks for it; None for all other modules."""
        if name not in _MODULES and not any(name in each.MODULES for each in _HOOKS):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            # On this loader object itself: a wrapper would break requests for the source.
            wrap = self._unseeing if name in _MODULES else self._carrying
            vars(spec.loader)["exec_module"] = wrap(spec.loader.exec_module)
        return spec

    def _carrying(self, run: Callable[[types.ModuleType], None]) -> Callable[[types.ModuleType], None]:
        def exec_module(module: types.ModuleType) -> None:
            run(module)
            # In a thread that imports, without the router's lock: to add to the list is atomic. A patch that
            # comes after `uninstall` does nothing where no world is selected.
            for each in _HOOKS:
                if module.__name__ in each.MODULES:
                    each.carry(module, self._patches)

        return exec_module

    def _unseeing(self, run: Callable[[types.ModuleType], None]) -> Callable[[types.ModuleType], None]:
        def exec_module(module: types.ModuleType) -> None:
            with selected(self._nothing):
                run(module)

        return exec_module


def _functions(module: types.ModuleType) -> Iterator[types.FunctionType]:
    for member in list(vars(module).values()):
        if getattr(member, "__module__", None) != module.__name__:
            continue
        for each in list(vars(member).values()) if isinstance(member, type) else (member,):
            if isinstance(each, types.FunctionType):
                yield each


def _is_group(value: Any) -> bool:
    return isinstance(value, torch._C._distributed_c10d.ProcessGroup)
