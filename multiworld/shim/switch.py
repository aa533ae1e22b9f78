"""Enable and disable the shim explicitly. Joining a world enables the router by itself."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from multiworld import settings
from multiworld.errors import ShimError
from multiworld.registry import registry

__all__ = ["attach", "disable", "enable", "enabled"]

_NAME = "WorldManager"


def attach() -> None:
    """Make ``torch.distributed.WorldManager`` mean `multiworld.manager.WorldManager`.

    Importing ``torch.distributed.multiworld`` calls this. With ``M8D_SHIM=off``, and where torch has a
    WorldManager of its own, nothing is done. A setting that breaks its rule is an error at the first join.
    """
    dist = _distributed()
    if (settings.environment("M8D_SHIM") or "").strip().lower() != "off" and not hasattr(dist, _NAME):
        setattr(dist, _NAME, _manager())


def enable() -> None:
    """Turn the router on, so that ``with world:`` works, and `attach`. Calling it again changes nothing.

    Raises:
        RouterError: this torch brings something that the router does not know.
        ShimError: torch is not installed.
    """
    dist = _distributed()
    _router().install()
    if not hasattr(dist, _NAME):
        setattr(dist, _NAME, _manager())


def disable() -> None:
    """Turn the router off and restore torch as it was. Where it is off already nothing is done.

    Raises:
        ShimError: worlds are open, or being joined: their programs would talk to torch's own default group
            from then on.
    """
    _router().uninstall(_require_no_worlds)
    dist = _distributed()
    if vars(dist).get(_NAME) is _manager():
        delattr(dist, _NAME)


def _require_no_worlds() -> None:
    # Joins first: one that ends in between is among the worlds then.
    joining = registry.joining()
    names = {name: repr(name) for name in registry.worlds()}
    names.update((name, f"{name!r} (being joined)") for name in joining if name not in names)
    if names:
        raise ShimError(
            f"the shim was to be turned off with {len(names)} world(s) open: {', '.join(names.values())}",
            rule="It is turned off when every world is closed, and none is being joined",
            next_step="Close them first" + (", when their joins are over" if joining else ""),
        )


def enabled() -> bool:
    """Whether the router is on in this process."""
    return bool(_router().installed())


def _router() -> Any:
    return import_module("multiworld._c10d.routing.router")


def _manager() -> type:
    manager: type = import_module("multiworld.manager").WorldManager
    return manager


def _distributed() -> Any:
    try:
        return import_module("torch.distributed")
    except ImportError as exc:
        raise ShimError(
            f"torch.distributed cannot be imported: {exc}",
            next_step="Install torch, or correct the installation",
        ) from exc
