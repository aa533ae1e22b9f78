"""Carry the selected world into threads that torch starts.

A thread starts without a selection. In one that torch starts for a caller inside ``with world:`` that would
be wrong without an error: a checkpoint that is saved in the background asks `is_initialized`, hears no, and
saves as a single process. So the names by which those modules of torch reach threads and executors mean ones
that inherit the selection of the thread that started them; no other threads change. `docs/torch-threads.md`
lists all of them.
"""

from __future__ import annotations

import concurrent.futures
import functools
import sys
import threading
import types
from typing import TYPE_CHECKING, Any

import torch

from multiworld._c10d.routing import checkpoints
from multiworld._c10d.routing.error_owner import guessed
from multiworld._c10d.routing.selection import current, selected
from multiworld._c10d.routing.state import WorldState, owner_of
from multiworld._core.reraise import raise_instead
from multiworld.errors import RouterError

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld._c10d.monkeypatch import Patches

__all__ = ["MODULES", "carry", "install"]

_DCP = "torch.distributed.checkpoint"
IN_A_PROCESS = "_ProcessBasedAsyncCheckpointExecutor"

MODULES: dict[str, tuple[str, ...]] = {
    f"{_DCP}.state_dict_saver": ("ThreadPoolExecutor",),  # up to torch 2.6
    f"{_DCP}._async_thread_executor": ("ThreadPoolExecutor",),
    f"{_DCP}._async_process_executor": ("ThreadPoolExecutor", IN_A_PROCESS),
    f"{_DCP}.staging": ("ThreadPoolExecutor",),
    f"{_DCP}.filesystem": ("threading",),
    f"{_DCP}.hf_storage": ("threading",),
    f"{_DCP}._consolidate_hf_safetensors": ("concurrent",),
    f"{_DCP}._experimental.staging": ("ThreadPoolExecutor",),
    f"{_DCP}._experimental.checkpoint_process": ("ThreadPoolExecutor",),
    "torch.nn.parallel.parallel_apply": ("threading",),
    "torch.utils.data.dataloader": ("threading",),  # the thread that pins memory
    "torch.distributed._local_tensor": ("_ExceptionRaisingThread",),
}
"""By module of torch: its globals that are replaced, where this version has them."""


def install(patches: Patches) -> None:
    """Replace those globals in the modules that are loaded, and let callbacks of futures know their world.

    Args:
        patches: records what was replaced.
    """
    for name in MODULES.keys() & sys.modules.keys():
        carry(sys.modules[name], patches)
    for name in ("then", "add_done_callback"):
        patches.set(torch._C.Future, name, _registering(vars(torch._C.Future)[name]))


def carry(module: types.ModuleType, patches: Patches) -> None:
    """Replace those globals in `module`, of `MODULES`, once it has run.

    Args:
        module: just imported, or long ago.
        patches: records what was replaced.
    """
    for name in MODULES[module.__name__]:
        if name not in vars(module):
            continue
        found = vars(module)[name]
        if name == IN_A_PROCESS:
            patches.set(found, "execute_save", _refusing(found.execute_save))
        elif isinstance(found, type) and issubclass(found, threading.Thread):
            patches.set(module, name, type(name, (_Carrying, found), {"__module__": module.__name__}))
        else:
            patches.set(module, name, _REPLACEMENTS[name])


def _carried(function: Callable[..., Any], state: WorldState) -> Callable[..., Any]:
    """`function`, for another thread, in the world of this one; its errors as the world's."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with selected(state):
            try:
                return function(*args, **kwargs)
            except Exception as error:
                raise_instead(error, guessed(error, state))

    return run


class _Executor(concurrent.futures.ThreadPoolExecutor):
    """Runs each call in the world that was selected where it was submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        # A group of a world passed from outside of its block (`async_save(process_group=world.group)`) means
        # the world.
        state = current() or owner_of(kwargs.get("process_group"))
        if state is None:
            return super().submit(fn, *args, **kwargs)
        run = _carried(fn, state)
        if "process_group" in kwargs:
            return checkpoints.submit(state, super().submit, run, args, kwargs)
        return super().submit(run, *args, **kwargs)


class _Carrying(threading.Thread):
    """Runs in the world that is selected where it is started; also a mixin of torch's thread classes."""

    _m8d_state: WorldState | None = None

    def start(self) -> None:
        self._m8d_state = current()
        super().start()

    def run(self) -> None:
        state, self._m8d_state = self._m8d_state, None
        if state is None:
            super().run()
            return
        with selected(state):
            super().run()


class _View(types.ModuleType):
    """A module as it is, but for some of its names."""

    def __init__(self, module: types.ModuleType, **instead: Any) -> None:
        super().__init__(module.__name__, module.__doc__)
        self.__dict__.update(instead, _m8d_module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_m8d_module"], name)


_REPLACEMENTS: dict[str, Any] = {
    "ThreadPoolExecutor": _Executor,
    "threading": _View(threading, Thread=_Carrying),
    "concurrent": _View(concurrent, futures=_View(concurrent.futures, ThreadPoolExecutor=_Executor)),
}


def _registering(original: Any) -> Any:
    """`Future.then` or `add_done_callback`: the callback runs in the thread that completes the future."""
    function = getattr(original, "__func__", original)

    @functools.wraps(function)
    def register(self: Any, callback: Callable[..., Any]) -> Any:
        state = current()
        if state is not None and callable(callback):
            callback = _carried(callback, state)
        return function(self, callback)

    return register


def _refusing(original: Any) -> Any:
    @functools.wraps(original)
    def execute_save(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = current() or owner_of(kwargs.get("process_group"))
        if state is None:
            return original(self, *args, **kwargs)
        raise RouterError(
            f"async_save() with AsyncCheckpointerType.PROCESS in world {state.name!r}",
            rule="torch keeps one checkpointer process for each process, with one default group for good: "
            "it cannot belong to several worlds, nor to a world's next generation",
            next_step="Use AsyncCheckpointerType.THREAD (the default), or save() in a process of your own",
        )

    return execute_save
