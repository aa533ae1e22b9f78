"""`ClusterDefaults`: values that a scheduler's environment has for options of ``m8d-run``."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["C10D_PORT", "ClusterDefaults"]

C10D_PORT = 29400
"""Port of a c10d rendezvous whose endpoint has none (torch's own default)."""


@dataclass(frozen=True)
class ClusterDefaults:
    """What a scheduler says of the nodes of a run; None and "": it does not say.

    Attributes:
        scheduler: its name, for the log.
        run_id: the same on all nodes of the run, and on those of no other one.
        nodes: how many there are.
        endpoint: "host:port" of the node that serves the rendezvous.
        serves: whether that is this node.
        address: at which the other nodes reach this one.
    """

    scheduler: str
    run_id: str = ""
    nodes: int | None = None
    endpoint: str = ""
    serves: bool | None = None
    address: str = ""
