"""Reads the environment of a Kubernetes pod: of a LeaderWorkerSet, or of an indexed Job. Pure.

The controller of LeaderWorkerSets sets LWS_LEADER_ADDRESS, LWS_GROUP_SIZE and LWS_WORKER_INDEX; that of Jobs
sets JOB_COMPLETION_INDEX, for the pods of a JobSet as well. Pods of a StatefulSet can have the latter by the
downward API. POD_IP is the customary name of ``status.podIP``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiworld.run.clusters.values import C10D_PORT, ClusterDefaults
from multiworld.run.errors import ArgumentsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["read_group", "read_job"]

_SCHEDULER = "Kubernetes"


def read_group(environment: Mapping[str, str]) -> ClusterDefaults | None:
    """Return what a pod of a LeaderWorkerSet of several pods is told; None: this is none."""
    leader, size = environment.get("LWS_LEADER_ADDRESS", ""), environment.get("LWS_GROUP_SIZE", "")
    if not leader or not size.isdecimal() or int(size) < 2:
        return None
    return ClusterDefaults(
        scheduler=_SCHEDULER,
        run_id=leader,
        nodes=int(size),
        endpoint=f"{leader}:{C10D_PORT}",
        serves=environment.get("LWS_WORKER_INDEX") == "0",
        address=environment.get("POD_IP", ""),
    )


def read_job(
    environment: Mapping[str, str], full_name: Callable[[], str], *, endpoint_given: bool
) -> ClusterDefaults | None:
    """Return what a pod with an index says; None: it has none, and no address either.

    Pods of one Job differ in the number at the end of their host names; that of index 0 serves the
    rendezvous.

    Args:
        environment: of the process.
        full_name: returns the full name of this host.
        endpoint_given: whether --rdzv-endpoint was given: the name is then not needed.

    Raises:
        ArgumentsError: the pod's name does not tell those of the others.
    """
    index, address = environment.get("JOB_COMPLETION_INDEX", ""), environment.get("POD_IP", "")
    if endpoint_given or not index.isdecimal():
        return ClusterDefaults(_SCHEDULER, address=address) if address else None
    name = full_name()
    host, _, domain = name.partition(".")
    if not host.endswith(f"-{index}") or not domain:
        raise ArgumentsError(
            f"JOB_COMPLETION_INDEX={index} on host {name!r}",
            rule="Pods find each other by host names NAME-INDEX.SERVICE of a headless service",
            next_step="Give the pods a subdomain with such a service, or m8d-run --rdzv-endpoint HOST:PORT",
        )
    base = host.removesuffix(f"-{index}")
    return ClusterDefaults(
        scheduler=_SCHEDULER,
        run_id=".".join([base, *domain.split(".")[:2]]),  # service and namespace
        endpoint=f"{base}-0.{domain}:{C10D_PORT}",
        serves=int(index) == 0,
        address=address,
    )
