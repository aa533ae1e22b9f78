"""MultiprocessConfig: ranks, sizes, store, backends and parallelism of a script's processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from multiworld.launch.sizes import data_parallelism

__all__ = ["LAUNCH_METHODS", "MultiprocessConfig"]

LAUNCH_METHODS = ("spawn", "forkserver")
"""Ways to start a process. Not "fork": torch's threads, and CUDA, do not live through it."""


@dataclass(frozen=True)
class MultiprocessConfig:
    """Configuration of a script's processes; fields that are left out are resolved (`resolve`).

    A field wins over the environment that torchrun and m8d-run set (RANK, LOCAL_RANK, WORLD_SIZE,
    LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), the environment over what the host has. With RANK and
    WORLD_SIZE set, this process is one of those that were started already; sizes and ranks given here must
    then be the same.

    Attributes:
        rank: 0 to ``world_size - 1``. Unset: from RANK; else 0. Given without ``local_world_size``, this
            process is that rank. Given with it, it is the first of the ranks that are started here.
        local_rank: 0 to ``local_world_size - 1``. Given: this process is that one, and nothing is started.
        world_size: processes in all. Unset: from WORLD_SIZE; else ``local_world_size``.
        local_world_size: processes on this host. Unset: ``world_size``; else one for each GPU; 1 without
            GPUs.
        master_addr: the host of rank 0. Unset: from MASTER_ADDR; else 127.0.0.1 where all processes are here.
        master_port: of the store there. Unset or 0: from MASTER_PORT; else a free one is bound, and stays
            bound by who bound it (the store is served on that very socket) until the processes have ended.
        init_method: "tcp://host:port" instead of the two, "file:///path", or "env://" for the environment's.
        model_parallelism: ranks that share one layer. Neighbours.
        pipeline_parallelism: stages of the model. What is left of ``world_size`` is data-parallel.
        backend: "gloo", "nccl", "cpu:gloo,cuda:nccl", ... Unset: TORCH_DISTRIBUTED_BACKEND; else the device's
            own (`default_backend`).
        model_parallel_backend, pipeline_parallel_backend, data_parallel_backend: of these groups; unset:
            ``backend``.
        launch_method: "spawn" (default) or "forkserver".
        grace: seconds that processes have to end after SIGTERM when another one failed; then SIGKILL.
        served: whether the store is served already, so that rank 0 must not. Set by `launch_subprocesses`.
    """

    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    local_world_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    init_method: str | None = None
    model_parallelism: int = 1
    pipeline_parallelism: int = 1
    backend: str | None = None
    model_parallel_backend: str | None = None
    pipeline_parallel_backend: str | None = None
    data_parallel_backend: str | None = None
    launch_method: str = "spawn"
    grace: float = 5.0
    served: bool = False
    _server: Any = field(default=None, repr=False, compare=False)  # keeps the port while this config is kept

    @property
    def data_parallelism(self) -> int:
        """How many replicas of the model there are: ``world_size`` divided by the two other parallelisms.

        Raises:
            ConfigError: ``world_size`` is not known yet, or not a multiple.
        """
        return data_parallelism(self.world_size, self.model_parallelism, self.pipeline_parallelism)

    def resolve(self) -> MultiprocessConfig:
        """Return this process's complete configuration; every field is set.

        ``init_method`` becomes "tcp://host:port" or "file:///path" (of a file, ``master_addr`` is "" and
        ``master_port`` 0). Where a port had to be bound, the returned configuration holds it: keep it as long
        as the store is needed.

        Raises:
            ConfigError: a value breaks a rule, or something is missing that cannot be guessed.
            StoreBindError: the address cannot be bound.
        """
        from multiworld.launch.host import resolve

        return resolve(self)

    def __getstate__(self) -> dict[str, Any]:
        # A server is its process's; others know its address.
        return {**self.__dict__, "_server": None}
