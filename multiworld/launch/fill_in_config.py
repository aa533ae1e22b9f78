"""Completion of a configuration from the script's values, the environment and the host. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from multiworld.launch.config import LAUNCH_METHODS, MultiprocessConfig
from multiworld.launch.errors import ConfigError
from multiworld.launch.sizes import data_parallelism

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["VARIABLES", "Facts", "LaunchPlan", "address", "check_backend", "complete"]

VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCH_DISTRIBUTED_BACKEND",
)  # fmt: skip
"""Environment variables that are read."""

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Facts:
    """Environment, devices and backends of this host.

    Attributes:
        environ: those of `VARIABLES` that are set.
        devices: number of GPUs (of torch's accelerator).
        backends: names that torch can build here.
        default_backend: for this host's devices.
    """

    environ: Mapping[str, str]
    devices: int
    backends: frozenset[str]
    default_backend: str


@dataclass(frozen=True)
class LaunchPlan:
    """Configurations of the processes to run on this host.

    Attributes:
        configs: one for each process, by local rank.
        placed: whether a launcher started this process as one of the ranks: then it is the only one here.
        binds: whether the store is to be served from here; at a port of its own choice where `master_port` is
            0.
        elsewhere: whether the launcher of rank 0's host serves it.
    """

    configs: tuple[MultiprocessConfig, ...]
    placed: bool
    binds: bool
    elsewhere: bool = False

    def at(self, port: int, server: Any = None) -> LaunchPlan:
        """Return the same plan with the store served at `port`."""

        def moved(cfg: MultiprocessConfig) -> MultiprocessConfig:
            host = cfg.master_addr or ""
            return replace(
                cfg, master_port=port, init_method=address(host, port), served=True, _server=server
            )

        return replace(self, configs=tuple(moved(cfg) for cfg in self.configs))


def complete(cfg: MultiprocessConfig, facts: Facts, rank_offset: int = 0) -> LaunchPlan:
    """Complete `cfg` for each process that is to run on this host.

    Args:
        cfg: as the script gave it.
        facts: of the host.
        rank_offset: rank of the first process that is started here; added to ``cfg.rank``. Unused if a
            launcher started this process.

    Raises:
        ConfigError: a value breaks a rule, or something is missing that cannot be guessed.
    """
    _check_numbers(cfg, rank_offset)
    env = _environment(facts.environ)
    placed = "RANK" in env and "WORLD_SIZE" in env
    alone = placed or cfg.local_rank is not None or (cfg.rank is not None and cfg.local_world_size is None)
    if placed:
        _check_same(cfg, env)
        first, local_rank = env["RANK"], env.get("LOCAL_RANK", cfg.local_rank or 0)
        world_size = env["WORLD_SIZE"]
        local_size = env.get("LOCAL_WORLD_SIZE", cfg.local_world_size or max(1, local_rank + 1))
    else:
        first, local_rank = _first(cfg, rank_offset), cfg.local_rank or 0
        local_size, world_size = _sizes(cfg, facts, first, alone=alone)
    count = 1 if alone else local_size
    _check_places(first, count, local_rank, local_size, world_size)
    data_parallelism(world_size, cfg.model_parallelism, cfg.pipeline_parallelism)
    backends = _backends(cfg, facts, local_size)
    whole = not alone and first == 0 and count == world_size
    where = _where(cfg, facts.environ, whole=whole or world_size == 1)
    configs = tuple(
        replace(
            cfg,
            rank=first + index,
            local_rank=local_rank + index,
            world_size=world_size,
            local_world_size=local_size,
            **backends,
            **where,
        )
        for index in range(count)
    )
    tcp = str(where["init_method"]).startswith("tcp:")
    port_is_free = where["master_port"] == 0
    binds = (
        tcp and not cfg.served and (port_is_free or (not placed and first == 0 and cfg.local_rank is None))
    )
    elsewhere = tcp and not binds and not placed and first > 0 and cfg.local_rank is None
    return LaunchPlan(configs, placed=placed, binds=binds, elsewhere=elsewhere)


def check_backend(name: str, known: frozenset[str], what: str = "backend") -> str:
    """Return `name` in lower case.

    Args:
        name: "gloo", or one for each kind of device ("cpu:gloo,cuda:nccl").
        known: names that torch can build here.
        what: the field's name, for the message.

    Raises:
        ConfigError: torch knows no such backend, or cannot build it here.
    """
    lowered = name.strip().lower()
    for part in lowered.split(","):
        if part.rpartition(":")[2].strip() not in known:
            raise ConfigError(
                f"{what}={name!r}",
                rule=f"This torch can build {', '.join(sorted(known))}, and what is registered with it",
                next_step='Give one of them, or one for each device, as in "cpu:gloo,cuda:nccl"',
            )
    return lowered


def address(host: str, port: int) -> str:
    """Return "tcp://host:port"; an IPv6 address gets its brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _check_numbers(cfg: MultiprocessConfig, rank_offset: int) -> None:
    for name, least, optional in (
        ("rank", 0, True),
        ("local_rank", 0, True),
        ("world_size", 1, True),
        ("local_world_size", 1, True),
        ("model_parallelism", 1, False),
        ("pipeline_parallelism", 1, False),
        ("rank_offset", 0, False),
    ):
        value = rank_offset if name == "rank_offset" else getattr(cfg, name)
        if value is None and optional:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(
                f"{name}={value!r}", rule=f"It is a whole number, at least {least}", next_step="Correct it"
            )
    _check_port(cfg.master_port, "master_port")
    if cfg.launch_method not in LAUNCH_METHODS:
        raise ConfigError(
            f"launch_method={cfg.launch_method!r}",
            rule="It is spawn or forkserver: torch's threads and CUDA do not live through a fork",
            next_step="Take spawn, which needs nothing; forkserver starts quicker when it has torch "
            "preloaded",
        )
    if isinstance(cfg.grace, bool) or not isinstance(cfg.grace, (int, float)) or not 0 <= cfg.grace < 1e6:
        raise ConfigError(
            f"grace={cfg.grace!r}",
            rule="It is a number of seconds, at least 0",
            next_step="Give one, as in 5",
        )


def _check_port(port: Any, what: str) -> None:
    if port is not None and (isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 65536):
        raise ConfigError(
            f"{what}={port!r}",
            rule="It is a whole number from 1 to 65535; 0 for a free one",
            next_step="Correct it",
        )


def _environment(environ: Mapping[str, str]) -> dict[str, int]:
    found = {}
    for name, least in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1)):
        text = environ.get(name, "").strip()
        if not text:
            continue
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise ConfigError(
                f"{name}={text!r} in the environment",
                rule=f"It is a whole number, at least {least}",
                next_step="Unset it, or start the script with torchrun or m8d-run, which set it",
            )
        found[name] = int(text)
    return found


