"""Choice of the backend: the environment's, or the device's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from multiworld import settings
from multiworld.launch.fill_in_config import check_backend

if TYPE_CHECKING:
    import torch

__all__ = ["default_backend", "get_distributed_backend", "known_backends", "set_distributed_backend"]

_VARIABLE = "TORCH_DISTRIBUTED_BACKEND"


def default_backend(device: torch.device | str | int | None = None) -> str:
    """Return the backend that torch takes for a device: "nccl" for a GPU, "gloo" for the CPU.

    Args:
        device: a device of torch's; None: the accelerator that is there, else the CPU. The index does not
            matter.

    Returns:
        Its name; "gloo" where this build of torch lacks the device's own.
    """
    import torch
    import torch.distributed as dist

    here = "cuda" if torch.cuda.is_available() else "cpu"
    kind = here if device is None else torch.device(device).type
    chosen: Any = dist.Backend.default_device_backend_map.get(kind, "gloo")
    return str(chosen) if str(chosen) in known_backends() else "gloo"


def get_distributed_backend() -> str:
    """Return the backend that TORCH_DISTRIBUTED_BACKEND names; `default_backend` where it is not set.

    Raises:
        ConfigError: torch knows no such backend, or cannot build it here.
    """
    told = (settings.environment(_VARIABLE) or "").strip()
    return check_backend(told, known_backends(), _VARIABLE) if told else default_backend()


def set_distributed_backend(name: str | None) -> None:
    """Set TORCH_DISTRIBUTED_BACKEND for this process and those it starts; None unsets it.

    Raises:
        ConfigError: torch knows no such backend, or cannot build it here.
    """
    chosen = None if name is None else check_backend(name, known_backends())
    settings.set_environment({_VARIABLE: chosen})


def known_backends() -> frozenset[str]:
    """Names of the backends that torch can build here, registered ones included."""
    import torch.distributed as dist

    names = [str(name) for name in dist.Backend.backend_list if name != "undefined"]
    return frozenset(name for name in names if dist.is_backend_available(name))
