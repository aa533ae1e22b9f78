"""DDP models that are made once and follow their world from generation to generation.

A `DistributedDataParallel` that is given a world's elastic group is bound to the process group of the present
generation. Its first forward pass in the next one, or `model.join()`, binds it to that one's: it gets a new
reducer, as torch gives it when a model is unpickled, and then the parameters and buffers of rank 0.

A new reducer, because the old one cannot go on. A failed backward pass leaves it half way, with the old
number of members to divide by; and it has rebuilt its buckets after its first step, while a newcomer's has
not, so the two would call different collectives. Of new ones all members' are alike, and rebuild at the same
step.

Making such a model communicates nothing: members that go on and newcomers meet in the first forward pass.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import distributed

from multiworld._c10d.elastic.ddp_follower import Follower
from multiworld._c10d.elastic.group import ElasticGroup
from multiworld._c10d.fault_classification import classify
from multiworld._c10d.gloo import lane_only
from multiworld._c10d.routing.ended_groups import ended, is_ended
from multiworld._c10d.routing.error_owner import guessed, translated
from multiworld._c10d.routing.state import StandIn, owner_of
from multiworld._core.reraise import raise_instead

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import NoReturn

    from multiworld._c10d.monkeypatch import Patches
    from multiworld._c10d.routing.state import WorldState

__all__ = ["Backward", "install"]

_c: Any = torch._C._distributed_c10d
_here = threading.local()
_buffers_too: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
"""By module of a model that is being made: whether torch would give it rank 0's buffers as well."""
_OF_CPP = (
    "_pre_forward", "_post_forward", "_check_and_sync_module_buffers", "_match_all_reduce_for_bwd_pass",
    "_check_global_requires_backward_grad_sync", "_sync_final_model",
)  # fmt: skip
"""Methods of a model that call collectives in C++ (buffers, new buckets), where no other hook sees errors."""


def install(patches: Patches) -> None:
    """Let models that are made with an elastic group follow it.

    Args:
        patches: the router's, which undoes them.
    """
    for name in ("_verify_param_shape_across_processes", "_sync_module_states"):
        patches.set(distributed, name, _unless_elastic(vars(distributed)[name]))
    model = distributed.DistributedDataParallel
    patches.set(model, "_ddp_init_helper", _following(vars(model)["_ddp_init_helper"]))
    for name in _OF_CPP:
        if name in vars(model):
            patches.set(model, name, _translated_here(vars(model)[name]))
    patches.set(model, "join_hook", _bound_first(model.join_hook))
    name = "_pre_forward"
    if name in vars(model):
        patches.set(model, name, _noted(vars(model)[name]))
    name = "_set_forward_pass_work_handle"
    if name in vars(_c.Reducer):
        patches.set(_c.Reducer, name, _kept(vars(_c.Reducer)[name]))
    name = "_match_unused_params_allreduce"
    if name in vars(model):
        patches.set(model, name, _as_the_reducer(vars(_c.ProcessGroup)["allreduce"]))


class Backward:
    """A backward pass that begins in this thread, and the models of NCCL worlds that it may reduce.

    Those are reduced in C++, in whatever block the pass is, or in none. They may be all whose forward pass
    this thread has begun; which of them it was, the counts of their groups' operations tell.
    """

    def __init__(self) -> None:
        groups = [known() for known in getattr(_here, "forwards", ())]
        self._groups = [(group, owner_of(group), _count(group)) for group in groups if group is not None]

    def _used(self) -> Iterator[tuple[Any, WorldState | None]]:
        for group, owner, count in reversed(self._groups):
            if count is None or _count(group) != count:
                yield group, owner

    def reduced(self) -> list[WorldState]:
        """Return the worlds in which the pass had operations."""
        return [owner for _, owner in self._used() if owner is not None]

    def explained(self, error: BaseException) -> BaseException | None:
        """Return what to raise instead of `error`, which the pass has raised; None if it stays."""
        instead = None
        for group, owner in self._used():
            if owner is not None:
                instead = guessed(error, owner, of_a_group=True)
            elif classify(error) is not None:  # else it is of no operation
                instead = ended(error, group)
            if instead is not None:
                break
        return instead


def _count(group: Any) -> int | None:
    """Return how many operations a group has had in this process; None where its backend does not say."""
    try:
        count: int = group._get_sequence_number_for_group()
    except RuntimeError:
        return None
    return count


def _noted(original: Any) -> Any:
    """Wrap `original`, which begins a forward pass: for `Backward`, note the group if of an NCCL world."""

    @functools.wraps(original)
    def pre_forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        group = model.process_group
        owner = owner_of(group)
        if torch.is_grad_enabled() and (is_ended(group) if owner is None else owner.traffic is not None):
            known = getattr(_here, "forwards", ())
            _here.forwards = [*(each for each in known if each() not in (None, group)), weakref.ref(group)]
        return original(model, *args, **kwargs)

    return pre_forward


