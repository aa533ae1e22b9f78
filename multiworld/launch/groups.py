"""The process's group: torch's default one, or a named world, from a configuration."""

from __future__ import annotations

import contextlib
import datetime as dt
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from multiworld._join.block import close_after
from multiworld._join.join import join
from multiworld._join.state import wait_for_all
from multiworld.errors import BrokenWorldException, WorldClosedError
from multiworld.launch.backends import get_distributed_backend, known_backends
from multiworld.launch.errors import ConfigError
from multiworld.launch.fill_in_config import check_backend
from multiworld.launch.host import environment_of, with_environment
from multiworld.registry import registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld.launch.config import MultiprocessConfig
    from multiworld.world import World

__all__ = ["init_and_run", "init_dist", "init_process_group_from_backend"]

T = TypeVar("T")


def init_dist(cfg: MultiprocessConfig, world: str | None = None, timeout: float | None = None) -> Any:
    """Make torch's default group, or join a named world, with the ranks of `cfg`; selects the GPU for NCCL.

    Args:
        cfg: resolved here where it is not yet.
        world: name of a world to join at the configuration's store; None: torch's default group.
        timeout: seconds, to come together and for each operation; None: torch's, or M8D_JOIN_TIMEOUT for a
            world.

    Returns:
        The `multiworld.World`, or the default ``ProcessGroup``.

    Raises:
        ConfigError: a value breaks a rule, or torch's default group is there already.
        JoinError: the world could not be joined, see `multiworld.join`.
        RuntimeError: torch's, when its group could not be made.
    """
    cfg = cfg.resolve()
    device = _gpu_of(cfg)
    with with_environment(environment_of(cfg) if cfg.served else {}):
        made = init_process_group_from_backend(
            cfg.backend,
            rank=cfg.rank or 0,
            world_size=cfg.world_size or 1,
            init_method=cfg.init_method,
            world=world,
            timeout=timeout,
            device=device,
        )
    if cfg._server is not None:  # noqa: SLF001  (a configuration of this package)
        weakref.finalize(made, _let_go, cfg._server)  # noqa: SLF001  (the group needs its store)
    return made


def init_process_group_from_backend(
    backend: str | None = None,
    *,
    rank: int,
    world_size: int,
    init_method: str | None = None,
    store: Any = None,
    world: str | None = None,
    timeout: float | None = None,
    device: Any = None,
) -> Any:
    """Make torch's default group, or join a named world, on a backend.

    Args:
        backend: None: `get_distributed_backend`.
        rank: of this process.
        world_size: number of processes.
        init_method: "tcp://host:port" or "file:///path"; None with `store`, or for the environment's address.
        store: a ``torch.distributed.Store`` in its stead.
        world: name of a world to join; None: torch's default group.
        timeout: seconds; None: torch's own, or M8D_JOIN_TIMEOUT for a world.
        device: of this member of a world ("cuda:0").

    Returns:
        The `multiworld.World`, or the default ``ProcessGroup``.

    Raises:
        ConfigError: torch cannot build the backend here, or its default group is there already.
        JoinError: the world could not be joined.
        RuntimeError: torch's, when its group could not be made.
    """
    import torch.distributed as dist

    chosen = get_distributed_backend() if backend is None else check_backend(backend, known_backends())
    if world is not None:
        place = store if store is not None else init_method
        return join(world, rank, world_size, place, chosen, timeout, device=device)
    if dist.is_initialized():
        raise ConfigError(
            "torch's default process group is there already",
            rule="A process has one at most",
            next_step="Destroy it first (torch.distributed.destroy_process_group()), or give a world's name",
        )
    limit: dict[str, Any] = {} if timeout is None else {"timeout": dt.timedelta(seconds=timeout)}
    where: dict[str, Any] = {"store": store} if store is not None else {"init_method": init_method}
    dist.init_process_group(chosen, rank=rank, world_size=world_size, **where, **limit)
    return dist.group.WORLD


def init_and_run(
    func: Callable[..., T],
    cfg: MultiprocessConfig,
    *args: Any,
    world: str | None = None,
    timeout: float | None = None,
    **kwargs: Any,
) -> T:
    """`init_dist`, then ``func(cfg, *args, **kwargs)``, then leave in good order.

    With a `world`, the function runs inside ``with world:``, so that ``torch.distributed`` means it;
    ``multiworld.worlds()[name]`` is its handle. With an exception the group is left at once, without waiting
    for the others; those of a world get cause ``failed``, with its type.

    Args:
        func: called with the complete configuration first.
        cfg: as for `init_dist`.
        *args: for `func`.
        world: as for `init_dist`.
        timeout: as for `init_dist`.
        **kwargs: for `func`.

    Returns:
        What `func` returned.
    """
    import torch.distributed as dist

    from multiworld._c10d import default_group

    cfg = cfg.resolve()
    made = init_dist(cfg, world, timeout)
    if world is not None:
        return _run_in(made, func, cfg, args, kwargs)
    try:
        result = func(cfg, *args, **kwargs)
        if dist.is_initialized():
            dist.barrier()  # a rank that leaves early takes the store, or a connection, from the others
    finally:
        del made
        if dist.is_initialized():
            registry.hook()  # for the thread that frees what others hold
            default_group.destroy()
    return result


def _run_in(
    world: World, func: Callable[..., T], cfg: MultiprocessConfig, args: Any, kwargs: dict[str, Any]
) -> T:
    ended_by: BaseException | None = None
    try:
        with world:
            result = func(cfg, *args, **kwargs)
        # Where the others were quicker, or `func` closed it, it has done its work.
        with contextlib.suppress(BrokenWorldException, WorldClosedError):
            wait_for_all(world)  # a member that leaves early breaks the world for the others
    except BaseException as error:
        ended_by = error
        raise
    else:
        return result
    finally:
        close_after(world, ended_by, "function")
        del ended_by  # else this frame and the exception hold each other


def _gpu_of(cfg: MultiprocessConfig) -> str | None:
    """Select and return this process's GPU; None for a backend without."""
    if "nccl" not in (cfg.backend or ""):
        return None
    import torch

    index = (cfg.local_rank or 0) % max(1, torch.cuda.device_count())
    torch.cuda.set_device(index)
    return f"cuda:{index}"


def _let_go(_server: object) -> None:
    """Nothing: that it was kept until now is what was wanted."""
