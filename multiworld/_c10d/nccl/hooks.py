"""Hooks of torch's functions for NCCL worlds: works know their world, and waiting means completion.

Installed with the first NCCL world of the process, so that others pay nothing. Bare calls of
``torch.distributed`` and the methods of a world go the same way.

- What a process group's method returns is remembered with its world; ``wait`` and ``synchronize`` of it block
  until the operation has ended (`multiworld._c10d.nccl.inflight`), and its future is done when it is.
- Operations that torch waits for in C++ (DDP, functional collectives) are waited for where they come back to
  Python.
- In torch's older NCCL a send or receive goes over the world's own communicator. Left alone it would make one
  for every pair of members at its first use, which blocks the caller, or an event loop, until the other one
  comes.
- Where that is unpatched, a call that fails leaves the NCCL group of the calling thread open, and the next
  call of a healthy world would be swallowed: it is closed.
- Torch's own threads do not import its compiler in order to resolve a stack
  (`multiworld._c10d.nccl.compiler_import`).
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch.autograd import Variable

from multiworld._c10d import logged_calls
from multiworld._c10d.elastic import ddp
from multiworld._c10d.futures import fail
from multiworld._c10d.nccl import backend as nccl
from multiworld._c10d.nccl import coalescing, compiler_import, splitting
from multiworld._c10d.nccl.inflight import DistBackendError
from multiworld._c10d.nccl.loaded import queries_beside_captures
from multiworld._c10d.routing import coalescing_block
from multiworld._c10d.routing.ended_groups import refuse
from multiworld._c10d.routing.functional_results import owner_of_results
from multiworld._c10d.routing.selection import current
from multiworld._c10d.routing.state import owner_of
from multiworld._c10d.waiter_pool import pool, without_future
from multiworld._core.reraise import raise_instead
from multiworld.errors import WrongDeviceError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from multiworld._c10d.monkeypatch import Patches
    from multiworld._c10d.nccl.inflight import Traffic
    from multiworld._c10d.routing.state import WorldState

__all__ = ["close_left_group", "install", "leave_block"]

_c: Any = torch._C._distributed_c10d

_POSTING = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "_allgather_base",
    "all_gather_single", "allgather_coalesced", "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced", "gather", "gather_single", "gather_into_tensor", "scatter",
    "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single", "barrier",
    "send", "recv", "recv_anysource", "_end_coalescing",
)  # fmt: skip
"""Methods of ProcessGroup that return a work, in any version."""

_owners: weakref.WeakKeyDictionary[Any, _Owner] = weakref.WeakKeyDictionary()
"""Owner of each work."""

_posters: weakref.WeakKeyDictionary[Any, _Owner] = weakref.WeakKeyDictionary()
"""Owner of each process group's operations, cached: asking the backend costs 2 µs for each operation."""

_outputs: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
"""Outputs of works that ended coalesced operations: asked for them, torch's older NCCL ends the process."""

_ALONE = contextlib.nullcontext()


class _Owner:
    """Owner of a work.

    Attributes:
        state: of the world.
        traffic: of the world.
        group: that it was posted to; a kept work must not keep the group.
        limit: seconds that it may take, where its group has another timeout than the world.
        backend: what must not go before the work does, if anything (`nccl.needed_by_works`). The work's entry
            goes when its C++ part has been destroyed.
    """

    __slots__ = ("backend", "group", "limit", "state", "traffic")

    def __init__(self, state: WorldState, traffic: Traffic, group: Any) -> None:
        self.state = state
        self.traffic = traffic
        self.group = weakref.ref(group)
        self.backend = nccl.needed_by_works(group, traffic.device)
        self.limit = nccl.timeout_of(group, traffic)

    def finish(self, work: Any, timeout: float | None = None) -> None:
        """Block until `work` has ended; see `Traffic.finish`."""
        limit = self.limit if timeout is None else timeout
        self.traffic.finish(work, lambda: nccl.error_of(self.group(), self.traffic.device), limit)

    def raise_(self, error: Exception) -> NoReturn:
        """Raise `error`, translated for the world."""
        translate = self.state.translate
        error = self.traffic.of_device(error)
        try:
            if translate is None or not self.traffic.ready:
                raise error  # the join explains it
            raise_instead(error, translate(self.state, error))
        finally:
            del error  # else this frame and the exception hold each other


