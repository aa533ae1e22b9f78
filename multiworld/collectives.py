"""The collectives of a world, blocking: torch.distributed's names, order and meaning, without ``group=``.

The hot ones call the backend directly where that means the same; all others run torch's function with the
world selected, so that they mean exactly what torch means by them. `multiworld.operation_table` says which do
what.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from multiworld._core.operations.log import ENDED, SIZE
from multiworld.events import State
from multiworld.operation_table import TABLE, call, flat, inside, peer, require_others, reraise
from multiworld.turns import COLLECTIVE, RECEIVE, SEND, batch, message
from multiworld.work import WorldWork

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import P2POp, Work

    from multiworld._generation.generation import Generation
    from multiworld.operation_table import ReduceOperation
    from multiworld.turns import Turn, Turns, Way

__all__ = ["Collectives"]


class Collectives:
    """Mixin of `multiworld.World`; methods block until done, or return a `WorldWork` (``async_op=True``).

    Ranks are ranks of the world. Every method raises `BrokenWorldException` when the world is or gets broken,
    `WorldClosedError` after a close, `WrongDeviceError` for a tensor the backend cannot reach, and what torch
    raises for wrong arguments.
    """

    _gen: Generation
    _turns: Turns
    # `Turns.taken`, of several steps each. Empty as a rule: an operation asks that, and pays for no more.
    _taken: Sequence[Turn] = ()

    # -- point to point --------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send `tensor` to rank `dst` (any shape and dtype of the backend); returns when it may be reused.

        A small message may not have been received by then; `World.close` waits for that.
        """
        gen = self._gen
        if self._taken:
            self._wait_turn(gen, message(SEND, dst, tag, tensor))
        try:
            if gen.lane is not None and gen.lane.takes(tensor):
                gen.lane.send(tensor, peer(gen, dst), tag)
            else:
                gen.pg.send([flat(gen, tensor)], peer(gen, dst), tag).wait()
        except Exception as exc:
            reraise(gen, exc)

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        """Receive into `tensor` from rank `src` (None: the first that sends); returns the sender's rank.

        Raises:
            SizeMismatchError: the message has another size; the world goes on.
        """
        gen = self._gen
        if self._taken:
            self._wait_turn(gen, message(RECEIVE, src, tag, tensor))
        try:
            if gen.lane is not None and gen.lane.takes(tensor):
                return gen.lane.receive(tensor, None if src is None else peer(gen, src), tag)
            if src is None:
                require_others(gen)
                work = gen.pg.recv_anysource([flat(gen, tensor)], tag)
                work.wait()
                return int(work._source_rank())  # noqa: SLF001  (torch's own recv reads it so)
            gen.pg.recv([flat(gen, tensor)], peer(gen, src), tag).wait()
        except Exception as exc:
            reraise(gen, exc)
        return src

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> WorldWork:
        """Start a send; the returned work's ``wait`` blocks until `tensor` may be reused."""
        gen = self._gen
        if self._taken:
            self._wait_turn(gen, message(SEND, dst, tag, tensor))
        try:
            if gen.lane is not None and gen.lane.takes(tensor):
                return WorldWork(gen.lane.post_send(tensor, peer(gen, dst), tag), gen, once=True)
            return WorldWork(gen.pg.send([flat(gen, tensor)], peer(gen, dst), tag), gen, once=tensor.is_cpu)
        except Exception as exc:
            reraise(gen, exc)

    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> WorldWork:
        """Start a receive; `tensor` holds the message once the returned work's ``wait`` has returned."""
        gen = self._gen
        if self._taken:
            self._wait_turn(gen, message(RECEIVE, src, tag, tensor))
        try:
            if gen.lane is not None and gen.lane.takes(tensor):
                source = None if src is None else peer(gen, src)
                return WorldWork(gen.lane.post_receive(tensor, source, tag), gen, once=True)
            if src is None:
                require_others(gen)
                return WorldWork(gen.pg.recv_anysource([flat(gen, tensor)], tag), gen, once=tensor.is_cpu)
            return WorldWork(gen.pg.recv([flat(gen, tensor)], peer(gen, src), tag), gen, once=tensor.is_cpu)
        except Exception as exc:
            reraise(gen, exc)

    def batch_isend_irecv(self, p2p_op_list: list[P2POp]) -> list[WorldWork]:
        """Start the sends and receives of `p2p_op_list` (``dist.P2POp`` made inside ``with world:``)."""
        gen = self._gen
        if self._taken:
            self._wait_turn(gen, batch(p2p_op_list))
        works: list[Work] = inside(gen, "batch_isend_irecv", p2p_op_list)
        return [WorldWork(work, gen, once=all(op.tensor.is_cpu for op in p2p_op_list)) for work in works]

    # -- one to all, all to one ------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, src: int, async_op: bool = False) -> WorldWork | None:
        """Give every member `src`'s `tensor` (same shape and dtype everywhere)."""
        return self._do("broadcast", async_op, tensor, src)

    def reduce(
        self, tensor: Tensor, dst: int, op: ReduceOperation | None = None, async_op: bool = False
    ) -> WorldWork | None:
        """Reduce everyone's `tensor` into `dst`'s; `op` is a ``dist.ReduceOp``, SUM by default."""
        return self._do("reduce", async_op, tensor, dst, op)

    def gather(
        self, tensor: Tensor, gather_list: list[Tensor] | None = None, dst: int = 0, async_op: bool = False
    ) -> WorldWork | None:
        """Collect everyone's `tensor` in `dst`'s `gather_list` (one tensor per rank; None elsewhere)."""
        return self._do("gather", async_op, tensor, gather_list, dst)

    def scatter(
        self, tensor: Tensor, scatter_list: list[Tensor] | None = None, src: int = 0, async_op: bool = False
    ) -> WorldWork | None:
        """Give each rank its tensor of `src`'s `scatter_list` (None elsewhere), in `tensor`."""
        return self._do("scatter", async_op, tensor, scatter_list, src)

    # -- all to all ------------------------------------------------------------------------------------------

    def all_reduce(
        self, tensor: Tensor, op: ReduceOperation | None = None, async_op: bool = False
    ) -> WorldWork | None:
        """Reduce everyone's `tensor` in place, in everyone; `op` is a ``dist.ReduceOp``, SUM by default."""
        return self._do("all_reduce", async_op, tensor, op)

    def all_gather(
        self, tensor_list: list[Tensor], tensor: Tensor, async_op: bool = False
    ) -> WorldWork | None:
        """Collect everyone's `tensor` in everyone's `tensor_list` (one tensor per rank)."""
        return self._do("all_gather", async_op, tensor_list, tensor)

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, async_op: bool = False
    ) -> WorldWork | None:
        """Collect all `input_tensor`s in one tensor, world_size times as large: concatenated or stacked."""
        return self._do("all_gather_into_tensor", async_op, output_tensor, input_tensor)

    def reduce_scatter(
        self,
        output: Tensor,
        input_list: list[Tensor],
        op: ReduceOperation | None = None,
        async_op: bool = False,
    ) -> WorldWork | None:
        """Reduce everyone's `input_list` and give each rank its part in `output` (one tensor per rank)."""
        return self._do("reduce_scatter", async_op, output, input_list, op)

    def reduce_scatter_tensor(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002  (torch's name)
        op: ReduceOperation | None = None,
        async_op: bool = False,
    ) -> WorldWork | None:
        """Reduce everyone's `input` and give each rank its part: world_size times `output`."""
        return self._do("reduce_scatter_tensor", async_op, output, input, op)

    def all_to_all(
        self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], async_op: bool = False
    ) -> WorldWork | None:
        """Give rank r this rank's ``input_tensor_list[r]``, and get one from each in `output_tensor_list`."""
        return self._do("all_to_all", async_op, output_tensor_list, input_tensor_list)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002  (torch's name)
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        async_op: bool = False,
    ) -> WorldWork | None:
        """Give rank r part r of `input`'s first dimension (even parts where no sizes are given)."""
        return self._do("all_to_all_single", async_op, output, input, output_split_sizes, input_split_sizes)

    def barrier(self, async_op: bool = False, device_ids: Sequence[int] | None = None) -> WorldWork | None:
        """Return when every member has called it."""
        return self._do("barrier", async_op, None if device_ids is None else list(device_ids))

    def _wait_turn(self, gen: Generation, ways: Sequence[Way]) -> None:
        """Wait until no operation of several steps goes on that one on `ways` would come in between of.

        Args:
            gen: in which it was called: it is none of the next one's.
            ways: of the operation.

        Raises:
            RuntimeError: it would wait for something that this thread keeps from going on.
        """
        self._turns.wait(ways, lambda: gen.state is State.ACTIVE)

    def _do(self, name: str, async_op: bool, *args: object) -> WorldWork | None:
        row, gen, work = TABLE[name], self._gen, None
        if self._taken:
            self._wait_turn(gen, COLLECTIVE)
        lane = gen.collectives
        if lane is not None:
            try:
                if lane.by_torch():
                    return call(gen, row, args, async_op)
                collective = None if lane.default is None else row.over_lane(lane.default, *args)
                if collective is not None:
                    if async_op:
                        return WorldWork(lane.post(collective), gen)
                    lane.conclude(collective)
                    return None
            except Exception as exc:
                reraise(gen, exc)
        if row.post is not None and not async_op:
            entry = None
            try:
                # Read before: what was posted may end well, though the world ends meanwhile.
                wait = gen.direct.wait
                work = row.post(gen, *args)
                if work is not None:
                    entry = gen.operations.begun(name, args)
                    wait(work)
                    totals = gen.operations.totals  # written out, as a call would cost
                    totals.collectives[name] += 1
                    totals.collective_bytes[name] += entry[SIZE]
                    return None
            except Exception as exc:
                work = None  # an error that is kept has this frame
                reraise(gen, exc)
            finally:
                # An operation that the world's end ends is pending until the world has its verdict.
                if entry is not None:
                    entry[ENDED] = time.monotonic()
        return call(gen, row, args, async_op)
