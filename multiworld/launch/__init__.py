"""Scripts that start their own processes: configuration, processes, process groups, parallelism.

Importing this package loads no torch. Public names are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiworld.launch.alltoall import all_to_all
    from multiworld.launch.backends import default_backend, get_distributed_backend, set_distributed_backend
    from multiworld.launch.config import MultiprocessConfig
    from multiworld.launch.errors import (
        ConfigError,
        LaunchError,
        ProcessExitedError,
        ProcessFailedError,
        ProcessRaisedError,
    )
    from multiworld.launch.groups import init_and_run, init_dist, init_process_group_from_backend
    from multiworld.launch.parallelism import Dimension, Parallelism, init_parallelism
    from multiworld.launch.processes import launch_subprocesses

_LAZY = {
    "all_to_all": "alltoall",
    **dict.fromkeys(("default_backend", "get_distributed_backend", "set_distributed_backend"), "backends"),
    "MultiprocessConfig": "config",
    **dict.fromkeys(
        ("ConfigError", "LaunchError", "ProcessExitedError", "ProcessFailedError", "ProcessRaisedError"),
        "errors",
    ),
    **dict.fromkeys(("init_and_run", "init_dist", "init_process_group_from_backend"), "groups"),
    **dict.fromkeys(("Dimension", "Parallelism", "init_parallelism"), "parallelism"),
    "launch_subprocesses": "processes",
}

__all__ = [
    "ConfigError", "Dimension", "LaunchError", "MultiprocessConfig", "Parallelism", "ProcessExitedError",
    "ProcessFailedError", "ProcessRaisedError", "all_to_all", "default_backend", "get_distributed_backend",
    "init_and_run", "init_dist", "init_parallelism", "init_process_group_from_backend", "launch_subprocesses",
    "set_distributed_backend",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Load a public name from the module that defines it (PEP 562)."""
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # nothing is imported before a name is asked for

    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
