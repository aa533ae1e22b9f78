"""The world of a result of a functional collective: what waits for it need not be in that world's block."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from multiworld._c10d.routing.state import WorldState

__all__ = ["owner_of_results", "returned"]

_results: MutableMapping[Any, weakref.ref[WorldState]] = WeakIdKeyDictionary()
"""By tensor that a functional collective has returned: its world, weakly."""


def returned(found: Any, owner: WorldState) -> None:
    """Note that `found`, a tensor or several, are results of a collective of `owner`."""
    for each in found if isinstance(found, list | tuple) else (found,):
        _results[each] = weakref.ref(owner)


def owner_of_results(args: tuple[Any, ...]) -> WorldState | None:
    """Return the world of the first noted tensor among `args`, or in lists among them.

    Returns:
        None where none is noted, or its world has been freed.
    """
    for value in args:
        for each in value if isinstance(value, list | tuple) else (value,):
            known = _results.get(each) if isinstance(each, torch.Tensor) else None
            if known is not None:
                return known()
    return None
