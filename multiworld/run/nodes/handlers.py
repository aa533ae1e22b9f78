"""Rendezvous handlers of torch's registry."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import time
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed.elastic.rendezvous.registry as rendezvous_registry
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from multiworld.run.errors import ArgumentsError, RunError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters

__all__ = ["etcd_handler", "first_rendezvous", "later_rendezvous", "static_master", "torch_handler"]

_PATIENCE = 60
"""Seconds for which etcd is asked again where it does not answer: torch's ``read_timeout``, as with c10d."""
_AGAIN = 1.0  # seconds between two attempts
_ROUNDS = 3
"""Rounds in which a node waits to meet the others first, each until the rendezvous store's timeout."""


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


def etcd_handler(
    parameters: RendezvousParameters,
    note: Callable[[int, str], object],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> RendezvousHandler:
    """Return `torch_handler` of a rendezvous over etcd, which may be about to start.

    torch asks etcd once, and its store of c10d again until ``read_timeout`` has passed.

    Args:
        parameters: as for torch's registry.
        note: gets a level of `logging` and a line for the log.
        clock: in seconds.
        sleep: waits for so many of them.

    Raises:
        ArgumentsError: as from `torch_handler`.
        RendezvousConnectionError: etcd cannot be reached.
    """
    began, told = clock(), False
    while True:
        try:
            return torch_handler(parameters)
        except Exception as error:
            # The backend "etcd" lets python-etcd's own exceptions out.
            if not isinstance(error, RendezvousConnectionError) and type(error).__module__ != "etcd":
                raise
            seconds = parameters.get_as_int("read_timeout", _PATIENCE) or _PATIENCE
            why = f"etcd at {parameters.endpoint} does not answer: {error.__cause__ or error}"
            if clock() - began + _AGAIN >= seconds:
                raise RendezvousConnectionError(why) from error
            if not told:
                note(logging.WARNING, f"{why}. It is asked again for {seconds} s")
                told = True
        sleep(_AGAIN)


def first_rendezvous(handler: RendezvousHandler, note: Callable[[str], object]) -> RendezvousInfo:
    """Meet the other nodes for the first time.

    torch drops a node that is silent for longer than its keep-alive allows. Where that is the first one of
    the round, the others wait for its address until the rendezvous store's timeout, and are dropped
    themselves: their store's client sends no heartbeat meanwhile. They take part in the next round.

    Args:
        handler: of the run.
        note: gets a line for the log.

    Raises:
        torch.distributed.DistStoreError: no address came in any of `_ROUNDS` rounds.
    """
    meet = handler.next_rendezvous
    for _ in range(1, _ROUNDS):
        try:
            return meet()
        except DistStoreError as error:
            note(f"the rendezvous' first node gave no address: it may have been dropped ({error}). Once more")
        meet = partial(later_rendezvous, handler)
    return meet()


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
