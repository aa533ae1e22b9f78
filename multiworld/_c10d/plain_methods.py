"""Methods of torch's ``ProcessGroup`` as torch has them: taken before the router replaces some of them."""

from __future__ import annotations

import types
from typing import Any

import torch

__all__ = ["PLAIN", "PlainMethods"]

PLAIN: dict[str, Any] = {
    name: getattr(member, "__func__", member)
    for name, member in vars(torch._C._distributed_c10d.ProcessGroup).items()
    if callable(member)
}
"""By name. The router imports this before it replaces any."""


class PlainMethods:
    """A process group's methods, as torch has them.

    Args:
        group: the ProcessGroup.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        if name not in PLAIN:
            raise AttributeError(name)
        return types.MethodType(PLAIN[name], self._group)
