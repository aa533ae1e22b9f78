"""The forward pass of a DDP model of an elastic group, which binds it to the present generation.

The compiler traces nothing of this module (`routing/torch_compile.py`): where the whole model is compiled, a
graph begins in its own forward pass.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.utils import _sync_params_and_buffers, _verify_param_shape_across_processes

from multiworld._c10d.elastic.group import group_of_block
from multiworld._c10d.routing.error_owner import guessed
from multiworld._core.reraise import raise_instead

if TYPE_CHECKING:
    from typing import NoReturn

    from multiworld._c10d.elastic.group import ElasticGeneration, ElasticGroup
    from multiworld._c10d.routing.state import WorldState

__all__ = ["Follower", "explained"]

_c: Any = torch._C._distributed_c10d
_disable: Any = torch.compiler.disable
_here = threading.local()


def explained(error: BaseException) -> BaseException | None:
    """Return what to raise instead of `error`, which may come outside of all blocks; None if it stays.

    It may be of the elastic model whose forward pass this thread began last, as long as that one is there.
    """
    last: weakref.ref[Follower] | None = getattr(_here, "last", None)
    follower = None if last is None else last()
    return None if follower is None else guessed(error, follower.state, of_a_group=True)


class Follower:
    """A model's `forward`: binds it to the present generation of its world first.

    Args:
        model: that it is of.
        group: that the model was made with.
        bound: the generation whose group the model has.
        buffers: whether all members get rank 0's buffers, and not its parameters alone.

    Attributes:
        state: of the generation that its last forward pass was in.
    """

    def __init__(self, model: Any, group: ElasticGroup, *, bound: int, buffers: bool) -> None:
        self.state: WorldState | None = None
        self._model = weakref.ref(model)
        self._group, self._buffers = group, buffers
        self._bound = bound
        self._alike = 0  # the generation whose members all have rank 0's parameters

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        # Nor does it trace what that calls. Without a compiler, this would load it.
        follow = _disable(self.follow) if "torch._dynamo" in sys.modules else self.follow
        model = follow()
        try:
            return type(model).forward(model, *inputs, **kwargs)
        except RuntimeError as error:
            raise_instead(error, self._explained(error))

    def follow(self) -> Any:
        """Bind the model to the present generation, whose members it may have to meet, and return it."""
        model: Any = self._model()
        generation = self._group.generation()
        group_of_block(generation)  # raises in an older one's: others wait there for another operation
        self.state, _here.last = generation.c10d, weakref.ref(self)
        try:
            if self._alike != generation.number:
                self._follow(model, generation)
        except RuntimeError as error:
            raise_instead(error, self._explained(error))
        return model

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A DistributedDataParallel of an elastic group was to be copied or saved. It belongs to a "
            "world of this process. Copy or save `model.module`."
        )

    def _explained(self, error: BaseException) -> BaseException | None:
        instead = explained(error)
        if instead is not None and self.state is not None and self.state.traffic is not None:
            self.state.traffic.still(None)  # what is freed with `error` is not written to any more
        return instead

    def _follow(self, model: Any, generation: ElasticGeneration) -> None:
        if self._bound != generation.number:
            _bind(model, generation.pg)
            self._bound = generation.number
        _make_alike(model, generation, buffers=self._buffers)
        self._alike = generation.number


def _bind(model: Any, group: Any) -> None:
    """Give a model a new reducer, of `group`."""
    before = model.process_group
    # The last to go are the backends themselves, which let go of the GIL before their destructors join
    # threads that may need it.
    backends = [before._get_backend(device) for device in before._device_types]
    model.process_group = group
    parameters, sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    # As a newcomer's: torch leaves it as `model.join()` made it, and each forward pass communicates for it.
    model._join_config = model._join_config.construct_disabled_join_config()
    model._ddp_init_helper(parameters, sparse, names, model.static_graph)
    model._has_rebuilt_buckets = False
    if model.static_graph:
        model._static_graph_delay_allreduce_enqueued = False
        model.reducer._set_static_graph()
        model.logger._set_static_graph()
    for hook, state in model._comm_hooks:
        _c._register_comm_hook(model.reducer, state, hook)
    del before
    backends.clear()


def _make_alike(model: Any, generation: ElasticGeneration, *, buffers: bool) -> None:
    """Give all members the parameters (and buffers) of rank 0, and raise where they do not fit.

    The others receive them beside their own, and take them once all have come: a member has rank 0's or its
    own, whenever rank 0 is lost. Meanwhile there is a second copy of them in the model's memory.
    """
    parameters, _ = model._build_params_for_reducer()
    _verify_param_shape_across_processes(generation.pg, parameters)
    named = [*model.module.named_parameters(), *(model.module.named_buffers() if buffers else ())]
    own = [each.detach() for name, each in named if name not in model.parameters_to_ignore]
    sent = [torch.empty_like(each) for each in own] if generation.rank else own
    _sync_params_and_buffers(generation.pg, sent, model.broadcast_bucket_size, 0)
    if generation.c10d.traffic is not None:
        generation.c10d.traffic.settle()  # NCCL's broadcasts have only been begun
    if generation.rank:
        with torch.no_grad():
            for each, came in zip(own, sent, strict=True):
                each.copy_(came)
