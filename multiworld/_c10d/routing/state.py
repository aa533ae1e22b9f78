"""World state: torch's `_World` for one world and generation.

`torch.distributed.distributed_c10d._World` keeps some of its state in globals of its module. `WorldState`, a
`_World`, keeps all of it in the object. Which properties read globals differs between versions and is read
from the getters' code (`derive`). An unknown global is an error: all worlds would share it silently.
"""

from __future__ import annotations

import contextlib
import dis
import hashlib
import inspect
import itertools
import operator
import os
import sys
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.distributed_c10d as c10d

from multiworld._c10d.routing.ended_groups import QUESTIONS, Departed, facts, facts_before, remember
from multiworld._c10d.routing.stack import entering
from multiworld.errors import RouterError, WorldClosedError

if TYPE_CHECKING:
    from multiworld._c10d.nccl.inflight import Traffic
    from multiworld._c10d.routing.state_types import (
        GlooGroups,
        LaneChannels,
        LaneCollectives,
        LogsCalls,
        MakesGroup,
        Translates,
    )

__all__ = [
    "GROUP_MAPS",
    "OwnMap",
    "StandIn",
    "WorldState",
    "derive",
    "living",
    "original_world",
    "owner_of",
    "owner_of_name",
    "prepare",
    "with_token",
]

# Module globals that `_World`'s properties may read, and what a fresh world has there.
_KNOWN: dict[str, Callable[[], Any]] = {"_tags_to_pg": dict, "_group_count": int}

GROUP_MAPS = frozenset({"_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_pg_to_tag"})
"""Those that map a process group to something: a look-up may be answered by the world that owns the group."""

_OWNING = "_pg_map"
"""The one of them whose groups are a world's own."""

_BY_TAG = "_tags_to_pg"
"""Torch finds a group by its ranks in here, without asking for the default group."""

_MISSING = object()
# torch passes a plain str, contrary to its annotations.
_unregister: Any = torch._C._distributed_c10d._unregister_process_group
_serials = itertools.count(1)
_lock = threading.Lock()
_tokens: dict[int, WorldState] = {}
_derived: dict[str, str] = {}
# By process group, of those in some living world's `pg_map`; kept by the maps themselves.
_owners: dict[Any, WorldState] = {}
# torch's own `_World` object: what `_world` is outside worlds, installed or not.
_original: c10d._World = c10d._world
# Functions that must learn what others may not; by code, because decorated copies are spread over torch.
_tells_whether = inspect.unwrap(c10d.is_initialized).__code__
_makes_default = inspect.unwrap(c10d.init_process_group).__code__
_destroyers = frozenset(
    inspect.unwrap(getattr(c10d, name)).__code__
    for name in ("destroy_process_group", "_abort_process_group")
    if hasattr(c10d, name)
)


class _Living:
    states: tuple[WorldState, ...] = ()  # replaced as a whole under the lock, read without it


def original_world() -> c10d._World:
    """Return torch's own state, used outside worlds."""
    return _original


def living() -> tuple[WorldState, ...]:
    """Return the states that are not forgotten yet."""
    return _Living.states


def with_token(token: int) -> WorldState | None:
    """Return the living world that has this `WorldState.token`, if any."""
    return _tokens.get(token)


def owner_of(group: Any) -> WorldState | None:
    """Return the living world that made `group`; None where it is torch's own, or of no state."""
    # Asked at operations: so it must not look through all worlds.
    owner = _owners.get(group)
    return group.state() if owner is None and isinstance(group, StandIn) else owner


def owner_of_name(name: str) -> WorldState | None:
    """Return the living world that has a group of this name in torch's C++ registry; None where none has."""
    return next((state for state in _Living.states if name in state._names), None)


class StandIn:
    """A process group that torch has not made: torch's questions about it are answered for another one."""

    def state(self) -> WorldState:
        """Return the state whose default group is meant now."""
        raise NotImplementedError


def derive(world_class: type = c10d._World, module: types.ModuleType = c10d) -> dict[str, str]:
    """Find the properties of `world_class` whose value lives in a global of `module`.

    Returns:
        The module global's name by the property's.

    Raises:
        RouterError: some code of the class uses module data that is not known here, or holds data in the
            class.
    """
    found: dict[str, str] = {}
    for name, member in vars(world_class).items():
        if name.startswith("__") and not inspect.isfunction(member):
            continue
        functions = _functions(member)
        if not functions:
            raise _unknown(f"_World.{name} is data of the class, shared by all worlds")
        for function in functions:
            for used in _globals_used(function.__code__):
                if not _is_data(vars(module).get(used, len)):
                    continue
                if used not in _KNOWN and used not in GROUP_MAPS:
                    raise _unknown(f"_World.{name} uses the module global {used}")
                found[name] = used
    return found


