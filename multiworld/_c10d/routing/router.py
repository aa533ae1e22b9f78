"""Router: bare calls of `torch.distributed` go to the selected world.

All of torch asks one module global, `torch.distributed.distributed_c10d._world`, at every use. `install` puts
an object there that answers for the world selected in this thread or task (`selection.py`), and with torch's
own state where none is. What torch keeps per process although it belongs to one default group is kept apart
as well: the names in the C++ registry of groups, the C++ global rank, and what `destroy_process_group`
sweeps.

Nothing is changed at import. `uninstall` puts every attribute back, the very objects that were there.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import inspect
import operator
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.distributed_c10d as c10d

from multiworld._c10d import custom_group
from multiworld._c10d.elastic import ddp
from multiworld._c10d.gloo import backend as gloo
from multiworld._c10d.monkeypatch import Patches
from multiworld._c10d.nccl import hooks
from multiworld._c10d.routing import coalescing_block, default_groups, error_hooks, mesh
from multiworld._c10d.routing.ended_groups import refuse
from multiworld._c10d.routing.selection import current, enter, leave, selected, top
from multiworld._c10d.routing.state import (
    GROUP_MAPS,
    OwnMap,
    WorldState,
    living,
    original_world,
    owner_of,
    prepare,
)
from multiworld.errors import RouterError

if TYPE_CHECKING:
    import types
    from collections.abc import Callable

__all__ = [
    "WorldState",
    "current",
    "enter",
    "install",
    "install_nccl",
    "installed",
    "leave",
    "owner_of",
    "selected",
    "uninstall",
]

_lock = threading.RLock()  # a signal's handler that comes in between may fork
# A child has torch with all of what `install` changes, or with none of it.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_patches: Patches | None = None
_nccl = False  # whether the hooks for NCCL are among them
# Names that torch's own default state has in the C++ registry. Guarded by nothing: set operations are atomic.
_own_names: set[str] = set()
_get_rank = inspect.unwrap(c10d.get_rank).__code__
# Up to torch 2.6 these compare the rank in the selected world with one in the world of their group.
_asks_bare = "get_rank" in inspect.unwrap(c10d.broadcast_object_list).__code__.co_names
_tells_whether = inspect.unwrap(c10d.is_initialized).__code__


def installed() -> bool:
    """Whether torch.distributed is routed now."""
    return _patches is not None


def install() -> None:
    """Route torch.distributed. Idempotent, thread-safe; torch's own default group is not disturbed.

    Raises:
        RouterError: this version of torch brings something the router does not know; nothing is changed then.
    """
    global _patches  # noqa: PLW0603  (guarded by _lock)
    with _lock:
        if _patches is not None:
            return
        patches = Patches()
        try:
            _install(patches)
        except BaseException:
            patches.undo()
            raise
        _patches = patches


def install_nccl() -> None:
    """Hook what NCCL worlds need as well, where the router is installed. Idempotent, thread-safe."""
    global _nccl  # noqa: PLW0603  (guarded by _lock)
    with _lock:
        if _patches is not None and not _nccl:
            hooks.install(_patches)
            _nccl = True


def uninstall(check: Callable[[], object] = lambda: None) -> None:
    """Put torch back exactly. Idempotent, thread-safe. Remaining worlds can then only be used by group.

    Args:
        check: called first, while `install` waits, so that a join that it does not see installs again; what
            it raises is raised, and nothing is changed.
    """
    global _patches, _nccl
    with _lock:
        check()
        if _patches is not None:
            _patches.undo()
            _patches, _nccl = None, False
            _own_names.clear()


def _install(patches: Patches) -> None:
    prepare()
    if c10d._world is not original_world():
        raise RouterError(
            "torch.distributed.distributed_c10d._world was replaced by other code",
            rule="multiworld routes torch's own state",
            next_step="Turn off the other tool that replaces _world (torch's threaded test groups do)",
        )
    default_groups.install(patches)
    _own_names.update(original_world().pg_names.values())
    for name, make in (
        ("_process_group_name", _naming),
        ("_get_default_timeout", _limiting),
        ("_register_process_group", _registering),
        ("_unregister_process_group", _unregistering),
        ("_unregister_all_process_groups", _sweeping),
        ("_update_default_pg", _updating),
        ("_get_default_group", _finding_default),
        ("get_group_rank", _ranking),
    ):
        if name not in vars(c10d):
            raise RouterError(
                f"torch {torch.__version__} has no torch.distributed.distributed_c10d.{name}",
                rule="The router replaces it, so that worlds do not mix",
                next_step="Use a version of torch listed in multiworld's compatibility table, or a newer multiworld",
            )
        patches.set(c10d, name, make(vars(c10d)[name]))
    mesh.install(patches)
    ddp.install(patches)  # before the next: it takes a method of torch's groups that the next one wraps
    error_hooks.install(patches)
    gloo.install(patches)
    custom_group.install(patches)
    coalescing_block.install(patches)
    # Last: from here on worlds can be selected.
    patches.set(c10d, "_world", _forwarder_class()())


def _forwarder_class() -> type[c10d._World]:
    """Make the class of the object in place of `_world`: each property of `_World`, of the selected state."""
    original = original_world()
    derived = prepare()

    def default_pg(_self: Any) -> Any:
        state = top()[-1] or current()
        if state is not None and state.ready is not None:
            return state.ready
        if state is not None:
            return state.default_pg
        group = original.default_pg
        return _named_to_the_asker() if group is None else group

    def set_default_pg(_self: Any, group: Any) -> None:
        (current() or original).default_pg = group

    def forwarded(name: str) -> property:
        own = OwnMap(derived[name]) if derived.get(name) in GROUP_MAPS else None
        # Past the property, where there is one: it would do the same.
        read = operator.attrgetter(f"m8d{derived[name]}" if name in derived else name)

        def get(_self: Any) -> Any:
            state = top()[-1] or current()
            if state is not None:
                return read(state)
            return getattr(original, name) if own is None else own

        def put(_self: Any, value: Any) -> None:
            setattr(current() or original, name, value)

        return property(get, put)

    def forward_attribute(_self: Any, name: str) -> Any:
        return getattr(current() or original, name)

    def forward_setting(_self: Any, name: str, value: Any) -> None:
        setattr(current() or original, name, value)

    def forward_deleting(_self: Any, name: str) -> None:
        delattr(current() or original, name)

    members: dict[str, Any] = {
        "__doc__": "Stands for torch's `_world` while multiworld routes torch.distributed.",
        "__module__": __name__,
        # No state of its own: attributes that are no properties are the selected state's as well.
        "__init__": lambda _self: None,
        "__getattr__": forward_attribute,
        "__setattr__": forward_setting,
        "__delattr__": forward_deleting,
    }
    for name, member in vars(c10d._World).items():
        if isinstance(member, property):
            members[name] = forwarded(name)
    members["default_pg"] = property(default_pg, set_default_pg)
    return type("RoutedWorld", (c10d._World,), members)


def _naming(original: Any) -> Any:
    def process_group_name(ranks: Any, use_hashed_name: bool) -> str:
        state = current()
        if state is None:
            return str(original(ranks, use_hashed_name))
        # torch counts names per state, while the C++ registry has one name space per process.
        if not use_hashed_name:
            return f"{state.prefix}{original(ranks, use_hashed_name)}"
        # Of these groups only the members know, so they count them. What torch counts differs between members,
        # and comes again once a group is destroyed, whose addresses are in the store for good.
        state.hashed[tuple(ranks)] += 1
        name = "_".join(map(str, (*ranks, state.hashed[tuple(ranks)])))
        return f"{state.prefix}{hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()}"

    return process_group_name


def _limiting(original: Any) -> Any:
    def get_default_timeout(*args: Any, **kwargs: Any) -> Any:
        """Of what is given no timeout: in a world its own, or of the world whose group it is given."""
        group = error_hooks.local(sys._getframe(1), "group")
        state = (owner_of(group) if isinstance(group, c10d.ProcessGroup) else None) or current()
        if state is None or state.gloo is None:
            return original(*args, **kwargs)
        return dt.timedelta(seconds=state.gloo.timeout)

    return get_default_timeout


def _registering(original: Any) -> Any:
    def register_process_group(name: str, group: Any) -> None:
        original(name, group)
        state = current()
        if state is None:
            _own_names.add(name)
        else:
            state.registered(name)

    return register_process_group


def _unregistering(original: Any) -> Any:
    def unregister_process_group(name: str) -> None:
        original(name)
        _own_names.discard(name)
        for state in living():
            state.unregistered(name)

    return unregister_process_group


def _sweeping(_original: Any) -> Any:
    unregister: Any = torch._C._distributed_c10d._unregister_process_group

    def unregister_all_process_groups() -> None:
        # The original empties the registry for every world of the process, so it is never called.
        state = current()
        if state is None:
            while _own_names:
                unregister(_own_names.pop())
            return
        state.unregister_names()
        if state.on_destroyed is not None:
            state.on_destroyed()

    return unregister_all_process_groups


def _updating(original: Any) -> Any:
    def update_default_pg(group: Any) -> None:
        state = current()
        if state is None:
            original(group)
        else:
            # Not the C++ global rank: that one is of torch's own default group.
            state.default_pg = group

    return update_default_pg


def _finding_default(original: Any) -> Any:
    def get_default_group() -> Any:
        state = top()[-1] or current()
        if _asks_bare:
            state = _home_of_the_askers_group(state)
        if state is not None and state.ready is not None:
            return state.ready
        group = (original_world() if state is None else state).default_pg
        if group is not None:
            return group
        # A call with an explicit group of a world, from where that world is not selected (`get_rank(group)`).
        owner = _explicit_owner()
        return original() if owner is None or owner.group is None else owner.group

    return get_default_group


def _home_of_the_askers_group(state: WorldState | None) -> WorldState | None:
    """Return the state of the group that a function of torch's has that asks for the rank; else `state`."""
    asker = sys._getframe(2)
    caller = asker.f_back
    if asker.f_code is not _get_rank or caller is None or caller.f_globals is not vars(c10d):
        return state
    group = error_hooks.local(caller, "group") if error_hooks.local(asker, "group") is None else None
    if group is None:
        return state
    return owner_of(group) or (None if group in original_world().pg_map else state)


