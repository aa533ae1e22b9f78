"""Translate errors of a world's operations for its users.

Torch's functions are spread by value over torch and user code, so they cannot be wrapped. What they have in
common is where their errors pass: the decorator of `c10d_logger` looks up `_get_msg_dict` when a function has
raised, `Work.wait` is an attribute of a type, and so on. Each hook asks the error's world what to raise
instead, as far as it knows which one that is (`error_owner`).

Costs nothing where no error is, but for one Python call around `Work.wait`, sends and receives, and a
backward pass.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable
from torch.distributed import c10d_logger, device_mesh, distributed_c10d
from torch.distributed.distributed_c10d import P2POp

from multiworld._c10d import logged_calls
from multiworld._c10d.elastic import ddp
from multiworld._c10d.elastic.ddp_follower import explained
from multiworld._c10d.gloo import lane_only, part_sizes
from multiworld._c10d.lane import collective_signatures
from multiworld._c10d.routing.ended_groups import ended, ended_by_name, refuse, said_as_torch_does
from multiworld._c10d.routing.error_owner import guessed, stays, told, translated
from multiworld._c10d.routing.functional_results import owner_of_results, returned
from multiworld._c10d.routing.selection import current, propagating
from multiworld._c10d.routing.state import WorldState, original_world, owner_of, owner_of_name
from multiworld._core.reraise import raise_instead
from multiworld.errors import MultiworldError, RouterError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from multiworld._c10d.monkeypatch import Patches

__all__ = ["install"]

_c = torch._C._distributed_c10d
# Methods of ProcessGroup that torch.distributed calls outside its decorated functions (isend, irecv and
# batches).
_METHODS = ("send", "recv", "recv_anysource")
# Those that torch's coalescing manager ends in, under their names in all versions of torch.
_COALESCED = (
    "allreduce_coalesced", "allgather_coalesced", "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced", "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced",
)  # fmt: skip
_FUNCTIONAL = (
    "all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_", "all_gather_into_tensor",
    "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor",
    "reduce_scatter_tensor_out", "reduce_scatter_tensor_coalesced", "all_to_all_single", "broadcast", "broadcast_",
)  # fmt: skip
_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling


def install(patches: Patches) -> None:
    """Hook the places where errors of operations pass.

    Args:
        patches: records what was replaced.

    Raises:
        RouterError: this torch has no such places.
    """
    probe = c10d_logger._exception_logger(lambda: None).__code__
    if "_get_msg_dict" not in vars(c10d_logger) or "_get_msg_dict" not in probe.co_names:
        raise RouterError(
            f"torch {torch.__version__}: c10d_logger._exception_logger does not use _get_msg_dict",
            rule="multiworld translates the errors of torch.distributed's functions there",
            next_step="Use a version of torch listed in multiworld's compatibility table, or a newer multiworld",
        )
    patches.set(
        c10d_logger, "_get_msg_dict", _describing(vars(c10d_logger)["_get_msg_dict"], probe.co_filename)
    )
    patches.set(_c.Work, "wait", _waiting(vars(_c.Work)["wait"]))
    for name in _METHODS:
        if name in vars(_c.ProcessGroup):
            patches.set(_c.ProcessGroup, name, _posting(vars(_c.ProcessGroup)[name]))
    for name in (*collective_signatures.METHODS, *_COALESCED):
        if name in vars(_c.ProcessGroup):
            patches.set(_c.ProcessGroup, name, _collective(vars(_c.ProcessGroup)[name]))
    if "monitored_barrier" in vars(_c.ProcessGroup):
        patches.set(
            _c.ProcessGroup, "monitored_barrier", _monitored(vars(_c.ProcessGroup)["monitored_barrier"])
        )
    # What `monitored_barrier` asks first, which has no decorator.
    patches.set(distributed_c10d, "get_backend", _asking(vars(distributed_c10d)["get_backend"]))
    for name in ("wait_tensor", "wait_tensors"):
        packet = getattr(torch.ops._c10d_functional, name, None)
        if packet is not None:
            # `_op` is what calling it runs; the packet itself is known to the compiler by identity. Not the
            # overload below it: newer versions exchange that one's `_op` themselves.
            patches.set(packet, "_op", _waiting_for_tensors(vars(packet)["_op"]))
    for space in (torch.ops._c10d_functional, torch.ops._c10d_functional_autograd):
        for name in _FUNCTIONAL:
            packet = getattr(space, name, None)
            if packet is not None:
                patches.set(packet, "_op", _functional(vars(packet)["_op"]))
    for module in (device_mesh, distributed_c10d):
        if "_resolve_process_group" in vars(module):
            patches.set(module, "_resolve_process_group", _resolving(vars(module)["_resolve_process_group"]))
    patches.set(Variable, "_execution_engine", _engine(vars(Variable)["_execution_engine"]))


def _describing(original: Any, filename: str) -> Any:
    @functools.wraps(original)
    def get_msg_dict(func_name: str, *args: Any, **kwargs: Any) -> Any:
        # Older versions come here when all went well, too, and perhaps inside a caller's `except` block: so
        # it is the decorator's own variable that says whether there was an error, not sys.exc_info().
        frame: FrameType = sys._getframe(1)
        error = local(frame, "error") if frame.f_code.co_filename == filename else None
        if not isinstance(error, BaseException):
            return original(func_name, *args, **kwargs)
        instead = _of_call(error, _group_among(args, kwargs))
        if instead is not None:
            try:
                raise instead from error
            finally:
                del instead, error, frame  # else this frame and the exception hold each other
        if isinstance(error, MultiworldError):
            # The original asks for the default group, which raises in a broken world.
            return {"func_name": func_name}
        return original(func_name, *args, **kwargs)

    return get_msg_dict


def local(frame: FrameType, name: str) -> Any:
    """Read a variable of another function, None where it has none, and leave nothing of it behind."""
    code = frame.f_code
    if name not in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
        return None  # a module's variables are its own dict
    variables = frame.f_locals
    value = variables.get(name)
    if type(variables) is dict:
        # Before Python 3.13 this is a copy that the frame keeps: the error in it would hold the frame, and
        # the frame the error, with every work and tensor on the way.
        variables.clear()
    return value


def _group_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for value in (*kwargs.values(), *args):
        # A batch of sends and receives says it in each of them.
        given = value[0].group if isinstance(value, list) and value and type(value[0]) is P2POp else value
        if isinstance(given, _c.ProcessGroup):
            return given
    return None


def _of_call(error: BaseException, group: Any) -> BaseException | None:
    """Return what to raise instead of a function's error, which was given `group`; None: the default one."""
    if group is None:
        return translated(error, current())
    owner = owner_of(group)
    if owner is not None:
        return translated(error, owner)
    if group in original_world().pg_map:
        stays(error)
        return None
    instead = ended(error, group)
    return guessed(error, current()) if instead is None else instead