def _kept(original: Any) -> Any:
    """Wrap `original`, by which a reducer gets a work that its backward pass waits for (`model.join()`).

    It keeps the C++ half of it, which is over, and has a value, by its Python half alone.
    """
    works: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def set_forward_pass_work_handle(reducer: Any, work: Any, *args: Any, **kwargs: Any) -> None:
        works[reducer] = work
        original(reducer, work, *args, **kwargs)

    return set_forward_pass_work_handle


def _bound_first(original: Any) -> Any:
    """Wrap `original`, with which `model.join()` begins, before it takes the model's group.

    An elastic model is bound there, and not in its first forward pass: a rank without inputs makes none.
    """

    @functools.wraps(original)
    def join_hook(model: Any, **kwargs: Any) -> Any:
        follower = vars(model).get("forward")
        if isinstance(follower, Follower):
            follower.follow()
        return original(model, **kwargs)

    return join_hook


def _as_the_reducer(all_reduce: Any) -> Any:
    """What a rank whose inputs have ended does in `model.join()` as the others' reducers call `all_reduce`.

    They call it in C++, so theirs goes over gloo: and so must this one, by torch's own method.
    """

    def match_unused_params_allreduce(model: Any) -> None:
        group, used = model.process_group, model.reducer._get_local_used_map()
        stands_in = isinstance(group, StandIn)
        _ = group.allreduce(used) if stands_in else all_reduce(group, used)

    return match_unused_params_allreduce


def _unless_elastic(original: Any) -> Any:
    """Wrap `original`, which communicates when a model is made: the first forward pass does it instead.

    In other worlds its errors are the world's.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        groups = [each for each in (*args, *kwargs.values()) if isinstance(each, _c.ProcessGroup)]
        if any(isinstance(each, ElasticGroup) for each in groups):
            if "module" in kwargs:
                _buffers_too[kwargs["module"]] = kwargs["broadcast_buffers"]
            return None
        try:
            return original(*args, **kwargs)
        except Exception as error:
            try:
                raise_instead(error, translated(error, owner_of(groups[0]) if groups else None))
            finally:
                del args, kwargs, groups  # who keeps the exception need not keep the group

    return call


def _translated_here(original: Any) -> Any:
    """Wrap `original`, a method of a model, whose errors are those of the world of the model's group."""

    @functools.wraps(original)
    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(model, *args, **kwargs)
        except RuntimeError as error:
            try:
                raise_instead(error, _of_group(error, model.process_group))
            finally:
                del model, args, kwargs  # who keeps the exception need not keep the model

    return call


def _of_group(error: BaseException, group: Any) -> BaseException | None:
    owner = owner_of(group)
    return ended(error, group) if owner is None else translated(error, owner)


def _following(original: Any) -> Any:
    """Wrap `original`, which makes a model's reducer: of the elastic group's present generation."""

    def ddp_init_helper(model: Any, *args: Any, **kwargs: Any) -> None:
        group = model.process_group
        if isinstance(group, ElasticGroup):
            _require_supported(model)
            generation = group.generation()  # once: another thread may enter the next one
            model.process_group = generation.pg
            # Nothing was noted with `init_sync=False`.
            buffers = _buffers_too.pop(model.module, model.broadcast_buffers)
            model.forward = Follower(model, group, bound=generation.number, buffers=buffers)
        _require_connections(model)
        original(model, *args, **kwargs)

    return ddp_init_helper


def _require_supported(model: Any) -> None:
    for name in ("mixed_precision", "_delay_all_reduce_params", "_use_python_reducer"):
        if getattr(model, name, None):
            _refuse(name.lstrip("_"))
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in model.parameters()):
        _refuse("apply_optimizer_in_backward")
    # Of a built-in hook no one knows afterwards that it was registered.
    model._register_builtin_comm_hook = functools.partial(_refuse, "a built-in communication hook")


def _require_connections(model: Any) -> None:
    """Raise for a model of a secure world: C++ would take the backend in gloo's place for gloo's own."""
    group = model.process_group
    if any(lane_only.is_stand_in(group._get_backend(device)) for device in group._device_types):
        owner = owner_of(group)
        raise lane_only.refusal("" if owner is None else owner.name, "DistributedDataParallel goes over gloo")


def _refuse(what: str, *_: object) -> NoReturn:
    raise ValueError(
        f"{what} was used with DistributedDataParallel of an elastic group. What it sets up belongs to one "
        "generation. Make the model anew in each, with process_group=world.group."
    )
