"""What the profiler shows of messages over the lane: the same records as of torch's own on gloo.

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

__all__ = ["begin", "posting", "profiled"]

profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether a profiler runs in this thread."""

_POSTED = {"send": "c10d::send", "recv": "c10d::recv_", "recvAnySource": "c10d::recv_any_source_"}


def posting(name: str) -> torch.autograd.profiler.record_function:
    """Return the record of posting, a context: "send", "recv" or "recvAnySource"."""
    return torch.autograd.profiler.record_function(_POSTED[name])


def begin(name: str, tensor: Tensor, landed: Callable[[], None] | None) -> Callable[[], None]:
    """Begin the record of a message; return what ends it, after `landed`."""
    handle = torch.autograd._record_function_with_args_enter(f"gloo:{name}", tensor)  # type: ignore[attr-defined, unused-ignore]

    def end() -> None:
        if landed is not None:
            landed()
        # By the thread that ends it the profiler knows an asynchronous operation.
        other = threading.Thread(
            target=torch.autograd._record_function_with_args_exit,  # type: ignore[attr-defined, unused-ignore]
            args=(handle,),
            daemon=True,
            name="m8d-record",
        )
        other.start()
        other.join()

    return end
