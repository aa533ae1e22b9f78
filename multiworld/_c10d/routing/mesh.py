"""Device meshes belong to the world they are made in.

DTensor's sharding cache, among others, keys on the equality of meshes: shape, ranks, device type and a field
called ``_thread_id``, which torch uses to tell apart the ranks of its threaded test groups. Two worlds of the
same size would share cache entries, and with them process groups. So ``_thread_id`` of a mesh made in a world
becomes the world's token: a number that is the same in every process, so that meshes survive pickling as they
do in torch.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch.distributed import device_mesh

from multiworld._c10d.routing.ended_groups import Departed, as_torch_says
from multiworld._c10d.routing.selection import current, selected, unasked
from multiworld._c10d.routing.state import WorldState, original_world, owner_of, with_token
from multiworld.errors import RouterError

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiworld._c10d.monkeypatch import Patches

__all__ = ["install", "world_of"]

# What a mesh does with its own groups must mean its own world, wherever it is called.
_OF_THE_MESH = ("__getitem__", "_flatten", "_unflatten", "get_rank", "get_local_rank", "_get_all_submeshes")
# Asked for at every operation of a DTensor, and right without help where meshes know their groups by name.
_BY_TAG = ("get_group", "get_all_groups")
_FIELD = "_thread_id"
_MINE = "_m8d_token"
_RANK = "_m8d_rank"  # of this process in the mesh's world
_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling


def world_of(mesh: Any) -> WorldState | None:
    """Return the living world that `mesh` was made in; None for torch's own, and for worlds that are gone."""
    token = vars(mesh).get(_MINE)
    return None if token is None else with_token(token)


def install(patches: Patches) -> None:
    """Mark the meshes made from now on.

    Args:
        patches: records what was replaced.

    Raises:
        RouterError: meshes of this torch do not compare by the field that is used.
    """
    mesh_class = device_mesh.DeviceMesh
    for name in ("__eq__", "__hash__"):
        if not _reads_field(mesh_class, name):
            raise RouterError(
                f"torch {torch.__version__}: DeviceMesh.{name} does not use {_FIELD}",
                rule="Meshes of two worlds must differ, and multiworld tells them apart by that field",
                next_step="Use a torch of multiworld's compatibility table, or a newer multiworld",
            )
    patches.set(mesh_class, "__init__", _marking(mesh_class.__init__))
    if "__setstate__" in vars(mesh_class):
        patches.set(mesh_class, "__setstate__", _restoring(vars(mesh_class)["__setstate__"]))
    for name in (*_OF_THE_MESH, *_BY_TAG):
        if name in vars(mesh_class) and (name not in _BY_TAG or _searches(vars(mesh_class)[name])):
            original = vars(mesh_class)[name]
            patches.set(mesh_class, name, _at_home(original, by_rank=name == "get_rank"))
    ranks = vars(mesh_class).get("mesh")
    # Of a sub-mesh, the row that this process is in. Older versions keep it in the mesh.
    if isinstance(ranks, property):
        patches.set(mesh_class, "mesh", property(_at_home(ranks.fget, by_rank=True), doc=ranks.__doc__))
    patches.set(mesh_class, "from_group", staticmethod(_from_group(vars(mesh_class)["from_group"])))


def _reads_field(mesh_class: type, name: str) -> bool:
    names = set(vars(mesh_class)[name].__code__.co_names)
    if "_hash_key" in names:
        names |= set(vars(mesh_class)["_hash_key"].__code__.co_names)
    return _FIELD in names


def _searches(method: Any) -> bool:
    # Versions up to 2.6 look a mesh's group up among those of the selected state.
    return "_find_pg_by_ranks_and_tag" in method.__code__.co_names


def _marking(original: Any) -> Any:
    of_a_root = _at_home(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        root = kwargs.get("_root_mesh")
        state = current()
        token = (None if state is None else state.token) if root is None else vars(root).get(_MINE)
        if token is not None:
            vars(self)[_MINE] = token
        (original if root is None else of_a_root)(self, *args, **kwargs)
        if token is None:
            return
        vars(self)[_RANK] = c10d.get_rank() if root is None else vars(root).get(_RANK)
        before = getattr(self, _FIELD)
        # torch 2.4 tells the meshes of two threads apart; so they stay, within a world.
        setattr(self, _FIELD, token if before is None else hash((before, token)))
        if getattr(self, "_hash", None):
            self._hash = None
        _note(self)

    return init


def _restoring(original: Any) -> Any:
    @functools.wraps(original)
    def setstate(self: Any, *args: Any, **kwargs: Any) -> None:
        # A copy, or one that is loaded, looks for its groups by name, and does without what it does not find.
        with as_torch_says():
            original(self, *args, **kwargs)
        _note(self)

    return setstate


def _note(mesh: Any) -> None:
    state = world_of(mesh)
    if state is not None:
        state.meshes[id(mesh)] = mesh


def _at_home(original: Any, *, by_rank: bool = False) -> Any:
    """Wrap `original`, a method of a mesh; `by_rank`, it needs no more of its world than the rank in it."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _MINE not in vars(self):
            if _compiling() or unasked() is None or not _has_own():
                return original(self, *args, **kwargs)
            with selected(None):
                return original(self, *args, **kwargs)
        state: Any = world_of(self)
        if state is None and by_rank and (rank := vars(self).get(_RANK)) is not None:
            state = _Gone(rank)
        if state is None or state is current():
            return original(self, *args, **kwargs)
        with selected(state):
            return original(self, *args, **kwargs)

    return method


class _Gone:
    """Stands for a world that is gone while torch asks which rank this process has."""

    ready = None

    def __init__(self, rank: int) -> None:
        self.default_pg = Departed(rank, 0, "", "")


def _has_own() -> bool:
    # Else a mesh without a world was loaded, and means the world that it is loaded in.
    return original_world().default_pg is not None


def _from_group(descriptor: Any) -> Any:
    original = descriptor.__func__

    @functools.wraps(original)
    def from_group(group: Any, *args: Any, **kwargs: Any) -> Any:
        first = group[0] if isinstance(group, (list, tuple)) and group else group
        owner = owner_of(first)
        own = owner is None and first in original_world().pg_map
        if owner is current() or not (owner or own):
            return original(group, *args, **kwargs)
        with selected(owner):
            return original(group, *args, **kwargs)

    return from_group