def install(patches: Patches) -> None:
    """Hook torch's functions.

    Args:
        patches: the router's, which undoes them.
    """
    group, work = _c.ProcessGroup, _c.Work
    without_future(_owners)
    start, end = (_bare(vars(group)[name]) for name in ("_start_coalescing", "_end_coalescing"))
    single = {name: _bare(vars(group)[name]) for name in nccl.SINGLE.values() if name in vars(group)}
    for name in _POSTING:
        if name not in vars(group):
            continue
        plain = _bare(vars(group)[name])
        if name in {"send", "recv"}:
            plain = _on_own_communicator(plain, start, end)
        elif nccl.SINGLE.get(name) in single:
            plain = _one_by_one(plain, name, single[nccl.SINGLE[name]])
        patches.set(group, name, _dressed(_posting(plain, ends=name == "_end_coalescing"), vars(group)[name]))
    patches.set(group, "_start_coalescing", _dressed(_starting(start, end), start))
    coalescing_block.when_left_by_an_exception(patches, _abandoning)
    for name in ("wait", "synchronize"):
        patches.set(work, name, _dressed(_waiting(_bare(vars(work)[name])), vars(work)[name]))
    for name, make in (("is_completed", _asking), ("get_future", _promising)):
        patches.set(work, name, _dressed(make(_bare(vars(work)[name])), vars(work)[name]))
    for name in ("wait_tensor", "wait_tensors"):
        packet = getattr(torch.ops._c10d_functional, name, None)
        if packet is not None:
            patches.set(packet, "_op", _settling(vars(packet)["_op"]))
    compiler_import.install(patches)
    patches.set(Variable, "_execution_engine", _engine(vars(Variable)["_execution_engine"]))
    patches.set(c10d, "_new_process_group_helper", _making(vars(c10d)["_new_process_group_helper"]))
    splitting.install(patches)


# -- groups --------------------------------------------------------------------------------------------------


def _making(function: Callable[..., Any]) -> Any:
    """Wrap `function`, which makes a group and may block in C++, so that a world's end ends it."""

    def make(*args: Any, **kwargs: Any) -> Any:
        state = current()
        traffic = None if state is None else state.traffic
        if traffic is None or not traffic.ready:
            return function(*args, **kwargs)

        def connected() -> Any:
            made = function(*args, **kwargs)
            group = made[0] if isinstance(made, tuple) else made
            if nccl.has_nccl(group):
                nccl.connect(group, traffic)
            return made

        return nccl.cancellable(connected, traffic.verify, c10d.get_rank())

    return _dressed(make, function)


# -- posting -------------------------------------------------------------------------------------------------


def _posting(function: Callable[..., Any], *, ends: bool) -> Callable[..., Any]:
    """Wrap `function`, a method of ProcessGroup: its work knows its world, a failure leaves no open group.

    Args:
        function: plain.
        ends: whether it ends coalesced operations.
    """

    def post(group: Any, *args: Any, **kwargs: Any) -> Any:
        opened = coalescing.of(group)
        try:
            owner = _owner_of_call(group, (*args, *kwargs.values()), together=opened is not None)
        except WrongDeviceError as error:
            if opened is not None:
                _give_up(opened, owner_of(group), error)
            raise
        if owner is None:
            if opened is not None:  # of a world that was released meanwhile
                opened.close()
                refuse(group)
            return function(group, *args, **kwargs)
        _refuse_beside(owner, group)
        try:
            with owner.traffic.call():
                _with_work((*args, *kwargs.values()))
                try:
                    with opened or _ALONE:
                        work = function(group, *args, **kwargs)
                except Exception:
                    if opened is not None:
                        opened.close()  # first: torch resets its coalescing state only where that succeeds
                    if owner.traffic.fragile:
                        nccl.close_thread_group(group, owner.traffic.device)
                    raise
        except Exception as error:
            if opened is not None:
                opened.close()
            try:
                owner.raise_(error)
            finally:
                if opened is not None:
                    _give_up(opened, owner.state, error, ends=ends)
        if ends and opened is not None:
            opened.ended()
        if work is not None:
            _owners[work] = owner
            if ends:
                _outputs[work] = []  # as torch's future has it
        return work

    return post