def _check_same(cfg: MultiprocessConfig, env: Mapping[str, int]) -> None:
    for name in ("rank", "local_rank", "world_size", "local_world_size"):
        value, told = getattr(cfg, name), env.get(name.upper())
        if value is not None and told is not None and value != told:
            raise ConfigError(
                f"{name}={value}, and {name.upper()}={told} in the environment",
                rule="A process that a launcher started has the rank and the sizes that it was given there",
                next_step=f"Leave {name} out, or start the script without RANK and WORLD_SIZE",
            )


def _first(cfg: MultiprocessConfig, rank_offset: int) -> int:
    if cfg.rank is None and cfg.local_rank is not None:
        return cfg.local_rank + rank_offset
    return (cfg.rank or 0) + rank_offset


def _sizes(cfg: MultiprocessConfig, facts: Facts, first: int, *, alone: bool) -> tuple[int, int]:
    """Return how many processes are on this host, and in all."""
    local = cfg.local_world_size
    if local is None:
        if alone:
            local = 1 if cfg.local_rank is None else (cfg.world_size or cfg.local_rank + 1)
        elif first and cfg.world_size is not None:
            raise ConfigError(
                f"world_size={cfg.world_size}, the first rank here is {first}, and local_world_size is not "
                "given",
                rule="On one of several hosts, how many processes are started there must be said",
                next_step="Give local_world_size",
            )
        else:
            local = cfg.world_size or max(1, facts.devices)
    size = cfg.world_size
    if size is None:
        if first and not (alone and cfg.local_rank == first):
            raise ConfigError(
                f"the first rank here is {first}, and world_size is not given",
                rule="Where not all processes are started here, their number must be said",
                next_step="Give world_size",
            )
        size = local
    return local, size


