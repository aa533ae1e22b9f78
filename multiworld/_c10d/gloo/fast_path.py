"""Direct calls of a world's gloo backend, with prepared options.

A call of `torch.distributed` finds its group, checks, makes options, and passes torch's dispatcher on its way
to the backend: 7-10 µs of about 50 for a message of 4 bytes. None of that decides anything where all of it is
known before: a world whose default group has plain gloo for the CPU, and a plain tensor there. For everything
else (other devices, subclasses, modes, gradients, complex numbers, coalescing) torch's own way is taken, so
that it means what it means there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed.distributed_c10d as c10d

from multiworld._c10d.gloo import part_sizes
from multiworld._c10d.nccl import inflight
from multiworld._c10d.plain_methods import PlainMethods

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor
    from torch._C._distributed_c10d import (
        AllgatherOptions,
        AllreduceOptions,
        BarrierOptions,
        BroadcastOptions,
        ProcessGroup,
        ReduceOp,
        ReduceOptions,
        ReduceScatterOptions,
        Work,
    )

    from multiworld._c10d.routing.state import WorldState

    Tensors = list[Tensor]

__all__ = ["Direct", "of"]

_Gloo: object = getattr(torch._C._distributed_c10d, "ProcessGroupGloo", None)
_AllgatherOptions: Callable[[], AllgatherOptions] = torch._C._distributed_c10d.AllgatherOptions
_CPU = torch.device("cpu")


class Backend(Protocol):
    """The operations of a ProcessGroupGloo, of which torch says no types, and of a ProcessGroup."""

    def allreduce(self, tensors: Tensors, opts: AllreduceOptions, /) -> Work:
        """All-reduce."""

    def broadcast(self, tensors: Tensors, opts: BroadcastOptions, /) -> Work:
        """Broadcast."""

    def reduce(self, tensors: Tensors, opts: ReduceOptions, /) -> Work:
        """Reduce."""

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: AllgatherOptions, /) -> Work:
        """All-gather."""

    def barrier(self, opts: BarrierOptions, /) -> Work:
        """Barrier."""

    def size(self) -> int:
        """Members."""


class Direct:
    """What a world's operations call. A value: functions and options, nothing that changes.

    It holds the backend by its bound methods. So keep it in no variable, and in no frame of its functions: a
    traceback would keep the backend, and its sockets, for as long as the error exists.

    Attributes:
        takes: ``(*tensors) -> bool``: whether a collective on them goes this way.
        calm: ``() -> bool``: whether a barrier does.
        wait: ``(work) -> bool``: torch's own ``Work.wait``.
        allreduce, broadcast, reduce, allgather: the backend's; lists of tensors, then options.
        gather_into, scatter_from: its all_gather_into_tensor and reduce_scatter_tensor; output, input,
            options.
        barrier: the backend's.
        broadcast_options, reduce_options: make options.
        summing, gathering, summing_parts, waiting: options of allreduce, of both gathers, of scatter_from, of
            barrier.
        reducing, reducing_parts: ``(op) -> options`` of allreduce and of scatter_from.
    """

    __slots__ = (
        "allgather", "allreduce", "barrier", "broadcast", "calm", "gather_into", "gathering", "reduce",
        "scatter_from", "summing", "summing_parts", "takes", "wait", "waiting",
    )  # fmt: skip

    broadcast_options, reduce_options = c10d.BroadcastOptions, c10d.ReduceOptions

    def __init__(self, backend: Backend, state: WorldState, *, alone: bool) -> None:
        # A plain dictionary of the state's: empty but inside `_coalescing_manager`.
        self.calm: Callable[[], bool] = (
            _calm(state.pg_coalesce_state) if alone else _never
        )  # else another backend might run it
        self.takes: Callable[..., bool] = _takes(state.pg_coalesce_state)
        self.wait: Callable[[Work], bool] = inflight.plain_wait
        self.allreduce, self.broadcast, self.reduce = backend.allreduce, backend.broadcast, backend.reduce
        self.allgather = backend.allgather
        # Renamed in torch 2.13.
        self.gather_into: Callable[[Tensor, Tensor, AllgatherOptions], Work] = _named(
            backend, "all_gather_single", "_allgather_base"
        )
        self.scatter_from: Callable[[Tensor, Tensor, ReduceScatterOptions], Work] = part_sizes.checked(
            _named(backend, "reduce_scatter_single", "_reduce_scatter_base"), backend.size()
        )
        self.barrier = backend.barrier
        # Shared by all calls: gloo takes what it needs, and the hook that would write to one is NCCL's.
        self.summing, self.summing_parts = c10d.AllreduceOptions(), c10d.ReduceScatterOptions()
        self.gathering = torch._C._distributed_c10d.AllgatherOptions()
        self.waiting = c10d.BarrierOptions()
        if hasattr(self.waiting, "device"):
            self.waiting.device = _CPU

    @staticmethod
    def reducing(op: ReduceOp) -> AllreduceOptions:
        """Make allreduce's options."""
        options = c10d.AllreduceOptions()
        options.reduceOp = op
        return options

    @staticmethod
    def reducing_parts(op: ReduceOp) -> ReduceScatterOptions:
        """Make scatter_from's options."""
        options = c10d.ReduceScatterOptions()
        options.reduceOp = op
        return options


def _named(backend: Backend, name: str, before: str) -> Callable[..., Work]:
    found: Callable[..., Work] = getattr(backend, name, None) or getattr(backend, before)
    return found


class _NotDirect(Direct):
    """Of a world whose operations all go torch's way."""

    def __init__(self) -> None:
        self.takes = self.calm = _never
        self.wait = inflight.plain_wait  # read before a row says that there is no direct way


def of(group: ProcessGroup | None, state: WorldState) -> Direct:
    """Return the direct way of a world's default group; without plain gloo for the CPU it takes nothing.

    Args:
        group: the ProcessGroup; None if it is made later, by a world whose frequent operations go elsewhere.
        state: of the world.
    """
    if group is None or _Gloo is None or _CPU not in group._device_types:
        return _NotDirect()
    backend = group._get_backend(_CPU)
    # Exactly: with TORCH_DISTRIBUTED_DEBUG=DETAIL a wrapper checks each operation first.
    if type(backend) is not _Gloo:
        return _NotDirect()
    alone = all(group._get_backend(device) is backend for device in group._device_types)
    # From 2.14 on, hooks may be registered with a process group, and its backend knows nothing of them.
    plain = PlainMethods(group) if hasattr(group, "register_pre_hook") else backend
    return Direct(cast("Backend", plain), state, alone=alone)


_Tensor = torch.Tensor
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # type: ignore[attr-defined, unused-ignore]
_function_mode: Callable[[], bool] = torch._C._is_torch_function_mode_enabled  # type: ignore[attr-defined, unused-ignore]
_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor  # type: ignore[attr-defined, unused-ignore]


def _calm(coalescing: Mapping[ProcessGroup, object]) -> Callable[[], bool]:
    def calm() -> bool:
        return not (_function_mode() or _dispatch_modes() or _profiled() or coalescing)

    return calm


def _never(*_: object) -> bool:
    return False


def _takes(coalescing: Mapping[ProcessGroup, object]) -> Callable[..., bool]:
    def takes(*tensors: object) -> bool:
        for tensor in tensors:
            if (
                type(tensor) is not _Tensor
                or not tensor.is_cpu
                or tensor.requires_grad
                or tensor.dtype.is_complex
                or tensor.is_neg()
                or _wrapped(tensor)
            ):
                return False
        return not (_function_mode() or _dispatch_modes() or _profiled() or coalescing)

    return takes