def _functional(original: Any) -> Any:
    """`original`, a functional collective, whose errors and whose results' are its world's."""

    def call(*args: Any, **kwargs: Any) -> Any:
        owner = _named_among((*args, *kwargs.values()))
        try:
            found = original(*args, **kwargs) if kwargs else original(*args)
        except Exception as error:
            try:
                if owner is None:
                    raise_instead(
                        error, _of_ended((*args, *kwargs.values()), error) or guessed(error, current())
                    )
                if owner.traffic is not None:
                    from multiworld._c10d.nccl import hooks  # noqa: PLC0415  (it imports this room)

                    hooks.close_left_group(owner)
                raise_instead(error, translated(error, owner))
            finally:
                del args, kwargs, owner
        if owner is not None and not _compiling():
            returned(found, owner)
        return found

    return _dressed(call, original)


def _resolving(original: Any) -> Any:
    """`original`, which finds a group by its name: meshes and DTensors ask so before each operation."""

    @functools.wraps(original)
    def resolve(name: str) -> Any:
        try:
            return original(name)
        except RuntimeError as error:
            raise_instead(error, None if said_as_torch_does() else _of_name(error, name))

    return resolve


def _of_name(error: BaseException, name: str) -> BaseException | None:
    """Return what to raise instead of a call's error: a group freed after its world's end has no name any more."""
    state: WorldState | None = current()
    if state is not None and name.startswith(state.prefix):
        return translated(error, state)
    return ended_by_name(error, name)


