"""Messages of tensors that wrap others: of functorch's transforms, and subclasses that send what they hold.

Only torch's dispatcher knows how to unwrap them. It does so inside of torch's own operation, which would then
send what is inside over gloo, while the other member waits for it at the lane. So the operation runs in a
mode that posts over the lane whatever comes out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch._C._distributed_c10d import Work

__all__ = ["is_wrapper", "posted"]

_OPERATORS = ("send", "recv_", "recv_any_source_")


def is_wrapper(tensor: object) -> bool:
    """Whether torch's dispatcher may find memory of the CPU in a tensor that the lane does not take."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not isinstance(tensor, FakeTensor)
    )


def posted(
    operation: Callable[[], Work], takes: Callable[[object], bool], post: Callable[[Tensor], Work | None]
) -> Work:
    """Run a send or a receive of torch's on a wrapper; what is inside goes over the lane.

    Args:
        operation: torch's, with its arguments.
        takes: whether the lane takes a tensor.
        post: posts one over the lane; None where that is torch's to do.

    Returns:
        The work that was posted last; where none was, what `operation` returned.
    """
    with _Unwrapping(takes, post) as mode:
        work = operation()
    return mode.works[-1] if mode.works else work


class _Unwrapping(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    def __init__(self, takes: Callable[[object], bool], post: Callable[[Tensor], Work | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.works: list[Work] = []  # torch keeps no more of them than C++ sees
        self._takes = takes
        self._post = post

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func.overloadpacket.__name__ in _OPERATORS:
            ((tensor, *_), *_) = args
            if self._takes(tensor):
                work = self._post(tensor)
                if work is not None:
                    self.works.append(work)
                    return work.boxed()
            elif is_wrapper(tensor):
                return NotImplemented  # to the tensor's own class, in this mode
        return func(*args, **(kwargs or {}))
