"""Profiler records of messages over the lane: the same as of torch's own on gloo.

Two for each message: ``c10d::send`` while it is posted, and ``gloo:send`` with its shape until it was waited
for (``recv_`` and ``recv``, ``recv_any_source_`` and ``recvAnySource``).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from multiworld._c10d.lane.collective import Collective

__all__ = ["begin", "of_collective", "posting", "profiled"]

profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether a profiler runs in this thread."""

_POSTED = {
    "send": "c10d::send", "recv": "c10d::recv_", "recvAnySource": "c10d::recv_any_source_",
    "allreduce": "c10d::allreduce_", "broadcast": "c10d::broadcast_", "reduce": "c10d::reduce_",
    "allgather": "c10d::allgather_", "gather": "c10d::gather_", "scatter": "c10d::scatter_",
    "reduce_scatter": "c10d::reduce_scatter_", "alltoall": "c10d::alltoall_", "barrier": "c10d::barrier",
    **dict.fromkeys(("_allgather_base", "all_gather_single"), "c10d::_allgather_base_"),
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter_single"), "c10d::_reduce_scatter_base_"),
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), "c10d::alltoall_base_"),
}  # fmt: skip


def posting(name: str) -> torch.autograd.profiler.record_function:
    """Return the record of posting, a context; `name`: a collective's method, or as `begin` has it."""
    return torch.autograd.profiler.record_function(_POSTED[name])


def begin(name: str, tensor: Tensor | None, landed: Callable[[], None] | None) -> Callable[[], None]:
    """Begin the record of a message; return what ends it, after `landed`."""
    given = () if tensor is None else (tensor,)
    handles = [torch.autograd._record_function_with_args_enter(f"gloo:{name}", *given)]  # type: ignore[attr-defined, unused-ignore]

    def end() -> None:
        if landed is not None:
            landed()
        if not handles:  # an interrupted thread had ended it
            return
        # By the thread that ends it the profiler knows an asynchronous operation.
        other = threading.Thread(
            target=torch.autograd._record_function_with_args_exit,  # type: ignore[attr-defined, unused-ignore]
            args=(handles.pop(),),
            daemon=True,
            name="m8d-record",
        )
        other.start()
        other.join()

    return end


_GLOO = {
    **{each: each for each in ("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast")},
    **{each: each for each in ("gather", "reduce", "scatter")},
    "all_gather_into_tensor": "all_gather",
    "all_to_all_single": "all_to_all",
}
"""What gloo records a collective as; others it does not record."""


def of_collective(collective: Collective, given: tuple[object, ...]) -> None:
    """Record a collective, until it is over, with the shape of the first tensor that it was given."""
    if collective.name in _GLOO:
        tensors = [each for each in _flattened(given) if isinstance(each, torch.Tensor)]
        collective.recorded = begin(_GLOO[collective.name], tensors[0] if tensors else None, None)


def _flattened(given: object) -> list[object]:
    if isinstance(given, list | tuple):
        return [each for inner in given for each in _flattened(inner)]
    return [given]
