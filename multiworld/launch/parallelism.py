"""Model-, pipeline- and data-parallel groups of a group of processes, on a device mesh."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from multiworld.launch.alltoall import _world
from multiworld.launch.sizes import data_parallelism

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from multiworld.launch.config import MultiprocessConfig
    from multiworld.world import World

__all__ = ["DIMENSIONS", "Dimension", "Parallelism", "groups_along", "init_parallelism"]

DIMENSIONS = ("pipeline", "data", "model")
"""Of the mesh, slowest first: model-parallel ranks are neighbours, pipeline stages are far apart."""


@dataclass(frozen=True)
class Dimension:
    """This process's place in one of its groups.

    Attributes:
        rank: in the group, 0 to ``size - 1``.
        size: of the group.
        group: the ``ProcessGroup``.
        ranks: of the group's members, in the whole, ascending.
    """

    rank: int
    size: int
    group: Any
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Parallelism:
    """This process's groups.

    Attributes:
        pipeline: one rank for each stage of the model.
        data: ranks with the same part of the model and other data.
        model: ranks that share a stage.
        mesh: of the dimensions "pipeline", "data", "model", in this order.
    """

    pipeline: Dimension
    data: Dimension
    model: Dimension
    mesh: DeviceMesh


def groups_along(dimension: str, *, pipeline: int, data: int, model: int) -> list[tuple[int, ...]]:
    """Return the ranks of each group along "pipeline", "data" or "model", in the mesh's order."""
    sizes = {"pipeline": pipeline, "data": data, "model": model}
    strides = {"pipeline": data * model, "data": model, "model": 1}
    others = [name for name in DIMENSIONS if name != dimension]
    return [
        tuple(
            a * strides[others[0]] + b * strides[others[1]] + index * strides[dimension]
            for index in range(sizes[dimension])
        )
        for a in range(sizes[others[0]])
        for b in range(sizes[others[1]])
    ]


def init_parallelism(cfg: MultiprocessConfig, world: World | str | None = None) -> Parallelism:
    """Divide the default group, or a world, into model-, pipeline- and data-parallel groups, on every rank.

    Rank ``(p * data + d) * model + m`` is part ``m`` of stage ``p`` in replica ``d``. The groups have the
    backends that `cfg` names for them; what it leaves out is the whole group's own.

    Args:
        cfg: ``model_parallelism``, ``pipeline_parallelism`` and the backends are used.
        world: a world or its name; None: the one that ``with`` selected, else torch's default group.

    Returns:
        This process's groups. They belong to the world's generation: make them again after a rejoin.

    Raises:
        ConfigError: the number of ranks is not a multiple of the two.
        UnknownWorldError: no world of that name here.
        BrokenWorldException: the world broke meanwhile.
        RuntimeError: torch's, where there is no default group.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    made = _world(world)
    with made if made is not None else contextlib.nullcontext():
        rank, size = dist.get_rank(), dist.get_world_size()
        own = str(dist.get_backend())
        sizes = {
            "pipeline": cfg.pipeline_parallelism,
            "data": data_parallelism(size, cfg.model_parallelism, cfg.pipeline_parallelism),
            "model": cfg.model_parallelism,
        }
        found: dict[str, Dimension] = {}
        for name in DIMENSIONS:
            backend = getattr(cfg, f"{name}_parallel_backend") or cfg.backend or own
            for ranks in groups_along(name, **sizes):
                # All ranks make all groups, in the same order: torch asks for that.
                group = (
                    dist.group.WORLD
                    if len(ranks) == size and backend == own
                    else dist.new_group(list(ranks), backend=backend)
                )
                if rank in ranks:
                    found[name] = Dimension(ranks.index(rank), len(ranks), group, ranks)
        mesh = DeviceMesh.from_group(
            [found[name].group for name in DIMENSIONS],
            "cuda" if "nccl" in own else "cpu",
            mesh=torch.arange(size, dtype=torch.int).reshape([sizes[name] for name in DIMENSIONS]),
            mesh_dim_names=DIMENSIONS,
        )
    return Parallelism(found["pipeline"], found["data"], found["model"], mesh)