def _of_ended(args: tuple[Any, ...], error: BaseException) -> BaseException | None:
    """Return what to raise instead of a functional collective's error, where its group's world is gone."""
    found = (
        _of_name(error, value)
        if isinstance(value, str)
        else ended(error, value)
        if isinstance(value, _c.ProcessGroup)
        else None
        for value in args
    )
    return next((each for each in found if each is not None), None)


def _named_among(args: tuple[Any, ...]) -> WorldState | None:
    """Return the world of the group that a functional collective is given, or its name (to torch 2.14)."""
    for value in args:
        owner = (
            owner_of_name(value)
            if isinstance(value, str)
            else owner_of(value)
            if isinstance(value, _c.ProcessGroup)
            else None
        )
        if owner is not None:
            return owner
    return None


def _waiting_for_tensors(original: Any) -> Any:
    """`original`, which waits for functional collectives, with its errors as the world's."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            # Merging no keywords costs half of what this wrapper does.
            return original(*args, **kwargs) if kwargs else original(*args)
        except Exception as error:
            try:
                owner = owner_of_results((*args, *kwargs.values()))
                if owner is None:
                    raise_instead(error, guessed(error, current(), of_a_group=True))
                raise_instead(error, translated(error, owner))
            finally:
                del args, kwargs, owner  # who keeps the exception need not keep the work

    return _dressed(call, original)


def _waiting(original: Any) -> Any:
    """`original`, a work's ``wait``, guarded, and in the log of its world's operations."""
    function = getattr(original, "__func__", original)

    def call(work: Any, *args: Any, **kwargs: Any) -> Any:
        owner = logged_calls.waiting(work)
        well = False
        try:
            found = function(work, *args, **kwargs) if kwargs else function(work, *args)
            well = True
        except Exception as error:
            try:
                if owner is None:
                    raise_instead(error, guessed(error, current(), of_a_group=True))
                raise_instead(error, translated(error, owner))
            finally:
                del args, kwargs
        finally:
            logged_calls.waited(work, well=well)
            del work, owner  # who keeps an exception need not keep the work
        return found

    return _dressed(call, original)


def _posting(original: Any) -> Any:
    """Wrap `original`, a ProcessGroup's send or receive: over its world's lane, or guarded."""
    function, name = getattr(original, "__func__", original), original.__name__

    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        owner = owner_of(group)
        if owner is not None and owner.taken:
            owner.hold(group, name, args, kwargs)
        try:
            # A compiler that traces this breaks its graph at torch's method, and then calls this without.
            if owner is not None and owner.lane is not None and not _compiling():
                message = owner.lane.posted(name, group, args, kwargs, function)
                if message is not None:
                    return message
            if owner is not None and owner.gloo is not None and owner.gloo.secure:
                _not_over_gloo(owner, name, group, args)
            if owner is not None and owner.operations is not None and not _compiling():
                work = owner.operations.run(name, group, args, kwargs, function)
            else:
                if owner is None:
                    refuse(group)
                work = function(group, *args, **kwargs) if kwargs else function(group, *args)
        except Exception as error:
            try:
                raise_instead(error, _of_call(error, group))
            finally:
                # A kept exception has this frame, and must not keep the group or its world.
                del group, owner, args, kwargs
        return work if owner is None or owner.gloo is None else owner.gloo.posted(work)

    return _dressed(call, original)


def _not_over_gloo(owner: WorldState, name: str, group: Any, args: tuple[Any, ...]) -> None:
    """Raise if a send or a receive is for the backend that stands in gloo's place, which would lose it."""
    tensors = args[0] if args else ()
    devices = {each.device.type for each in tensors} if isinstance(tensors, list | tuple) else {"cpu"}
    if any(lane_only.is_stand_in(group._get_backend(torch.device(each))) for each in devices):
        raise lane_only.refusal(owner.name, f"the lane does not carry this {name}")


