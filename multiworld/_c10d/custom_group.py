"""Groups with a world of their own that torch.distributed takes anywhere, for `multiworld.integrations`.

Such a group is in torch's own tables, under its name. So torch's functions take it in and outside of
blocks, with another default group or without one, and ``torch.distributed.destroy_process_group(group)``
finds it. It stays there after its world has ended, and its operations go on raising the world's error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch.distributed.distributed_c10d as c10d

from multiworld._c10d.elastic.group import ElasticGroup
from multiworld._c10d.routing.selection import selected
from multiworld._c10d.routing.state import original_world
from multiworld.errors import MultiworldError

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld._c10d.elastic.group import ElasticGeneration
    from multiworld._c10d.monkeypatch import Patches

__all__ = ["CustomGroup", "install"]

_torch: Any = c10d  # its functions for names of groups are not exported


def install(patches: Patches) -> None:
    """Have ``destroy_process_group`` shut these groups down where torch (2.4, 2.6) asks NCCL alone.

    Args:
        patches: records what was replaced.
    """
    shut_down = vars(c10d).get("_shutdown_backend")
    if shut_down is None:
        return

    def shutting_down(group: Any) -> None:
        if isinstance(group, CustomGroup):
            group.shutdown()
        else:
            shut_down(group)

    patches.set(c10d, "_shutdown_backend", shutting_down)


class CustomGroup(ElasticGroup):
    """A ``torch.distributed.ProcessGroup`` that owns a world: see the module.

    Args:
        world: that it owns, joined.
        generation: returns the world's present generation.
        close: leaves the world.

    Attributes:
        world: as given, for `multiworld.World.on_break` and the like.
    """

    def __init__(
        self, world: Any, generation: Callable[[], ElasticGeneration], close: Callable[[], object]
    ) -> None:
        super().__init__(generation)
        self.world = world
        self._name = f"m8d-group:{generation().world}"
        self._close = close

    @property
    def group_name(self) -> str:
        """Its name in torch's tables."""
        return self._name

    def name(self) -> str:
        """Of the backend; "undefined" once the world is over, where torch 2.4 destroys the group and asks."""
        try:
            return str(self._asked("name")())
        except MultiworldError:
            return "undefined"

    def shutdown(self) -> None:
        """Leave the world: the first thing that ``destroy_process_group`` does."""
        self._close()
        _take_out_tag(cast("Any", original_world()), self)  # in another world's block torch does not find it

    abort = shutdown

    def __repr__(self) -> str:
        return f"<CustomGroup of {self.world!r}>"

    def _asked(self, name: str) -> Any:
        return getattr(self.generation().pg, name)  # raises, if it is over

    def enter(self, backend: str) -> None:
        """Put it into torch's tables, in the place of one of the same name, whose world is over.

        Args:
            backend: of the world.
        """
        tables = cast("Any", original_world())
        for before in [each for each, name in list(tables.pg_names.items()) if name == self._name]:
            _take_out(tables, before)
        tag = f"user:{self._name}"
        tables.pg_map[self] = (c10d.Backend(backend), None)
        tables.pg_names[self] = self._name
        tables.pg_group_ranks[self] = {rank: rank for rank in range(self.size())}
        tables.pg_backend_config[self] = str(c10d.BackendConfig(c10d.Backend(backend)))
        tables.pg_to_tag[self] = tag
        tables.tags_to_pg.setdefault(tag, []).append(self)
        with selected(None):  # or the name would end with the world whose block this is
            _torch._register_process_group(self._name, self)


def _take_out(tables: Any, group: Any) -> None:
    """Remove what `CustomGroup.enter` put in."""
    for table in (tables.pg_map, tables.pg_names, tables.pg_group_ranks, tables.pg_backend_config):
        table.pop(group, None)
    _take_out_tag(tables, group)
    tables.pg_to_tag.pop(group, None)
    _torch._unregister_process_group(group.group_name)


def _take_out_tag(tables: Any, group: Any) -> None:
    tables.tags_to_pg.pop(tables.pg_to_tag.get(group, ""), None)
