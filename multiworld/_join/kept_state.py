"""State that has come whole in parts, kept while a member tries again to get the rest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KeptState"]


@dataclass
class KeptState:
    """See the module.

    Attributes:
        tensors: and checksums, by their paths: see `multiworld._c10d.lane.state_transfer.receive_state`.
        begun: whether all members of the present try were there, and transfers have begun.
    """

    tensors: dict[Any, tuple[Tensor, int]] = field(default_factory=dict)
    begun: bool = False
