"""The collectives of one process group over the lane: which of them, and how each is begun.

All members decide alike, or they would wait for each other on different ways: by the kind of collective, its
dtype, its size, and what the join told all of them. So nothing is looked at that only one member has (a
profiler, a mode, whether its call is asynchronous).
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from multiworld._c10d.lane import buffers, reducing, tensors
from multiworld._c10d.lane.collective import Collective
from multiworld._core.lane import schedules
from multiworld._core.operations.log import ENDED, NUMBER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ReduceOp

    from multiworld._core.operations.log import Entry, OperationLog
    from multiworld._net.lane.endpoint import Endpoint

__all__ = ["LIMITS", "WITHOUT_LIMITS", "GroupCollectives", "Limits"]

_carried, _require_memory = tensors.carried, tensors.require_memory
_scratch = reducing.Scratch()
_nothing = torch.empty(0, dtype=torch.uint8, device="cpu")


def _gone() -> None:
    """No collective yet: for the moment until it is made."""


class Limits(NamedTuple):
    """Which collectives go over the lane; measured, see docs/benchmarks/index.md.

    Attributes:
        members: of a group, at most, for tensors of any size; `all_to_all` of more is torch's.
        whole: bytes of a tensor that is small: `all_reduce` does not cut it into parts, members give it on in
            a `broadcast`, and it goes over the lane among any number of members.
        across: bytes of a tensor where the members are on several hosts.
    """

    members: int = 16
    whole: int = 64 << 10
    across: int = 256 << 10


LIMITS = Limits()
"""Those that all members have."""

WITHOUT_LIMITS = Limits(members=1 << 30, across=1 << 62)
"""Those where gloo carries nothing."""


class GroupCollectives:
    """See the module. Each method returns a `Collective` that is not begun; None where it is torch's.

    Args:
        endpoint: of the world's lane.
        number: of the group's channel for messages.
        ranks: of the group's members in the world.
        rank: of this process in the group.
        timeout: seconds.
        carried: whether any collectives go over the lane.
        near: whether all members are on one host, or all sizes are carried nevertheless.
        alone: whether gloo is the group's only backend.
        log: of the world's operations.
        limits: see there.
        crowds: whether small tensors of more than ``limits.members`` members go over the lane, and many
            members form a tree: all of them know that.

    Attributes:
        comparing: held by a call from its comparison (M8D_CHECK) until it is posted.
        comparer: id of the thread whose call has it.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        number: int,
        ranks: Sequence[int],
        rank: int,
        timeout: float,
        *,
        carried: bool,
        near: bool,
        alone: bool,
        log: OperationLog,
        limits: Limits = LIMITS,
        crowds: bool = True,
    ) -> None:
        self.rank = rank
        self.size = len(ranks)
        self._endpoint = endpoint
        # Not that of the group's messages: a receive from any rank, of any tag, must find none of these.
        self._channel = int.from_bytes(
            hashlib.sha256(b"collectives" + number.to_bytes(7, "big")).digest()[:7], "big"
        )
        self._ranks = tuple(ranks)
        self._timeout = timeout
        self._near = near
        self._alone = alone
        self._limits = limits
        self._deep = crowds
        self._crowd = self.size > limits.members
        self._most = limits.whole if self._crowd else limits.across if not near else 1 << 62
        self._used = carried and self.size > 1 and (crowds or not self._crowd)
        self._tags = itertools.count()
        self.comparing = threading.Lock()
        self.comparer: int | None = None
        self._log = log
        self._logged = log.group(number, self._ranks)

    # -- reductions ------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: ReduceOp | None = None) -> Collective | None:
        """As ``dist.all_reduce``."""
        kernel = self._kernel(op, tensor)
        if kernel is None:
            return None
        new = self._new("all_reduce", [tensor], kernel, size=tensor.nbytes)
        flat = buffers.in_place(new, tensor)
        if tensor.nbytes <= self._limits.whole:
            steps = schedules.all_reduce_whole(new, flat, deep=self._deep)
        else:
            steps = schedules.all_reduce_cut(new, buffers.pieces_of_parts(flat, self.size), flat.nbytes)
        return new.of(steps)

    def reduce(self, tensor: Tensor, root: int, op: ReduceOp | None = None) -> Collective | None:
        """As ``dist.reduce``; `root` is a rank of the group."""
        kernel = self._kernel(op, tensor)
        if kernel is None or not 0 <= root < self.size:
            return None
        new = self._new("reduce", [tensor], kernel, size=tensor.nbytes, root=root)
        flat = buffers.in_place(new, tensor) if self.rank == root else buffers.to_send(tensor).view(-1)
        return new.of(schedules.reduce(new, buffers.pieces(flat), root, flat.nbytes))

    def reduce_scatter(
        self,
        output: Tensor,
        parts: Sequence[Tensor],
        op: ReduceOp | None = None,
        name: str = "reduce_scatter",
    ) -> Collective | None:
        """As ``dist.reduce_scatter``: `parts` has one tensor for each rank. `name` is for errors."""
        kernel = self._kernel(op, output, *parts)
        if (
            kernel is None
            or len(parts) != self.size
            or any(not buffers.alike(output, part) for part in parts)
        ):
            return None
        new = self._new(name, [output], kernel, size=output.nbytes)
        given = [buffers.to_send(part) for part in parts]
        others = [part for rank, part in enumerate(given) if rank != self.rank]
        room = buffers.to_receive(new, output, apart_from=others)
        new.first = partial(buffers.copy, room, given[self.rank])
        pieces = [buffers.pieces(part.view(-1)) for part in given]
        steps = schedules.reduce_scatter(new, pieces, buffers.pieces(room.view(-1)), room.nbytes)
        return new.of(steps)

    def reduce_scatter_tensor(
        self, output: Tensor, given: Tensor, op: ReduceOp | None = None
    ) -> Collective | None:
        """As ``dist.reduce_scatter_tensor``."""
        if not self._divides(given, output):
            return None
        parts = buffers.parts(buffers.to_send(given), output, self.size)
        return self.reduce_scatter(output, parts, op, "reduce_scatter_tensor")

    # -- copies ----------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, root: int) -> Collective | None:
        """As ``dist.broadcast``; `root` is a rank of the group."""
        if not self._takes(tensor) or not 0 <= root < self.size:
            return None
        new = self._new("broadcast", [tensor], size=tensor.nbytes, root=root)
        buffer = buffers.to_send(tensor) if self.rank == root else buffers.to_receive(new, tensor)
        small = self._deep and tensor.nbytes <= self._limits.whole
        return new.of(schedules.broadcast(new, buffer, root, deep=small))

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Collective | None:
        """As ``dist.all_gather``."""
        if not self._takes(tensor, *outputs) or len(outputs) != self.size:
            return None
        if any(not buffers.alike(tensor, each) for each in outputs):
            return None
        new = self._new("all_gather", [list(outputs)], size=tensor.nbytes)
        return self._gathered(new, [buffers.to_receive(new, each) for each in outputs], tensor)

    def all_gather_into_tensor(self, output: Tensor, tensor: Tensor) -> Collective | None:
        """As ``dist.all_gather_into_tensor``."""
        if not self._divides(output, tensor):
            return None
        new = self._new("all_gather_into_tensor", output, size=tensor.nbytes)
        return self._gathered(new, buffers.parts(buffers.to_receive(new, output), tensor, self.size), tensor)

    def _gathered(self, new: Collective, rooms: Sequence[Tensor], tensor: Tensor) -> Collective:
        others = [room for rank, room in enumerate(rooms) if rank != self.rank]
        given = buffers.to_send(tensor, apart_from=others)
        new.first = partial(buffers.copy, rooms[self.rank], given)
        return new.of(schedules.all_gather(new, given, rooms))

    def gather(self, tensor: Tensor, outputs: Sequence[Tensor] | None, root: int) -> Collective | None:
        """As ``dist.gather``; `outputs` is None, or empty, where this is not the root."""
        outputs = outputs or ()
        if not self._takes(tensor, *outputs) or not 0 <= root < self.size:
            return None
        if not self._fits(tensor, outputs, root):
            return None
        new = self._new("gather", [list(outputs)] if outputs else [], size=tensor.nbytes, root=root)
        rooms = [buffers.to_receive(new, each) for each in outputs]
        if self.rank == root:
            new.first = partial(buffers.copy, rooms[root], tensor)
        return new.of(schedules.gather(new, buffers.to_send(tensor), rooms, root))

    def scatter(self, tensor: Tensor, given: Sequence[Tensor] | None, root: int) -> Collective | None:
        """As ``dist.scatter``; `given` is None, or empty, where this is not the root."""
        given = given or ()
        if not self._takes(tensor, *given) or not 0 <= root < self.size:
            return None
        if not self._fits(tensor, given, root):
            return None
        new = self._new("scatter", [tensor], size=tensor.nbytes, root=root)
        if self.rank == root:
            sent = [buffers.to_send(each) for each in given]
            # At the end: it may lie where another member's tensor is sent from.
            new.finally_(lambda: buffers.copy(tensor, sent[root]))
            steps = schedules.scatter(new, tensor, sent, root)
        else:
            steps = schedules.scatter(new, buffers.to_receive(new, tensor), (), root)
        return new.of(steps)

    def all_to_all(
        self, outputs: Sequence[Tensor], given: Sequence[Tensor], name: str = "all_to_all"
    ) -> Collective | None:
        """As ``dist.all_to_all``: one tensor for each rank in both, of any sizes. `name` is for errors."""
        # Sizes are between two members, so they decide nothing.
        if not self._used or self._crowd or not self._near or not len(outputs) == len(given) == self.size:
            return None
        own, all_ = self.rank, (*outputs, *given)
        if not all(_carried(each) and each.dtype is all_[0].dtype for each in all_):
            return None
        if outputs[own].numel() != given[own].numel():
            return None
        _require_memory(all_)
        new = self._new(name, list(outputs))
        rooms = [buffers.to_receive(new, each) for each in outputs]
        sent = [buffers.to_send(each) for each in given]
        new.first = partial(buffers.copy, rooms[own].view(-1), sent[own].view(-1))
        return new.of(schedules.all_to_all(new, sent, rooms))

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        into: Sequence[int] | None = None,
        out_of: Sequence[int] | None = None,
    ) -> Collective | None:
        """As ``dist.all_to_all_single``; without sizes, or with empty lists of them, the parts are even."""
        if not self._used or not (_carried(output) and _carried(given)):
            return None
        outputs, parts = buffers.split(output, into, self.size), buffers.split(given, out_of, self.size)
        if outputs is None or parts is None:
            return None
        new = self.all_to_all(outputs, parts, "all_to_all_single")
        if new is not None:
            new.outputs = output
        return new

    def barrier(self, device_ids: object = None) -> Collective | None:
        """As ``dist.barrier``, of a group whose only backend is gloo."""
        if not self._used or not self._alone or device_ids is not None:
            return None
        return self.wait_for_all("barrier")

    def wait_for_all(self, name: str) -> Collective:
        """A barrier that is told by that name; whatever the limits are."""
        new = self._new(name, [])
        return new.of(schedules.barrier(new, _nothing, deep=self._deep))

    def exchange(self, record: Tensor) -> Collective:
        """Collect everyone's `record`, of one size, in ``outputs``; whatever the limits are."""
        outputs = [record if rank == self.rank else torch.empty_like(record) for rank in range(self.size)]
        new = self._new("the comparison of calls (M8D_CHECK)", outputs)
        return new.of(schedules.all_gather(new, record, outputs))

    # -- what all have in common -----------------------------------------------------------------------------

    def _new(
        self,
        name: str,
        outputs: Any,
        kernel: reducing.Kernel | None = None,
        *,
        size: int = 0,
        root: int | None = None,
    ) -> Collective:
        """Make a collective, which is the next one of the group once it has begun.

        Args:
            name: of it.
            outputs: see `Collective`.
            kernel: of a reduction.
            size: bytes, the same on all members; 0 where they may differ.
            root: rank in the group; None where there is none.
        """
        peer = None if root is None else self._ranks[root]
        entry: Entry = [self._logged, name, 0, size, peer, None, time.monotonic(), _gone]
        return Collective(
            name, self._endpoint, self._channel, self._ranks, self.rank, self._timeout, outputs, kernel,
            _scratch, entry, self._number,
        )  # fmt: skip

    def _number(self, new: Collective) -> None:
        """Give a collective its place in the order that all members share; nothing can refuse it any more."""
        if new.first is not None:
            new.first()
        entry = new.entry
        entry[ENDED] = weakref.ref(new)  # its thread may end without it
        for new.tag in self._tags:  # not `next`: see `Collective`
            break
        new.tag &= 0x7FFF_FFFF
        entry[NUMBER] = self._logged.following()
        self._log.append(entry)

    def _takes(self, *given: Tensor) -> bool:
        if not self._used:
            return False
        most = self._most
        for tensor in given:
            if not _carried(tensor) or tensor.nbytes > most:
                return False
        _require_memory(given)
        return True

    def _kernel(self, op: ReduceOp | None, tensor: Tensor, *more: Tensor) -> reducing.Kernel | None:
        if not self._takes(tensor, *more):
            return None
        return reducing.kernel(op, tensor.dtype)

    def _fits(self, tensor: Tensor, parts: Sequence[Tensor], root: int) -> bool:
        if self.rank != root:
            return not parts
        return len(parts) == self.size and all(buffers.alike(tensor, each) for each in parts)

    def _divides(self, whole: Tensor, part: Tensor) -> bool:
        """Whether a tensor has one part for each rank, each as large as `part`."""
        return (
            self._takes(whole, part)
            and whole.dtype is part.dtype
            and whole.numel() == part.numel() * self.size
        )
