"""multiworld: fault domains for PyTorch.

Importing this package sets up nothing: no torch, no logging, no signals, no environment. Public names are
loaded when they are first used. It warns where another distribution has its files in the same folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiworld._join.block import joined
    from multiworld._join.join import join, join_async
    from multiworld.errors import (
        BackendError,
        BrokenWorldException,
        CollectiveMismatchError,
        InstallError,
        InvalidJoinError,
        JoinAbandonedError,
        JoinError,
        JoinTimeoutError,
        MarkerError,
        MismatchError,
        MultiworldError,
        PatchRequiredError,
        ProvenanceError,
        RankTakenError,
        RouterError,
        ShimError,
        SizeMismatchError,
        StaleGenerationError,
        StateError,
        StateTransferError,
        StoreBindError,
        StoreUnreachableError,
        UnknownWorldError,
        WorldClosedError,
        WorldError,
        WrongDeviceError,
    )
    from multiworld.events import (
        Breakage,
        Cause,
        Event,
        MemberBusy,
        State,
        WorldActive,
        WorldBroken,
        WorldClosed,
        WorldJoinFailed,
        WorldJoining,
        WorldReady,
        WorldStateReceived,
        WorldStuck,
        WorldUnblocked,
        subscribe,
    )
    from multiworld.joinall import join_all, join_all_async, retiring
    from multiworld.logs.handler import log_worlds
    from multiworld.metrics.server import serve_metrics
    from multiworld.pending import PendingOperation
    from multiworld.tracing import trace_worlds
    from multiworld.web.server import serve_page
    from multiworld.world import World, worlds

__version__ = "1.0.0"

_LAZY = {
    **dict.fromkeys(
        (
            "BackendError", "BrokenWorldException", "CollectiveMismatchError", "InstallError",
            "InvalidJoinError", "JoinAbandonedError", "JoinError", "JoinTimeoutError", "MarkerError",
            "MismatchError", "MultiworldError", "PatchRequiredError", "ProvenanceError", "RankTakenError",
            "RouterError", "ShimError", "SizeMismatchError",
            "StaleGenerationError", "StateError", "StateTransferError", "StoreBindError", "StoreUnreachableError",
            "UnknownWorldError",
            "WorldClosedError", "WorldError", "WrongDeviceError",
        ),
        "multiworld.errors",
    ),
    **dict.fromkeys(
        (
            "Breakage", "Cause", "Event", "MemberBusy", "State", "WorldActive", "WorldBroken", "WorldClosed",
            "WorldJoinFailed", "WorldJoining", "WorldReady", "WorldStateReceived", "WorldStuck", "WorldUnblocked",
            "subscribe",
        ),
        "multiworld.events",
    ),
    "joined": "multiworld._join.block",
    **dict.fromkeys(("join", "join_async"), "multiworld._join.join"),
    **dict.fromkeys(("join_all", "join_all_async", "retiring"), "multiworld.joinall"),
    "PendingOperation": "multiworld.pending",
    "trace_worlds": "multiworld.tracing",
    "log_worlds": "multiworld.logs.handler",
    "serve_metrics": "multiworld.metrics.server",
    "serve_page": "multiworld.web.server",
    **dict.fromkeys(("World", "worlds"), "multiworld.world"),
}  # fmt: skip

__all__ = [
    "BackendError", "Breakage", "BrokenWorldException", "Cause", "CollectiveMismatchError", "Event",
    "InstallError", "InvalidJoinError",
    "JoinAbandonedError", "JoinError", "JoinTimeoutError", "MarkerError", "MemberBusy", "MismatchError",
    "MultiworldError", "PatchRequiredError", "PendingOperation", "ProvenanceError", "RankTakenError",
    "RouterError", "ShimError", "SizeMismatchError", "StaleGenerationError", "State", "StateError", "StateTransferError", "StoreBindError",
    "StoreUnreachableError", "UnknownWorldError", "World",
    "WorldActive", "WorldBroken", "WorldClosed", "WorldClosedError", "WorldError", "WorldJoinFailed",
    "WorldJoining", "WorldReady", "WorldStateReceived", "WorldStuck", "WorldUnblocked", "WrongDeviceError", "__version__", "join", "join_all",
    "join_all_async", "join_async", "joined", "log_worlds", "retiring", "serve_metrics", "serve_page", "subscribe", "trace_worlds", "worlds",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Load a public name from the module that defines it (PEP 562)."""
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from multiworld.loading import load  # noqa: PLC0415  (nothing is imported before a name is asked for)

    return getattr(load(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _look_beside() -> None:
    """Warn if Cisco's ``multiworld`` is installed into this folder, too: one directory is listed (some 50 µs)."""
    import os  # noqa: PLC0415  (loaded long before; not a name of this module)

    package = os.path.dirname(__file__)  # noqa: PTH120  (pathlib is not loaded for this)
    try:
        names = os.listdir(os.path.dirname(package))  # noqa: PTH120, PTH208  (pathlib is not loaded for this)
    except OSError:  # in a zip file: nothing is installed beside it
        return
    if any(name.startswith("multiworld-") for name in names):
        from pathlib import Path  # noqa: PLC0415  (only where there is something to look at)

        from multiworld.shim.clash import notice  # noqa: PLC0415  (only where there is something to look at)

        notice(Path(package))


_look_beside()
