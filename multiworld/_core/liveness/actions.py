"""What `multiworld._core.liveness.peers` decides, as records for the watchdog's thread to carry out."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiworld._core.liveness.detector import WorldId
    from multiworld._core.liveness.wire import Frame
    from multiworld._core.membership.roster import Endpoint
    from multiworld.events import Breakage

__all__ = [
    "Action",
    "Ask",
    "Broke",
    "Busy",
    "Dial",
    "Drop",
    "Keep",
    "Loose",
    "Ready",
    "Refusal",
    "Send",
    "Why",
]


class Why(enum.Enum):
    """Why a world cannot be attached."""

    STALE = "stale"
    GONE = "gone"


@dataclass(frozen=True)
class Dial:
    """Connect `channel` to `endpoint`."""

    channel: int
    endpoint: Endpoint


@dataclass(frozen=True)
class Send:
    """Send `frame` on `channel`."""

    channel: int
    frame: Frame


@dataclass(frozen=True)
class Drop:
    """Close `channel`; `orderly`: what was sent on it shall arrive."""

    channel: int
    orderly: bool


@dataclass(frozen=True)
class Ready:
    """Every member of `world` is connected and proved itself, in both directions."""

    world: WorldId


@dataclass(frozen=True)
class Refusal:
    """`world` cannot be attached any more."""

    world: WorldId
    why: Why
    detail: str


@dataclass(frozen=True)
class Broke:
    """The verdict about `world`."""

    world: WorldId
    breakage: Breakage


@dataclass(frozen=True)
class Keep:
    """`channel` is this process's tether: hold it where the kernel closes it first, and tell nothing of it any more.

    Where that cannot be, it is to be closed in good order.
    """

    channel: int


@dataclass(frozen=True)
class Loose:
    """The tether that was `channel` is not needed any more: end it in good order."""

    channel: int


@dataclass(frozen=True)
class Ask:
    """Ask at `endpoint`, whose host knows of it, what `process` does; `token` opens the answer."""

    process: str
    endpoint: Endpoint
    token: bytes


@dataclass(frozen=True)
class Busy:
    """The members `ranks` of `world` run and do not answer (`busy`), or they answer again."""

    world: WorldId
    ranks: tuple[int, ...]
    busy: bool


Action = Ask | Busy | Dial | Send | Drop | Keep | Loose | Ready | Refusal | Broke
