"""Integrations with frameworks: groups beside torch's default group, and worlds of Ray's actors.

See docs/rl-weights.md and docs/ray.md. Importing this package loads neither torch nor Ray: public names are
loaded when they are first used, and `multiworld.integrations.ray` is imported by its own name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiworld.integrations.custom_group import init_custom_process_group

__all__ = ["init_custom_process_group"]


def __getattr__(name: str) -> object:
    """Load a public name from the module that defines it (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from multiworld.loading import load  # noqa: PLC0415  (nothing is imported before a name is asked for)

    return getattr(load("multiworld.integrations.custom_group"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
