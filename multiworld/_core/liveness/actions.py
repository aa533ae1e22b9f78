"""Actions: decisions of `multiworld._core.liveness.peers` that the watchdog's thread carries out."""

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
    "Answer",
    "Ask",
    "Break",
    "BusyReport",
    "Dial",
    "Drop",
    "Hear",
    "Keep",
    "Lost",
    "ReadUnread",
    "Ready",
    "Refusal",
    "Release",
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
    """Every member of `world` is connected and authenticated, in both directions."""

    world: WorldId


@dataclass(frozen=True)
class Refusal:
    """`world` cannot be attached any more."""

    world: WorldId
    why: Why
    detail: str


@dataclass(frozen=True)
class Break:
    """The verdict about `world`."""

    world: WorldId
    breakage: Breakage


@dataclass(frozen=True)
class Lost:
    """The members `ranks` of `world`, which is broken, are lost too."""

    world: WorldId
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Keep:
    """Move `channel`, this process's early-close connection, into the isolated descriptor table.

    Its events are no longer reported. Where it cannot be moved, close it in good order.
    """

    channel: int


@dataclass(frozen=True)
class Release:
    """Close the early-close connection that was `channel` in good order."""

    channel: int


@dataclass(frozen=True)
class Ask:
    """Ask the helper at `endpoint` whether `process` runs; `token` authenticates the answer."""

    process: str
    endpoint: Endpoint
    token: bytes


@dataclass(frozen=True)
class BusyReport:
    """The members `ranks` of `world` run without answering (`busy`), or answer again."""

    world: WorldId
    ranks: tuple[int, ...]
    busy: bool


@dataclass(frozen=True)
class ReadUnread:
    """Have `world` read what lies on its lane's connection to the member `rank`, which waits for that."""

    world: WorldId
    rank: int


@dataclass(frozen=True)
class Answer:
    """Send what `world` is doing on `channel`, as the answer to the question `number`."""

    world: WorldId
    channel: int
    number: int
    deep: bool


@dataclass(frozen=True)
class Hear:
    """The member `rank` of `world` answers the question `number`: a piece, the `last` or not."""

    world: WorldId
    rank: int
    number: int
    piece: bytes
    last: bool


Action = (
    Answer
    | Ask
    | Break
    | BusyReport
    | Dial
    | Drop
    | Hear
    | Keep
    | ReadUnread
    | Lost
    | Ready
    | Refusal
    | Release
    | Send
)
