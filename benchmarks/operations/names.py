"""Names of the forms that are worlds of another kind, and of operations. Pure."""

from __future__ import annotations

USUAL = "world"
UNREAD = "wire"
"""Its members do not read each other's memory: their messages go through the connection."""
CHECKED, LANE, P2P = "checked", "lane", "p2p"
SETTINGS = {CHECKED: ("M8D_CHECK", "1"), LANE: ("M8D_LANE", "1"), P2P: ("M8D_LANE", "p2p")}
"""Of each other variant the environment variable that makes it, and its value."""
VARIANTS = (UNREAD, *SETTINGS)
COMMUNICATED = frozenset(
    {"send_recv", "broadcast", "all_reduce", "reduce", "all_gather", "gather", "scatter"}
)
"""Operations that `WorldCommunicator` has; pymultiworld's face has no more."""
