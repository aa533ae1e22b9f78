"""`read`: finds what a scheduler's environment says of a run's nodes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from multiworld.run.clusters import kubernetes, slurm

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from multiworld.run.clusters.values import ClusterDefaults

__all__ = ["Given", "read"]


@dataclass(frozen=True)
class Given:
    """What the command line says.

    Attributes:
        most_nodes: the larger number of --nnodes; None: it was not given.
        endpoint: whether a rendezvous was given that this run does not serve itself.
    """

    most_nodes: int | None
    endpoint: bool


def read(
    environment: Mapping[str, str], given: Given, full_name: Callable[[], str]
) -> ClusterDefaults | None:
    """Return what the scheduler says of this node and the others; None: nothing, or the run has one node.

    Args:
        environment: of the process.
        given: on the command line.
        full_name: returns the full name of this host; called only where it is needed.

    Raises:
        ArgumentsError: the scheduler started launchers in a way in which they cannot form a run.
    """
    if given.most_nodes == 1:
        return None
    found = slurm.read(environment)
    if found is None:
        found = kubernetes.read_group(environment)
    if found is None and given.most_nodes is not None:
        found = kubernetes.read_job(environment, full_name, endpoint_given=given.endpoint)
    return found