def _with_work(args: tuple[Any, ...]) -> None:
    """Request a work for synchronous calls, too: newer versions return none and wait on the stream."""
    for options in args:
        if getattr(options, "asyncOp", True) is False:
            options.asyncOp = True


def _refuse_beside(owner: _Owner, group: Any, *, starts: bool = False) -> None:
    """Refuse an operation inside of another group's block: unpatched, it returns before it is begun.

    Args:
        owner: of the operation.
        group: the process group.
        starts: whether it begins a block itself: a patched older NCCL would close the other one for that.
    """
    starts = starts and nccl.is_older(group, owner.traffic.device)
    if not (owner.traffic.fragile or starts) or (other := coalescing.beside(group)) is None:
        return
    state = owner_of(other.group)
    raise RuntimeError(
        f"an operation of world {owner.state.name!r} where this thread puts together operations of "
        f"{'another group' if state is None else f'a group of world {state.name!r}'}. "
        "NCCL would run it with those, after it has returned. Call it before or after that block "
        "(of torch's coalescing manager)"
    )


def _give_up(
    opened: coalescing.Coalescing, state: WorldState | None, error: BaseException, *, ends: bool = False
) -> None:
    """Close what this thread has put together and `error` cuts off; its world breaks if some was posted.

    Args:
        opened: what it has put together.
        state: of the world, if it is not released yet.
        error: what was raised.
        ends: by their end: of one operation nothing was posted then, and of several it is not known.
    """
    opened.close()
    if opened.taken <= ends or state is None or state.translate is None or not opened.traffic.ready:
        return
    cut = DistBackendError(f"{coalescing.PARTLY}, then {type(error).__name__} was raised")
    # It breaks the world, and what it returns is what the next call raises: this one has an error already.
    state.translate(state, cut)


def _abandoning(_group: Any, _pending: dict[Any, Any]) -> Callable[[BaseException], None]:
    # Not by the group that was named: one that stands for another has that one's opened.
    before = coalescing.depths()

    def abandon(error: BaseException) -> None:
        for opened, depth in coalescing.depths().items():
            if depth > before.get(opened, 0):
                _give_up(opened, owner_of(opened.group), error)

    return abandon


def _owner_of_call(group: Any, args: tuple[Any, ...], *, together: bool = False) -> _Owner | None:
    """Return the owner of the operation; None where it is not one of NCCL in a world.

    Args:
        group: the process group.
        args: the operation's.
        together: whether it is put together with others.

    Raises:
        WrongDeviceError: a tensor is on another GPU than the world's, or is put together with those of a GPU
            and is on the CPU.
    """
    state = owner_of(group)
    traffic = None if state is None else state.traffic
    if state is None or traffic is None:
        return None
    tensor = _first_tensor(args)
    if tensor is None:
        return _poster(state, traffic, group) if nccl.has_nccl(group) else None
    if not tensor.is_cuda:
        if together:
            # Another backend carries it, and torch would lose its work: waiting for the batch leaves it out.
            raise WrongDeviceError(
                state.name,
                f"a tensor on device {tensor.device} in a batch of world {state.name!r}",
                rule=f"NCCL posts operations that are put together as one, on {traffic.device}",
                next_step="Send or receive the tensor by itself, or move it",
            )
        return None
    if tensor.device != traffic.device:
        # The older NCCL would make a communicator for that GPU and wait for peers with the same mistake.
        raise WrongDeviceError(
            state.name,
            f"a tensor on device {tensor.device} in world {state.name!r}",
            rule=f"This member's device in it is {traffic.device}",
            next_step=f"Move the tensor, or join with device={str(tensor.device)!r}",
        )
    return _poster(state, traffic, group)


def _poster(state: WorldState, traffic: Traffic, group: Any) -> _Owner:
    found = _posters.get(group)
    if found is None or found.state is not state:
        found = _posters[group] = _Owner(state, traffic, group)
    return found


