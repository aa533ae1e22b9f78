"""The host's side of a configuration: environment variables, devices, the store's port."""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from multiworld import settings
from multiworld.errors import MultiworldError, StoreBindError
from multiworld.launch.backends import default_backend, known_backends
from multiworld.launch.fill_in_config import VARIABLES, Facts, LaunchPlan, address, complete

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from multiworld.launch.config import MultiprocessConfig

__all__ = ["environment_of", "gather", "resolve", "serving", "with_environment"]

_PATIENCE = 30.0
"""Seconds to bind an address that the script named, or to find the store there."""


@dataclass
class _Held:
    """Keeps a server alive as long as it is referred to."""

    store: Any


def gather() -> Facts:
    """Look at the environment, the devices and the build of torch.

    Raises:
        MultiworldError: this process is in secure mode.
    """
    if cert := settings.load().tls_cert:
        raise MultiworldError(
            f"multiworld.launch with M8D_TLS_CERT={cert!r}",
            rule="It starts torch's own process groups and their store, which have no TLS",
            next_step="Start the processes with `m8d-run --secure`, and join worlds in them",
        )
    import torch

    found = {name: settings.environment(name) for name in VARIABLES}
    return Facts(
        environ={name: value for name, value in found.items() if value},
        devices=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        backends=known_backends(),
        default_backend=default_backend(),
    )


def resolve(cfg: MultiprocessConfig) -> MultiprocessConfig:
    """See `MultiprocessConfig.resolve`."""
    made = complete(cfg, gather())
    if not made.binds or made.configs[0].master_port:
        return made.configs[0]  # rank 0's process group, or world, serves the address
    host = made.configs[0].master_addr or ""
    store = _serve_anywhere(host)
    return made.at(store.port, _Held(store)).configs[0]


@contextlib.contextmanager
def serving(made: LaunchPlan) -> Iterator[LaunchPlan]:
    """Serve the plan's store where it is to be served from here; yields the plan with its port.

    Raises:
        StoreBindError: the address is not one of this host's, or its port is in use.
    """
    first = made.configs[0]
    if made.elsewhere and first.master_port:
        # As there: in torch 2.4 the names in a store that a launcher serves have a prefix.
        yield made.at(first.master_port)
    elif not made.binds:
        yield made
    elif not first.master_port:
        store = _serve_anywhere(first.master_addr or "")
        yield made.at(store.port, _Held(store))
    else:
        from multiworld._net.stores.store import open_store

        where = address(first.master_addr or "", first.master_port)
        held = open_store(
            where, world="launch", serve=True, deadline=time.monotonic() + _PATIENCE, cancelled=lambda: False
        )
        try:
            yield made.at(first.master_port)
        finally:
            held.close()


def _serve_anywhere(host: str) -> Any:
    """Serve a store at a free port of `host`; from its choice on, no other process can bind the port."""
    from multiworld._net.stores.server import StoreServer

    try:
        family, _, _, _, target = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        # This socket reserves the port; the server binds it too, and alone listens on it.
        with socket.socket(family, socket.SOCK_STREAM) as holder:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((target[0], 0))
            return StoreServer(int(family), (str(target[0]), holder.getsockname()[1]))
    except OSError as exc:
        raise StoreBindError(
            "launch",
            f"No port can be bound at {host}: {exc.strerror or exc}",
            rule="Without a port, master_addr is an address of this host",
            next_step="Correct master_addr, or give master_port where rank 0 is elsewhere",
        ) from exc


def environment_of(cfg: MultiprocessConfig) -> dict[str, str | None]:
    """Return the environment variables of torchrun's workers, for the process with this complete `cfg`."""
    tcp = bool(cfg.master_port)
    return {
        "RANK": str(cfg.rank),
        "LOCAL_RANK": str(cfg.local_rank),
        "WORLD_SIZE": str(cfg.world_size),
        "LOCAL_WORLD_SIZE": str(cfg.local_world_size),
        "TORCH_DISTRIBUTED_BACKEND": cfg.backend,
        **({"MASTER_ADDR": cfg.master_addr, "MASTER_PORT": str(cfg.master_port)} if tcp else {}),
        # To torch this means that the store is served already, so that rank 0 must not serve it. torch 2.4
        # then wants to know the restart, too.
        **(
            {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
            if tcp and cfg.served
            else {}
        ),
    }


@contextlib.contextmanager
def with_environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables of this process for the time of the block."""
    before = settings.set_environment(values)
    try:
        yield
    finally:
        settings.set_environment(before)