def _check_places(first: int, count: int, local_rank: int, local_size: int, world_size: int) -> None:
    if first + count > world_size:
        what = f"rank={first}" if count == 1 else f"ranks {first} to {first + count - 1}"
        raise ConfigError(
            f"{what}, world_size={world_size}",
            rule=f"Ranks are 0 to {world_size - 1}",
            next_step="Correct world_size, rank or rank_offset",
        )
    if not local_rank < local_size <= world_size:
        raise ConfigError(
            f"local_rank={local_rank}, local_world_size={local_size}, world_size={world_size}",
            rule="local_rank is below local_world_size, which is at most world_size",
            next_step="Correct them",
        )


def _backends(cfg: MultiprocessConfig, facts: Facts, local_size: int) -> dict[str, Any]:
    told = facts.environ.get("TORCH_DISTRIBUTED_BACKEND", "").strip()
    chosen = {"backend": check_backend(cfg.backend or told or facts.default_backend, facts.backends)}
    for kind in ("model", "pipeline", "data"):
        name = f"{kind}_parallel_backend"
        given = getattr(cfg, name)
        chosen[name] = check_backend(given, facts.backends, name) if given is not None else chosen["backend"]
    if "nccl" in chosen["backend"] and local_size > facts.devices:
        raise ConfigError(
            f"backend={chosen['backend']!r}, {local_size} processes on this host, {facts.devices} GPUs",
            rule="NCCL needs a GPU for each process",
            next_step='Take backend="gloo", or fewer processes',
        )
    return dict(chosen)


def _where(cfg: MultiprocessConfig, environ: Mapping[str, str], *, whole: bool) -> dict[str, Any]:
    """Return the address of the store; port 0: one has to be bound."""
    host, port = cfg.master_addr, cfg.master_port or None
    if cfg.init_method is not None and cfg.init_method != "env://":
        parts = _parsed(cfg.init_method)
        if parts is None:
            return {"init_method": cfg.init_method, "master_addr": "", "master_port": 0}
        _check_agrees(cfg, *parts)
        host, port = parts[0], parts[1] or None
    host = host or environ.get("MASTER_ADDR", "").strip() or (_LOOPBACK if whole else None)
    if port is None:
        text = environ.get("MASTER_PORT", "").strip()
        if text and not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
            raise ConfigError(
                f"MASTER_PORT={text!r} in the environment",
                rule="It is a whole number from 1 to 65535",
                next_step="Correct it, or unset it",
            )
        port = int(text) if text else None
    if host is None or (port is None and not whole):
        missing = "master_addr" if host is None else "master_port"
        raise ConfigError(
            f"{missing} is not given, and not all processes are started here",
            rule="Processes that are started in several places must be told where rank 0 is",
            next_step=f"Give {missing}, the same everywhere, or set {missing.upper()}",
        )
    return {"init_method": address(host, port or 0), "master_addr": host, "master_port": port or 0}


def _parsed(init_method: str) -> tuple[str, int] | None:
    """Return host and port of "tcp://host:port"; None for a file."""
    try:
        parts = urlsplit(init_method)
        host, port = parts.hostname or "", parts.port
    except ValueError:  # a port out of range, brackets that do not close
        host, port = "", None
        parts = urlsplit("")
    if parts.scheme == "file" and parts.path.startswith("/") and not parts.netloc:
        return None
    if parts.scheme != "tcp" or not host or port is None:
        raise ConfigError(
            f"init_method={init_method!r}",
            rule='It is "tcp://host:port", "file:///absolute/path" or "env://"',
            next_step="Correct it, or give master_addr and master_port instead",
        )
    return host, port


def _check_agrees(cfg: MultiprocessConfig, host: str, port: int) -> None:
    for name, given, told in (("master_addr", cfg.master_addr, host), ("master_port", cfg.master_port, port)):
        if given and given != told:
            raise ConfigError(
                f"{name}={given!r}, init_method={cfg.init_method!r}",
                rule="Both say where the processes meet: they say the same",
                next_step="Give one of them",
            )