def _first_tensor(args: tuple[Any, ...]) -> Any:
    for arg in args:
        found = (
            arg
            if isinstance(arg, torch.Tensor)
            else _first_tensor(tuple(arg))
            if isinstance(arg, list)
            else None
        )
        if found is not None:
            return found
    return None


def _starting(function: Callable[..., Any], end: Callable[..., Any]) -> Callable[..., Any]:
    def start(group: Any, *args: Any, **kwargs: Any) -> Any:
        owner = _owner_of_call(group, ())
        if owner is None:
            return function(group, *args, **kwargs)
        _refuse_beside(owner, group, starts=True)
        pending = c10d._world.pg_coalesce_state  # the selected world's, which need not be the group's
        try:
            with coalescing.start(group, owner.traffic, pending, lambda: end(group, *args, **kwargs)):
                return function(group, *args, **kwargs)
        except Exception as error:
            owner.raise_(error)

    return start


def _on_own_communicator(
    function: Callable[..., Any], start: Callable[..., Any], end: Callable[..., Any]
) -> Callable[..., Any]:
    def point_to_point(group: Any, tensors: list[Any], *args: Any, **kwargs: Any) -> Any:
        device = tensors[0].device
        if device.type != "cuda" or coalescing.of(group) is not None or not _is_older(group, device):
            return function(group, tensors, *args, **kwargs)
        # As a batch of one it is put on the communicator of the collectives, which every version has.
        start(group, device)
        try:
            function(group, tensors, *args, **kwargs)
        except BaseException:
            with contextlib.suppress(Exception):  # it has failed
                end(group, device)
            raise
        work = end(group, device)
        if work is not None:
            _outputs[work] = tensors
        return work

    return point_to_point


