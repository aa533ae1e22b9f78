"""Rendezvous of a secure run: torch's, over a store that is served and reached over TLS, or without any.

torch's agent has a second listener, the store that workers meet at who call ``init_process_group`` themselves
(MASTER_ADDR, MASTER_PORT). Here the launcher serves none: worker 0 does, as without a launcher.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from typing import TYPE_CHECKING, Any

import torch.distributed as _dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from multiworld._net.host_address import is_own, resolved
from multiworld._net.stores.address import StoreAddress
from multiworld._net.stores.resolving import resolved_targets
from multiworld._net.stores.servers import Server, serve
from multiworld._net.stores.tcp_client import TcpClient
from multiworld._net.stores.torchstore import TcpStore
from multiworld._net.tls.session import HUNG_UP, RefusedError
from multiworld.errors import MultiworldError
from multiworld.run.clusters.values import C10D_PORT  # torch 2.4 has it under no name
from multiworld.run.errors import ArgumentsError
from multiworld.run.nodes.world_store import listening_targets

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from torch.distributed.elastic.rendezvous import RendezvousParameters


__all__ = ["ENVIRONMENT", "secure_handler"]

dist: Any = _dist  # it exports the stores without saying so to type checkers

ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Variables with which torch's handlers of this process serve no store for workers."""

_READ = 60
"""Seconds that the store has to be reached, and to answer: torch's ``read_timeout``."""
_STATIC = 600
"""The same for a static rendezvous: torch's ``timeout``."""
_ETCD_CA = {"etcd": "cacert", "etcd-v2": "ca_cert"}
"""Name of the authority in the options of each of torch's rendezvous for etcd."""
_FIRST, _LAST = 0.05, 1.0  # seconds between two attempts to connect


def secure_handler(
    parameters: RendezvousParameters,
    parts: ExitStack,
    otherwise: Callable[[RendezvousParameters], RendezvousHandler],
) -> RendezvousHandler:
    """Return the rendezvous of a secure run.

    Args:
        parameters: as for torch's registry.
        parts: gets what is to be closed in the end.
        otherwise: makes the handlers that need no listener of the launcher's.

    Raises:
        ArgumentsError: a rendezvous of this kind is not known to be encrypted.
        RendezvousConnectionError: the store cannot be reached.
    """
    backend = parameters.backend
    if backend == "static":
        return _StaticRendezvous(parameters, parts)
    if backend == "c10d" and parameters.get("store_type", "tcp").strip().lower() == "file":
        return otherwise(parameters)
    if backend == "c10d":
        seconds = float(parameters.get_as_int("read_timeout", _READ) or _READ)
        if parameters.max_nodes == 1:
            store = dist.HashStore()  # of this process
        else:
            host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=C10D_PORT)
            serves = parameters.get_as_bool("is_host")
            if serves is None:
                serves = any(map(is_own, resolved(host)))
            store = _open_store(host, port, parts, serves=serves, seconds=seconds)
        return create_handler(store, C10dRendezvousBackend(store, parameters.run_id), parameters)
    # Without an authority python-etcd takes any server for the right one; torch reads no other name of it.
    asked = parameters.config
    if asked.get("protocol") == "https" and asked.get(_ETCD_CA.get(backend, "")):
        return otherwise(parameters)
    raise ArgumentsError(
        f"--rdzv-backend {backend} in a secure run",
        rule="Launchers meet over TLS: with c10d, static, etcd with --rdzv-conf protocol=https,cacert=FILE, "
        "or etcd-v2 with protocol=https,ca_cert=FILE",
        next_step="Give one of them",
    )


class _StaticRendezvous(RendezvousHandler):
    """As torch's static rendezvous: node 0 serves the store, and each node knows its rank."""

    use_agent_store = False

    def __init__(self, parameters: RendezvousParameters, parts: ExitStack) -> None:
        if "rank" not in parameters.config:
            raise ValueError("a static rendezvous needs --node-rank")
        self._parameters, self._parts = parameters, parts
        self._rank = int(parameters.config["rank"])
        self._host, self._port = parse_rendezvous_endpoint(parameters.endpoint.strip(), default_port=-1)
        self._info: RendezvousInfo | None = None

    def get_backend(self) -> str:
        return "static"

    def next_rendezvous(self) -> RendezvousInfo:
        if self._info is not None:
            return self._info
        nodes = self._parameters.max_nodes
        self._store: Any = dist.HashStore()  # it is kept: torch's PrefixStore does not keep a store in Python
        port = self._port
        if nodes > 1:
            seconds = float(self._parameters.config.get("timeout", _STATIC))
            self._store = _open_store(self._host, port, self._parts, serves=self._rank == 0, seconds=seconds)
        prefixed = dist.PrefixStore(self._parameters.run_id, self._store)
        if nodes > 1:  # the port of the endpoint is taken: workers meet at another one
            if self._rank == 0:
                prefixed.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(_free_port()))
            port = int(prefixed.get(RendezvousStoreInfo.MASTER_PORT_KEY))
        self._info = RendezvousInfo(prefixed, self._rank, nodes, RendezvousStoreInfo(self._host, port))
        return self._info

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: it has one round."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return str(self._parameters.run_id)

    def shutdown(self) -> bool:
        return True


def _open_store(host: str, port: int, parts: ExitStack, *, serves: bool, seconds: float) -> TcpStore:
    """Serve the store, or reach the one that is served; a process of this host may have been first."""
    server = _serve(host, port) if serves else None
    if server is not None:
        parts.callback(server.close)
    deadline, pause = time.monotonic() + seconds, _FIRST
    while True:
        try:
            client = _connect(StoreAddress("tcp", host=host, port=port), deadline)
            break
        except (OSError, MultiworldError) as error:
            if time.monotonic() + pause >= deadline or _refused(error):
                raise RendezvousConnectionError(
                    f"the store at {host}:{port} cannot be reached over TLS: {error}"
                ) from error
        time.sleep(pause)
        pause = min(_LAST, 1.5 * pause)
    parts.callback(client.close)
    return TcpStore(client, deadline=time.monotonic(), answer=seconds)


def _connect(address: StoreAddress, deadline: float) -> TcpClient:
    failed: OSError | None = None
    for family, target in resolved_targets(address, world="", deadline=deadline):
        try:
            return TcpClient.connect(family, target, deadline=deadline)
        except OSError as error:  # noqa: PERF203  (one or two addresses)
            failed = error
    raise failed or OSError(f"{address.host} has no address")


def _serve(host: str, port: int) -> Server | None:
    """Serve at the first address that is this host's; None: it is taken, or no address of this host."""
    for family, address in listening_targets(host):
        with contextlib.suppress(OSError):
            return serve(family, (address, port))
    return None


def _refused(error: BaseException | None) -> bool:
    """Whether the other end is no process of the run, or does not take this one for one."""
    while error is not None:
        if isinstance(error, RefusedError):
            return True
        # Who hangs up may be a proxy whose store has not come yet.
        if isinstance(error, ssl.SSLError) and not isinstance(error, HUNG_UP):
            return True
        error = error.__cause__
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
