"""Default arguments that torch takes from ``group.WORLD`` when a module is imported.

``def all_reduce(tensor, group=group.WORLD)`` remembers the default group of the moment of its import: with worlds, the
one of whatever world was selected then, for all the others too. None in its place means the default group of the call,
and is what torch has there when such a module is imported before `init_process_group`, as is usual.
"""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any

import torch

from multiworld._c10d.selection import selected
from multiworld._c10d.state import WorldState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from multiworld._c10d.patching import Patches

__all__ = ["install"]

_MODULES = frozenset(
    {
        "torch.distributed.nn.functional",
        "torch.distributed.fsdp.sharded_grad_scaler",
        "torch.distributed.optim.zero_redundancy_optimizer",
    }
)


def install(patches: Patches) -> None:
    """Let those defaults be looked up at each call: in the modules that are loaded, and in those that will be.

    Args:
        patches: records what was replaced.
    """
    for name in _MODULES & sys.modules.keys():
        for function in _functions(sys.modules[name]):
            defaults = function.__defaults__ or ()
            late = tuple(None if _is_group(value) else value for value in defaults)
            if late != defaults:
                patches.set(function, "__defaults__", late)
    # Not imported now: they cost seconds, and some versions make a directory for them.
    nothing = WorldState(name="", generation=0)
    nothing.forget()
    patches.set(sys, "meta_path", [_Finder(nothing), *sys.meta_path])


class _Finder:
    """Finds those modules as Python does, and lets them run where no default group is to be seen."""

    def __init__(self, nothing: WorldState) -> None:
        self._nothing = nothing

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """As importlib asks for it; None for all other modules."""
        if name not in _MODULES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            # On this one loader object: a wrapper would be in the way of whoever asks it for the source.
            vars(spec.loader)["exec_module"] = self._unseeing(spec.loader.exec_module)
        return spec

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