def _one_by_one(function: Callable[..., Any], name: str, single: Callable[..., Any]) -> Callable[..., Any]:
    def each(group: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = _first_tensor(args)
        traffic = None
        if tensor is not None and tensor.is_cuda and (state := owner_of(group)) is not None:
            traffic = state.traffic
        if traffic is None or not traffic.fragile or not _is_older(group, traffic.device):
            return function(group, *args, **kwargs)
        return nccl.one_by_one(name, lambda *one: single(group, *one), *args, *kwargs.values())

    return each


def _is_older(group: Any, device: Any) -> bool:
    owner = owner_of(group)
    return owner is not None and owner.traffic is not None and nccl.is_older(group, device)


# -- waiting -------------------------------------------------------------------------------------------------


def _waiting(function: Callable[..., Any]) -> Callable[..., Any]:
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        owner = _owners.get(work)
        if owner is None or torch.cuda.is_current_stream_capturing():
            return function(work, *args, **kwargs)
        limit = args[0] if args else kwargs.get("timeout")
        seconds = limit.total_seconds() if limit is not None and limit.total_seconds() > 0 else None
        logged_calls.waiting(work)
        well = False
        try:
            owner.finish(work, seconds)
            well = True
            # It has ended: the rest (stream waits, release of tensors) does not block.
            with owner.traffic.call():
                return function(work)
        except Exception as error:
            _raise_when_still(owner.state, owner.traffic, error, work)
        finally:
            logged_calls.waited(work, well=well)

    return wait


def _asking(function: Callable[..., Any]) -> Callable[..., Any]:
    def is_completed(work: Any) -> bool:
        owner = _owners.get(work)
        if owner is None:
            return bool(function(work))
        try:
            with owner.traffic.call(), queries_beside_captures():
                return bool(function(work))
        except RuntimeError:
            return True  # the world is over: waiting says so

    return is_completed


def _promising(function: Callable[..., Any]) -> Callable[..., Any]:
    def get_future(work: Any) -> Any:
        owner = _owners.get(work)
        if owner is None:
            return function(work)
        # torch's future is done when the operation is enqueued, and reports no failure.
        future: Any = torch.futures.Future(devices=[owner.traffic.device])

        def complete() -> None:
            try:
                work.wait()
            except Exception as error:
                fail(future, error)
            else:
                future.set_result(_result(work))

        pool.run(complete)
        return future

    return get_future


def _result(work: Any) -> list[Any]:
    """Return an operation's outputs; the value of torch's own future ends the process without any (2.6)."""
    outputs = _outputs.get(work)
    if outputs is not None:
        return list(outputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, without a replacement
        return list(work.result())


def _settling(function: Any) -> Any:
    """Wrap `function`, which waits for tensors in C++, to wait for their completion in their world."""

    def wait(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
            owner = owner_of_results((*args, *kwargs.values()))
            _settle(current() if owner is None else owner)
        finally:
            nccl.keep_for_unfinished(list)
        return result

    return _dressed(wait, function)


def _backends_of(state: WorldState) -> list[Any]:
    return [backend for group in _groups_of(state) for backend in nccl.backends_of(group)]


def _groups_of(state: WorldState) -> list[Any]:
    found = [state.group] if state.group is not None else []
    with contextlib.suppress(RuntimeError):  # another thread makes a group
        found += [group for group in state.pg_map if group is not state.group]
    return found


def leave_block(state: WorldState, error: BaseException | None) -> None:
    """Wait for the GPU at the end of a ``with`` block of an NCCL world.

    Args:
        state: of the world.
        error: that leaves the block.

    Raises:
        BrokenWorldException: the world broke in the block, and nothing in it has said so.
    """
    traffic = state.traffic
    if traffic is None:
        return
    nccl.keep_for_unfinished(lambda: [*_backends_of(state), *traffic.kept_for_blocks()])
    coalescing.close_left(traffic, traffic.blocks() - 1)
    if error is not None:
        close_left_group(state)  # it may come from a call that torch made in C++
    try:
        traffic.block_ends(failed=error is not None)
    except Exception as exc:
        _raise_when_still(state, traffic, exc)


def close_left_group(state: WorldState) -> None:
    """Close the NCCL group that a failed call of torch's may have left open on this thread.

    It would swallow the operations of other worlds. A communicator closes it, so the world must not be over.
    """
    traffic = state.traffic
    if traffic is None or not traffic.fragile or state.group is None or traffic.over.is_set():
        return
    # The world may end meanwhile: the error that is on its way is not to be replaced by that.
    with contextlib.suppress(RuntimeError), traffic.call():
        nccl.close_thread_group(state.group, traffic.device)


def _settle(state: WorldState | None) -> None:
    traffic = None if state is None else state.traffic
    if state is None or traffic is None:
        return
    try:
        traffic.settle()
    except Exception as error:
        _raise_when_still(state, traffic, error)


def _raise_when_still(state: WorldState, traffic: Traffic, error: Exception, work: Any = None) -> NoReturn:
    """Raise `error` (of `work`, if given), translated for the world, when its operations write no more."""
    instead = None
    error = traffic.of_device(error)
    try:
        if state.translate is not None and traffic.ready:  # before, the join explains it
            instead = state.translate(state, error)
        if instead is not None:
            traffic.still(work)
        raise_instead(error, instead)
    finally:
        del error, instead  # else this frame and the exceptions hold each other


def _engine(original: Any) -> Any:
    """Complete the gradients of a backward pass in an NCCL world before it returns: DDP waits in C++.

    The world is the selected one, and that of each DDP model that the pass has reduced.
    """

    class SettlingEngine(type(original)):  # type: ignore[misc]
        """Torch's autograd engine, and a wait."""

        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            begun = ddp.Backward()
            result = super().run_backward(*args, **kwargs)
            selected = current()
            _settle(selected)
            for state in begun.reduced():
                if state is not selected:
                    _settle(state)
            return result

    return SettlingEngine()


def _bare(method: Any) -> Any:
    # The function under a descriptor: binding it would cost more than the call.
    return getattr(method, "__func__", method)


def _dressed(wrapper: Any, original: Any) -> Any:
    wrapper.__name__ = getattr(original, "__name__", wrapper.__name__)
    wrapper.__qualname__ = getattr(original, "__qualname__", wrapper.__name__)
    wrapper.__doc__ = getattr(original, "__doc__", None)
    return wrapper
