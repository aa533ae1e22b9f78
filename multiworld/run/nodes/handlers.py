"""Rendezvous handlers of torch's registry."""

from __future__ import annotations

import contextlib
import importlib.metadata
from typing import TYPE_CHECKING

import torch.distributed.elastic.rendezvous.registry as rendezvous_registry
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from multiworld.run.errors import ArgumentsError, RunError

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters

__all__ = ["later_rendezvous", "static_master", "torch_handler"]


def torch_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return the rendezvous, from torch's registry.

    Raises:
        ArgumentsError: it is not registered, or cannot be made of what was given.
        RendezvousError: torch's, where its store cannot be reached.
    """
    try:
        return rendezvous_registry.get_rendezvous_handler(parameters)
    except ModuleNotFoundError as exc:
        raise ArgumentsError(
            f"--rdzv-backend {parameters.backend}: there is no module {exc.name!r}",
            rule="What a rendezvous is built on is installed",
            next_step=f"pip install {'python-etcd' if exc.name == 'etcd' else exc.name}",
        ) from exc
    except ValueError as exc:
        named = {"c10d", "static", "standalone", "etcd", "etcd-v2"}
        named |= {entry.name for entry in importlib.metadata.entry_points(group="torchrun.handlers")}
        raise ArgumentsError(
            f"--rdzv-backend {parameters.backend} --rdzv-endpoint {parameters.endpoint!r}: {exc}",
            rule=f"There are {', '.join(sorted(named))}",
            next_step="Give one of them, and --rdzv-endpoint HOST:PORT where it needs one",
        ) from exc


def later_rendezvous(handler: RendezvousHandler) -> RendezvousInfo:
    """Meet the other nodes in another round than the first.

    torch 2.6 (2.13 does not) keeps the address of the store for workers from the first round, and raises
    AssertionError in each later one on a node that is the first of all then, and was not before: no node
    could come any more once the first one had left. Forgotten, it is asked for anew.
    """
    kept = handler.__dict__
    if kept.get("_bootstrap_store_info") is not None and kept.get("_shared_tcp_store_server") is None:
        kept["_bootstrap_store_info"] = None
    return handler.next_rendezvous()


def static_master(parameters: RendezvousParameters) -> tuple[str | None, int | None]:
    """Return the address of the workers' rank 0, for a static rendezvous."""
    if parameters.backend != "static":
        return None, None
    endpoint = parameters.endpoint.strip()
    host, port = "", -1
    with contextlib.suppress(ValueError):  # a port that is none
        host, port = parse_rendezvous_endpoint(endpoint, default_port=-1) if endpoint else ("", -1)
    if port == -1:
        raise RunError(
            f"the static rendezvous at {endpoint!r}",
            rule="It needs the host and the port of rank 0",
            next_step="Give --master-addr and --master-port, or --rdzv-endpoint HOST:PORT",
        )
    return host, port