def _unknown(value: str) -> RouterError:
    return RouterError(
        f"torch {torch.__version__}: {value}",
        rule="multiworld must give each world its own copy of what _World holds, and does not know this one",
        next_step="Use a version of torch listed in multiworld's compatibility table, or a newer multiworld",
    )


def _functions(member: Any) -> list[types.FunctionType]:
    if isinstance(member, property):
        candidates = [member.fget, member.fset, member.fdel]
    elif isinstance(member, (staticmethod, classmethod)):
        candidates = [member.__func__]
    else:
        candidates = [member]
    return [each for each in candidates if isinstance(each, types.FunctionType)]


def _globals_used(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"}:
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_used(constant)


def _is_data(value: object) -> bool:
    return not callable(value) and not isinstance(value, types.ModuleType)


def prepare() -> dict[str, str]:
    """Give `WorldState` its own copy of each property that lives in module globals. Idempotent.

    Returns:
        As `derive`.

    Raises:
        RouterError: as `derive`.
    """
    if not _derived:
        found = derive()
        for name, source in found.items():
            setattr(WorldState, name, _own_property(source))
        _derived.update(found)
    return _derived


def _own_property(source: str) -> property:
    attribute = f"m8d{source}"

    def put(self: WorldState, value: Any) -> None:
        setattr(self, attribute, value)

    # attrgetter stays in C: these are read several times per call of torch.distributed.
    return property(operator.attrgetter(attribute), put)


class WorldState(c10d._World):
    """Torch's distributed state for one generation of one world.

    Args:
        name: of the world.
        generation: of the world, 1 or more.

    Attributes:
        enter: selects it, until `multiworld._c10d.routing.selection.leave`.
        ready: its default group, as long as there is one and the world is not broken; else None.
        prefix: what the names of this world's groups begin with in torch's C++ registry, one per process.
        serial: 1 or more, of this object alone in this process.
        token: a negative number that is the same for this name and generation in every process (`mesh.py`).
        forgotten: whether `forget` was called: it takes no group any more.
        translate: ``(state, error, sure=True) -> exception to raise instead, or None``; set by the world.
        on_destroyed: called when user code destroyed the world's default group.
        gloo: a `multiworld._c10d.gloo.backend.GlooWorld`, of a world that has been built.
        lane: what sends messages of its groups over the lane; None where they go through gloo.
        collectives: the same of collectives; None where all are the backends'.
        operations: the log of calls that torch carries; None before the world is made.
        traffic: a `multiworld._c10d.nccl.inflight.Traffic` where the world has NCCL.
        hashed: by ranks, how many groups were made that only their members know of.
        compiler_groups: see `multiworld._c10d.routing.one_per_world`.
        checkpoints: see `multiworld._c10d.routing.checkpoints`.
        meshes: those made in this world that are still held, by identity: equal ones are several.

    Raises:
        RouterError: this torch's `_World` brings something unknown.
    """

    def __init__(self, *, name: str, generation: int) -> None:
        derived = prepare()
        super().__init__()
        self.name = name
        self.generation = generation
        self.prefix = f"m8d:{name}:{generation}:"
        self.serial = next(_serials)
        self.token = -1 - int.from_bytes(hashlib.sha256(self.prefix.encode()).digest()[:7], "big")
        self.translate: Translates | None = None
        self.on_destroyed: Callable[[], None] | None = None
        self.gloo: GlooGroups | None = None
        self.lane: LaneChannels | None = None
        self.collectives: LaneCollectives | None = None
        self.operations: LogsCalls | None = None
        # Operations of several steps that go on, and what waits for those that a call must not come between.
        self.taken: Sequence[object] = ()
        self.before: Callable[[str, Sequence[Any], Mapping[str, Any]], None] = _at_once
        self.traffic: Traffic | None = None
        self.hashed: Counter[tuple[int, ...]] = Counter()
        self.compiler_groups: dict[str, Any] = {}
        self.checkpoints: dict[str, Any] = {}
        self.meshes: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.enter = entering(self)
        self.ready: Any = None
        self._late: MakesGroup | None = None
        self._departed: Departed | None = None
        self._make_error: Callable[[], Exception] | None = None
        self.forgotten = False
        # Of the groups in the C++ registry. A dict, for its order.
        self._names: dict[str, None] = {}
        for source in derived.values():
            setattr(self, f"m8d{source}", self._fresh(source))
        with _lock:
            _Living.states = (*_Living.states, self)
            _tokens.setdefault(self.token, self)

    def _fresh(self, source: str) -> Any:
        if source == _OWNING:
            return _OwningMap(source, self)
        if source == _BY_TAG:
            return _TagMap(self)
        return _RoutedMap(source) if source in GROUP_MAPS else _KNOWN[source]()

    def __repr__(self) -> str:
        return f"<WorldState {self.name}/{self.generation}>"

    @property
    def default_pg(self) -> Any:
        """The world's default group, as bare calls of torch.distributed ask for it.

        Raises:
            Exception: what `break_` was given, once the world is broken; not for `ended_groups.QUESTIONS`.
            WorldClosedError: `init_process_group` asks, in a world without a default group.
        """
        group = self._default_pg
        if group is None or self._make_error is not None:
            return self._unusual(self._departed if group is None else group)
        return group

    @default_pg.setter
    def default_pg(self, group: Any) -> None:
        self._default_pg = group
        self._late = None
        # Destroyed by the user, it is not initialized any more; closed by `forget`, it remembers.
        self._departed = None
        self.ready = group if self._make_error is None else None

    def expect(self, late: MakesGroup, backend: str, rank: int, size: int) -> None:
        """Have the default group made when an operation asks for it; questions are answered without it.

        Args:
            late: makes it, and sets `default_pg`.
            backend: of the group.
            rank: of this process in it.
            size: of it.
        """
        name = f"{self.prefix}unmade"
        self._late, self._departed = late, Departed(rank, size, backend, name)
        known = facts_before(backend, size, name)
        for each in vars(self).values():
            if isinstance(each, _RoutedMap) and each.source in known:
                each.gone = {name: known[each.source]}

    def make_late(self) -> None:
        """Have the default group made, if it is to be made when it is asked for.

        Raises:
            Exception: what `break_` was given, if the world broke before.
        """
        late = self._late
        if late is not None and not late.makes_here():
            if self._make_error is None:
                late.made()
            if self._make_error is not None:
                raise self._make_error()

    @property
    def group(self) -> Any:
        """The world's default group or None; never raises."""
        return self._default_pg

    def hold(self, group: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Wait in a call that would come between the steps of another one; only the default group has such.

        Args:
            group: whose method is called.
            name: of the method.
            args: as given.
            kwargs: as given.

        Raises:
            RuntimeError: that one cannot go on while this thread waits.
        """
        if group is self.group:
            self.before(name, args, kwargs)

    @property
    def broken(self) -> bool:
        """Whether `break_` was called."""
        return self._make_error is not None

    def _unusual(self, group: Any) -> Any:
        frame, late = _asker(), self._late
        asker = None if frame is None else frame.f_code
        if late is not None and late.makes_here():
            return None  # as torch has it while it makes one
        # Queries are no operations, and programs clean up by destroying: both must work in a broken world.
        if asker in QUESTIONS or asker in _destroyers or self._is_compared(frame):
            return group
        if late is not None and self._make_error is None:
            made = group if asker is _makes_default else late.made()
            if made is not None:
                return made
        if self._make_error is not None or asker is _makes_default:
            raise self.over("init_process_group() was called")
        return None

    def over(self, what: str = "A group was made") -> Exception:
        """Return a fresh exception of a call in this world, which is over.

        Args:
            what: was called, where `break_` did not say how the world ended.
        """
        if self._make_error is not None:
            return self._make_error()
        return WorldClosedError(
            self.name,
            f"{what} inside world {self.name!r}, whose default group is gone",
            rule="A world's default group is made by its join, and only by that",
            next_step="Leave the `with` block, or join the world again",
        )

    def _is_compared(self, frame: types.FrameType | None) -> bool:
        """Whether torch, given another group by name, compares it with this world's default one."""
        if frame is None or frame.f_globals is not vars(c10d):
            return False
        given = frame.f_locals.get("group")
        owner = owner_of(given)
        # An elastic group is of this world also where the world has gone on and this block has not.
        return given is not None and (owner is None or owner.name != self.name)

    def break_(self, make_error: Callable[[], Exception]) -> None:
        """Let every later bare call of torch.distributed in this world raise.

        Args:
            make_error: makes a fresh exception per call.
        """
        self._make_error = make_error
        self.ready = None

    def owns(self, group: Any) -> bool:
        """Whether `group` was made in this world and not destroyed yet."""
        return dict.__contains__(self.pg_map, group)

    def names(self) -> tuple[str, ...]:
        """Return the names this world has in torch's C++ registry, oldest first."""
        return tuple(self._names)

    def registered(self, name: str) -> None:
        """Note that `name` is in the C++ registry for this world."""
        self._names[name] = None

    def unregistered(self, name: str) -> None:
        """Note that `name` left the C++ registry."""
        if name in self._names:
            del self._names[name]
            if self.lane is not None:
                self.lane.ended(name)

    def unregister_names(self) -> None:
        """Take this world's names, and only those, out of the C++ registry."""
        while self._names:
            name, _ = self._names.popitem()
            # Missing is fine: a user, or torch's own reset, may have unregistered it.
            with contextlib.suppress(RuntimeError):
                _unregister(name)

    def forget(self) -> None:
        """Remove every entry by which torch finds this world, and this object's references to its groups.

        Hold the backend objects before, drop the groups after, and the backends last. Idempotent.
        """
        self.taken, self.before = (), _at_once  # the world's, which goes on
        self.forgotten = True
        with _lock:
            _Living.states = tuple(state for state in _Living.states if state is not self)
            if _tokens.get(self.token) is self:
                del _tokens[self.token]
        if self._make_error is not None:
            # Before the names go: who does not find one asks for the error.
            remember(tuple(self.pg_map), self.prefix, self._make_error)
        self.unregister_names()
        for state in (_original, *_Living.states):
            # Up to torch 2.5: of each group that objects were sent with, in the state that was selected then.
            devices: dict[Any, Any] = getattr(state, "pg_default_device", {})
            for noted in tuple(self.pg_map):
                devices.pop(noted, None)
        for reference in self.meshes.valuerefs():
            # From torch 2.12 on a mesh holds its groups, and the caches of DTensor hold meshes for good.
            registry = getattr(reference(), "_pg_registry", None)
            if registry is not None:
                registry.clear()
        group, self._default_pg, self.ready, self._late = self._default_pg, None, None, None
        maps = [each for each in vars(self).values() if isinstance(each, _RoutedMap)]
        if group is not None:
            names = dict(self.pg_names)
            self._departed = Departed.of(group, str(names.get(group, "")))
            remembered = [facts(each, names) for each in maps]
            del group, names
        else:
            remembered = [each.gone for each in maps]
        for held in list(vars(self).values()):
            if isinstance(held, (dict, list, set)):
                held.clear()
        for each, known in zip(maps, remembered, strict=True):
            each.gone = known


def _at_once(_name: str, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> None:
    """No operation is waited for."""


def _asker() -> types.FrameType | None:
    """Return the frame that asks for the default group, seen through the router and ``GroupMember.WORLD``."""
    frame: types.FrameType | None = sys._getframe(3)
    while frame is not None and (
        frame.f_globals.get("__name__", "").startswith("multiworld._c10d.")
        or frame.f_code.co_name == "WORLD"
        or (frame.f_code is _tells_whether and frame.f_back is not None and _is_default_group(frame.f_back))
    ):
        frame = frame.f_back
    return frame


def _is_default_group(frame: types.FrameType) -> bool:
    return frame.f_code.co_name == "_get_default_group"


def _elsewhere(source: str, group: Any) -> Any:
    """Return what another state's map holds for `group`, or `_MISSING`."""
    if isinstance(group, StandIn):
        group = group.state().group
    owner = _owners.get(group)
    for state in _Living.states if owner is None else (owner, *_Living.states):
        found = dict.get(getattr(state, f"m8d{source}", {}), group, _MISSING)
        if found is not _MISSING:
            return found
    return vars(c10d)[source].get(group, _MISSING)


class _RoutedMap(dict[Any, Any]):
    """A world's map by process group. What it does not hold is answered by the state that does.

    So a group passed explicitly means itself in every world. Iteration, length and changes are of this
    world alone. `gone` is what it held of groups that are gone with the world, by their names.
    """

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.gone: dict[str, Any] = {}

    def _further(self, group: Any) -> Any:
        found = _elsewhere(self.source, group)
        return self.gone.get(getattr(group, "group_name", ""), _MISSING) if found is _MISSING else found

    def __missing__(self, group: Any) -> Any:
        found = self._further(group)
        if found is _MISSING:
            raise KeyError(group)
        return found

    def __contains__(self, group: object) -> bool:
        return dict.__contains__(self, group) or self._further(group) is not _MISSING

    def get(self, group: Any, default: Any = None) -> Any:
        found = dict.get(self, group, _MISSING)
        if found is _MISSING:
            if sys._getframe(1).f_code not in _destroyers or isinstance(group, Departed):
                found = self._further(group)
            elif isinstance(group, StandIn):
                found = vars(c10d)[self.source].get(group, _MISSING)
        return default if found is _MISSING else found

    def __delitem__(self, group: Any) -> None:
        # One that stands in torch's own tables is destroyed in any world.
        if isinstance(group, StandIn) and not dict.__contains__(self, group):
            del vars(c10d)[self.source][group]
        else:
            super().__delitem__(group)


class _OwningMap(_RoutedMap):
    """The map that says which groups a world made: `owner_of` reads it the other way round."""

    def __init__(self, source: str, state: WorldState) -> None:
        super().__init__(source)
        self._state = state

    def __setitem__(self, group: Any, value: Any) -> None:
        super().__setitem__(group, value)
        _owners[group] = self._state
        if self._state.forgotten:  # asked last: what stands here by then is cleared
            self.pop(group, None)
            raise self._state.over()

    def __delitem__(self, group: Any) -> None:
        super().__delitem__(group)
        _owners.pop(group, None)

    def pop(self, group: Any, *default: Any) -> Any:
        """As of a dict."""
        found = super().pop(group, *default)
        if _owners.get(group) is self._state:
            _owners.pop(group, None)
        return found

    def clear(self) -> None:
        """As of a dict."""
        for group in tuple(self):
            _owners.pop(group, None)
        super().clear()

    def _unlike_torch(self, *_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError("torch changes this map one group at a time")

    update = setdefault = popitem = __ior__ = _unlike_torch


class _TagMap(dict[str, Any]):
    """The groups by tag; `get` is what torch looks for one with."""

    def __init__(self, state: WorldState) -> None:
        super().__init__()
        self._state = state

    def get(self, tag: str, default: Any = None) -> Any:
        """As of a dict; a default group that is made late is among them."""
        self._state.make_late()
        return super().get(tag, default)


class OwnMap(MutableMapping[Any, Any]):
    """Torch's own map by process group, as seen outside worlds while the router is installed.

    Args:
        source: name of the module global.

    Reads and writes torch's own dictionary; what that does not hold is answered by the world that does.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self._own: dict[Any, Any] = vars(c10d)[source]

    def __getitem__(self, group: Any) -> Any:
        found = self._own.get(group, _MISSING)
        if found is _MISSING:
            found = _elsewhere(self.source, group)
        if found is _MISSING:
            raise KeyError(group)
        return found

    def __contains__(self, group: object) -> bool:
        return group in self._own or _elsewhere(self.source, group) is not _MISSING

    def get(self, group: Any, default: Any = None) -> Any:
        """As of a dict; code that destroys groups does not find those of other states."""
        found = self._own.get(group, _MISSING)
        if found is _MISSING and sys._getframe(1).f_code not in _destroyers:
            found = _elsewhere(self.source, group)
        return default if found is _MISSING else found

    def __setitem__(self, group: Any, value: Any) -> None:
        self._own[group] = value

    def __delitem__(self, group: Any) -> None:
        del self._own[group]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)

    def clear(self) -> None:
        """Empty torch's own map."""
        self._own.clear()

    def pop(self, group: Any, *default: Any) -> Any:
        """As of a dict, in torch's own map only."""
        return self._own.pop(group, *default)

    def values(self) -> Any:
        """The values of torch's own map."""
        return self._own.values()

    def items(self) -> Any:
        """The items of torch's own map."""
        return self._own.items()

    def keys(self) -> Any:
        """The keys of torch's own map."""
        return self._own.keys()


def _forked() -> None:
    global _lock  # noqa: PLW0603  (a thread of the parent may have held it)
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)