def _explicit_owner() -> WorldState | None:
    frame = sys._getframe(2)
    for _ in range(6):
        group = frame.f_locals.get("group") if frame.f_globals is vars(c10d) else None
        owner = None if group is None else owner_of(group)
        if owner is not None or frame.f_back is None:
            return owner
        frame = frame.f_back
    return None


def _named_to_the_asker() -> Any:
    """Return a world's default group if a function of torch's that has a group of it asks `is_initialized`; else None.

    `torch.distributed.checkpoint.save(process_group=world.group)` outside of the world's block saves as a
    single process if it hears no.
    """
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not _tells_whether:
        if frame.f_globals is not vars(c10d):
            return None
        frame = frame.f_back
    asker = None if frame is None else frame.f_back
    if asker is None or not asker.f_globals.get("__name__", "").startswith("torch."):
        return None  # a function of the program that has such a variable
    group = error_hooks.local(asker, "process_group")
    owner = None if group is None else owner_of(group)
    return None if owner is None else owner.group


def _ranking(original: Any) -> Any:
    def get_group_rank(group: Any, global_rank: int) -> int:
        state = top()[-1]
        if state is not None and group is state.ready:
            return global_rank  # of its default group, as torch says
        if sys._getframe(1).f_code is _get_rank:
            # get_rank(group) looks its rank up by the *selected* default group's rank: wrong for a group of
            # another world. Right in any: the group knows.
            owner = owner_of(group)
            if owner is not current():
                return int(group.rank())
        try:
            return int(original(group, global_rank))
        except ValueError:
            if group not in c10d._world.pg_group_ranks:
                refuse(group)
            raise
        finally:
            del group  # a kept exception has this frame

    return get_group_rank