def _collective(original: Any) -> Any:
    """Wrap `original`, a ProcessGroup's collective: over its world's lane, or as it is."""
    function, name = getattr(original, "__func__", original), original.__name__
    carried = name in collective_signatures.METHODS
    compared = part_sizes.NEEDED and name in part_sizes.METHODS

    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        owner = owner_of(group)
        if owner is not None and owner.taken:
            owner.hold(group, name, args, kwargs)
        if carried and owner is not None and owner.collectives is not None and not _compiling():
            try:
                work = owner.collectives.posted(name, group, args, kwargs)
            except Exception as error:
                try:
                    raise_instead(error, translated(error, owner))
                finally:
                    del group, owner, args, kwargs  # else the error keeps them
            if work is not None:
                return work
        if compared and owner is not None and len(args) > 1:
            part_sizes.compare(args[0], args[1], group.size())
        if owner is not None and owner.operations is not None and not _compiling():
            try:
                return owner.operations.run(name, group, args, kwargs, function)
            except Exception as error:
                try:
                    raise_instead(error, translated(error, owner))
                finally:
                    del group, owner, args, kwargs
        if owner is None:
            refuse(group)
        return function(group, *args, **kwargs) if kwargs else function(group, *args)

    return _dressed(call, original)


def _monitored(original: Any) -> Any:
    """`original`, a barrier that names who is late: that alone breaks no world, unlike a member that is lost."""
    function = getattr(original, "__func__", original)

    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        owner = owner_of(group)
        if owner is not None and owner.taken:
            owner.hold(group, "monitored_barrier", args, kwargs)
        try:
            return function(group, *args, **kwargs)
        except Exception as error:
            try:
                raise_instead(error, ended(error, group) or guessed(error, owner))
            finally:
                del group, owner, args, kwargs  # else the error keeps them

    return _dressed(call, original)


def _asking(original: Any) -> Any:
    """`original`, a group's backend, for which torch's functions ask: of a world that is gone, its error."""

    @functools.wraps(original)
    def get_backend(group: Any = None) -> Any:
        try:
            return original(group)
        except (TypeError, ValueError):
            if isinstance(group, _c.ProcessGroup):
                refuse(group)
            raise
        finally:
            del group  # else the error keeps it

    return get_backend


def _dressed(wrapper: Any, original: Any) -> Any:
    wrapper.__name__ = getattr(original, "__name__", wrapper.__name__)
    wrapper.__qualname__ = getattr(original, "__qualname__", wrapper.__name__)
    wrapper.__doc__ = getattr(original, "__doc__", None)
    return wrapper


def _engine(original: Any) -> Any:
    """Make a backward pass started in a world belong to it in all threads it runs in, and its errors too."""

    class WorldEngine(type(original)):  # type: ignore[misc]
        """Torch's autograd engine; the engine itself is one per process, also through other objects."""

        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            state: WorldState | None = current()
            begun = ddp.Backward()
            if state is None:
                try:
                    return super().run_backward(*args, **kwargs)
                except RuntimeError as error:
                    raise_instead(error, explained(error) or begun.explained(error) or told(error))
            try:
                with propagating(state):
                    return super().run_backward(*args, **kwargs)
            except Exception as error:
                raise_instead(
                    error,
                    guessed(error, state, of_a_group=True) or begun.explained(error) or told(error),
                )

    return WorldEngine()
