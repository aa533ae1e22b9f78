"""The class that a backend's name builds, found in torch's registration without registering or building."""

from __future__ import annotations

import contextlib
import re
import types
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["implementation_of"]

_ENTRY_POINTS = "torch.distributed.backends"


def implementation_of(backend: str) -> str:
    """Return the class that a backend's name builds ("ProcessGroupNCCL2"); empty where unknown.

    Nothing is registered and no group is made.
    """
    name, c10d = backend.lower(), import_module("torch.distributed.distributed_c10d")
    creator = _creator(c10d, name)
    if creator is None:
        # Versions without creators: the class follows from the name.
        candidate = (
            f"ProcessGroup{'MPI' if name == 'mpi' else name.capitalize() if name == 'gloo' else name.upper()}"
        )
        return candidate if hasattr(c10d, candidate) and name in c10d.Backend.backend_list else ""
    built = [used for used in creator.__code__.co_names if re.fullmatch(r"(_?)ProcessGroup\w+", used)]
    classes = [used for used in built if isinstance(creator.__globals__.get(used), type)]
    # A creator may name a class that it takes its options from; the one it builds comes last.
    return classes[-1] if classes else ""


def _creator(c10d: Any, name: str) -> types.FunctionType | None:
    """Return the function that makes a backend of this name; None where torch has no function for it yet."""
    plugin = c10d.Backend._plugins.get(name.upper())
    if plugin is not None:
        return plugin.creator_fn if isinstance(plugin.creator_fn, types.FunctionType) else None
    for entry in entry_points(group=_ENTRY_POINTS):
        if entry.name.lower() == name:
            with contextlib.suppress(ImportError, AttributeError):  # a registrar that is not installed whole
                registrar = entry.load()
                if isinstance(registrar, types.FunctionType) and registrar.__globals__ is vars(c10d):
                    return _dry_run(c10d, registrar)
            return None
    return None


def _dry_run(c10d: Any, registrar: types.FunctionType) -> types.FunctionType | None:
    """Run one of torch's own registrars against a stand-in, and return the creator it would have registered.

    The registrar decides which class the name ``nccl`` builds. Registering permanently here would fix that
    decision before the user's program can influence it.
    """
    seen: list[Any] = []

    class Recorder:
        def register_backend(self, _name: str, func: Callable[..., Any], *_: Any, **__: Any) -> None:
            seen.append(func)

        def __getattr__(self, name: str) -> Any:
            return getattr(c10d.Backend, name)

    # type() and not isinstance(): deprecated names in there warn as soon as anything is asked of them.
    names = {key: set(value) if type(value) is set else value for key, value in vars(c10d).items()}
    types.FunctionType(registrar.__code__, {**names, "Backend": Recorder()})()
    return seen[0] if seen and isinstance(seen[0], types.FunctionType) else None
