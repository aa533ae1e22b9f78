"""Sizes of the parallel dimensions. Pure."""

from __future__ import annotations

from multiworld.launch.errors import ConfigError

__all__ = ["data_parallelism"]


def data_parallelism(world_size: int | None, model: int, pipeline: int) -> int:
    """Return the size of the data-parallel dimension.

    Raises:
        ConfigError: `world_size` is unknown, or not a multiple of the two others.
    """
    if world_size is None:
        raise ConfigError(
            "world_size is not known yet", rule="Sizes are known after resolve()", next_step="Call it first"
        )
    if world_size % (model * pipeline):
        raise ConfigError(
            f"world_size={world_size}, model_parallelism={model}, pipeline_parallelism={pipeline}",
            rule=f"world_size is a multiple of {model} * {pipeline} = {model * pipeline}",
            next_step="Change one of the three",
        )
    return world_size // (model * pipeline)
