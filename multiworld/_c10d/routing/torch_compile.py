"""`torch.compile` and worlds: code compiled in one world does not run in another.

The compiler runs `get_rank`, `get_world_size` and look-ups of groups once, while it traces, and keeps the
answers as constants. So a function whose trace asked for anything of the selected world is guarded by that
world (or by none being selected): elsewhere it is compiled again. One that asked for nothing is not guarded,
and costs nothing.

The guard compares the serial number of the selected state (`WorldState.serial`), which no two generations
share: what was compiled in a world that is gone never runs again.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

from multiworld._c10d.routing.selection import Tracing, current
from multiworld.errors import RouterError

if TYPE_CHECKING:
    import types

    from multiworld._c10d.monkeypatch import Patches

__all__ = ["MODULES", "carry", "install"]

_MARK = "_m8d_serial"

_NOT_TRACED = (
    "multiworld._c10d.lane",
    "multiworld._core.lane",
    "multiworld._net.lane",
    "multiworld._c10d.elastic.ddp_follower",
)


def install(patches: Patches) -> None:
    """Guard what is compiled from now on, and drop what was compiled before.

    Args:
        patches: records what was replaced.
    """
    for name in MODULES.keys() & sys.modules.keys():
        carry(sys.modules[name], patches)
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None and hasattr(dynamo, "reset_code_caches"):
        # It has no guard: a function compiled before the first join would have torch's own rank in every
        # world.
        dynamo.reset_code_caches()


def carry(module: types.ModuleType, patches: Patches) -> None:
    """Hook `module`, of `MODULES`, once it has run.

    Args:
        module: just imported, or long ago.
        patches: records what was replaced.

    Raises:
        RouterError: this torch's compiler has no such place.
    """
    owner, name, make = MODULES[module.__name__]
    place = module if owner is None else vars(module).get(owner)
    if place is None or name not in vars(place):
        raise RouterError(
            f"torch {torch.__version__} has no "
            f"{module.__name__}.{name if owner is None else f'{owner}.{name}'}",
            rule="multiworld guards compiled functions by their world there",
            next_step="Use a torch of multiworld's compatibility table, or a newer multiworld",
        )
    patches.set(place, name, make(vars(place)[name]))
    if module.__name__ == "torch._dynamo.convert_frame":
        _leave_alone()


def _leave_alone() -> None:
    """Let the compiler trace no function of the lane: it could not, and sends are no part of a graph.

    Nor what binds an elastic DDP model to its generation.
    """
    add: Any = getattr(sys.modules.get("torch._dynamo.trace_rules"), "add", None)
    if add is not None:
        for package in _NOT_TRACED:
            add(package)


def _serial() -> int:
    state = current()
    return 0 if state is None else state.serial


def _compiling(original: Any) -> Any:
    @functools.wraps(original)
    def compile_(*args: Any, **kwargs: Any) -> Any:
        with Tracing():
            return original(*args, **kwargs)

    return compile_


def _guarding(original: Any) -> Any:
    """One of the guards that every compiled frame gets: the world's goes with it."""

    # Assigned, not wrapped: newer versions mark these functions with attributes.
    @functools.wraps(original)
    def guard_mode(builder: Any, guard: Any) -> Any:
        if Tracing.asked():
            _guard_by_world(builder)
        return original(builder, guard)

    return guard_mode


def _guard_by_world(builder: Any) -> None:
    state = current()
    serial = 0 if state is None else state.serial
    root = getattr(getattr(builder, "guard_manager", None), "root", None)
    if root is None:
        raise RouterError(
            "torch.compile with torch._dynamo.config.enable_cpp_guard_manager = False",
            rule="A compiled function that asks for its world is guarded by it, and this takes guards in C++",
            next_step="Leave that setting at its default (True)",
        )
    where = "no world" if state is None else f"world {state.name!r}, generation {state.generation},"

    def same(_values: Any) -> bool:
        return _serial() == serial

    said = [f"{where} is selected (multiworld)"]
    try:
        root.add_lambda_guard(same, said, None)
    except TypeError:  # up to torch 2.8: without the user's stack
        root.add_lambda_guard(same, said)
    setattr(builder.guard_manager, _MARK, serial)


def _counting(original: Any) -> Any:
    """Count the limit of recompilations for each world separately."""

    @functools.wraps(original)
    def has_same_id_matched_objs(frame: Any, entry: Any) -> bool:
        manager = getattr(entry, "guard_manager", None) or getattr(entry, "check_fn", None)
        serial = getattr(manager, _MARK, None)
        if serial is not None and serial != _serial():
            return False
        return bool(original(frame, entry))

    return has_same_id_matched_objs


MODULES: dict[str, tuple[str | None, str, Any]] = {
    "torch._dynamo.convert_frame": (None, "_compile", _compiling),
    "torch._dynamo.guards": ("GuardBuilder", "GRAD_MODE", _guarding),
    "torch._dynamo.cache_size": (None, "_has_same_id_matched_objs", _counting),
}
"""By module of torch's compiler: what is replaced in it, in which class, and by what."""
