"""The collectives of a world, blocking: torch.distributed's names, order and meaning, without ``group=``.

The hot ones call the backend directly where that means the same (`multiworld._c10d.gloo.direct`); all others run torch's
function with the world selected, so that they mean exactly what torch means by them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from multiworld._core.raising import not_a_tensor, raise_instead
from multiworld.errors import WrongDeviceError
from multiworld.events import State
from multiworld.work import WorldWork

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from multiworld.generation import Generation

__all__ = ["Collectives"]

_RENAMED = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}
"""torch 2.13 gave these another name and warns of the old one; where the new one is missing, the old one is it."""


class Collectives:
    """Mixin of `multiworld.World`; each method blocks until done, or returns a `WorldWork` with ``async_op=True``.

    Ranks are ranks of the world. Every method raises `BrokenWorldException` when the world is or gets broken,
    `WorldClosedError` after a close, `WrongDeviceError` for a tensor the backend cannot reach, and what torch
    raises for wrong arguments.
    """

    _gen: Generation

    # -- point to point -----------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send `tensor` (any shape and dtype the backend takes) to rank `dst`; returns when it may be reused."""
        gen = self._gen
        try:
            if gen.direct is not None and gen.direct.sends(tensor):
                gen.direct.wait(gen.direct.posted(gen.direct.send([tensor], _peer(gen, dst), tag)))
            else:
                gen.pg.send([_flat(gen, tensor)], _peer(gen, dst), tag).wait()
        except Exception as exc:  # noqa: BLE001  (_reraise raises, always)
            _reraise(gen, exc)

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        """Receive into `tensor` from rank `src` (None: from whoever sends first); returns the sender's rank."""
        gen = self._gen
        try:
            if src is None:
                _require_others(gen)
                work = gen.pg.recv_anysource([_flat(gen, tensor)], tag)
                work.wait()
                return int(work._source_rank())  # noqa: SLF001  (torch's own recv reads it so)
            if gen.direct is not None and not gen.parked.waiting and gen.direct.sends(tensor):
                gen.direct.wait(gen.direct.posted(gen.direct.recv([tensor], _peer(gen, src), tag)))
            else:
                gen.pg.recv([_flat(gen, tensor)], _peer(gen, src), tag).wait()
        except Exception as exc:  # noqa: BLE001  (same)
            _reraise(gen, exc)
        return src

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> WorldWork:
        """Start a send; the returned work's ``wait`` blocks until `tensor` may be reused."""
        gen = self._gen
        try:
            return WorldWork(gen.pg.send([_flat(gen, tensor)], _peer(gen, dst), tag), gen, once=tensor.is_cpu)
        except Exception as exc:  # noqa: BLE001  (same)
            _reraise(gen, exc)

    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> WorldWork:
        """Start a receive; `tensor` holds the message once the returned work's ``wait`` has returned."""
        gen = self._gen
        try:
            if src is None:
                _require_others(gen)
                return WorldWork(gen.pg.recv_anysource([_flat(gen, tensor)], tag), gen, once=tensor.is_cpu)
            return WorldWork(gen.pg.recv([_flat(gen, tensor)], _peer(gen, src), tag), gen, once=tensor.is_cpu)
        except Exception as exc:  # noqa: BLE001  (same)
            _reraise(gen, exc)

    def batch_isend_irecv(self, p2p_op_list: list[Any]) -> list[WorldWork]:
        """Start the sends and receives of `p2p_op_list` (``dist.P2POp`` made inside ``with world:``)."""
        gen, works = self._gen, self._torch("batch_isend_irecv", p2p_op_list)
        return [WorldWork(work, gen, once=all(op.tensor.is_cpu for op in p2p_op_list)) for work in works]

    # -- one to all, all to one ---------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, src: int, async_op: bool = False) -> WorldWork | None:
        """Give every member `src`'s `tensor` (same shape and dtype everywhere)."""
        gen = self._gen
        if gen.direct is None or async_op or not gen.direct.takes(tensor):
            return self._op("broadcast", async_op, tensor, src)
        try:
            gen.direct.wait(gen.direct.broadcast([tensor], gen.direct.of_broadcast(src)))
        except Exception as exc:  # noqa: BLE001  (same)
            _reraise(gen, exc)
        return None

    def reduce(self, tensor: Tensor, dst: int, op: Any = None, async_op: bool = False) -> WorldWork | None:
        """Reduce everyone's `tensor` into `dst`'s; `op` is a ``dist.ReduceOp``, SUM by default."""
        gen = self._gen
        if gen.direct is None or async_op or not gen.direct.takes(tensor):
            return self._op("reduce", async_op, tensor, dst, **_op_of(op))
        try:
            gen.direct.wait(gen.direct.reduce([tensor], gen.direct.of_root(dst, op)))
        except Exception as exc:  # noqa: BLE001  (same)
            _reraise(gen, exc)
        return None

    def gather(
        self, tensor: Tensor, gather_list: list[Tensor] | None = None, dst: int = 0, async_op: bool = False
    ) -> WorldWork | None:
        """Collect everyone's `tensor` in `dst`'s `gather_list` (one tensor per rank; None elsewhere)."""
        return self._op("gather", async_op, tensor, gather_list, dst)

    def scatter(
        self, tensor: Tensor, scatter_list: list[Tensor] | None = None, src: int = 0, async_op: bool = False
    ) -> WorldWork | None:
        """Give each rank its tensor of `src`'s `scatter_list` (None elsewhere), in `tensor`."""
        return self._op("scatter", async_op, tensor, scatter_list, src)

    # -- all to all ---------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: Any = None, async_op: bool = False) -> WorldWork | None:
        """Reduce everyone's `tensor` in place, in everyone; `op` is a ``dist.ReduceOp``, SUM by default."""
        gen = self._gen
        if gen.direct is None or async_op or not gen.direct.takes(tensor):
            return self._op("all_reduce", async_op, tensor, **_op_of(op))
        try:
            gen.direct.wait(gen.direct.allreduce([tensor], gen.direct.of_reduce(op)))
        except Exception as exc:  # noqa: BLE001  (same)
            _reraise(gen, exc)
        return None

    def all_gather(
        self, tensor_list: list[Tensor], tensor: Tensor, async_op: bool = False
    ) -> WorldWork | None:
        """Collect everyone's `tensor` in everyone's `tensor_list` (one tensor per rank)."""
        gen = self._gen
        if gen.direct is None or async_op or not _alike(gen, tensor_list, tensor):
            return self._op("all_gather", async_op, tensor_list, tensor)
        try:
            gen.direct.wait(gen.direct.allgather([tensor_list], [tensor], gen.direct.of_gather))
        except Exception as exc:  # noqa: BLE001  (same)
            _reraise(gen, exc)
        return None

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, async_op: bool = False
    ) -> WorldWork | None:
        """The same into one tensor: world_size times `input_tensor`, concatenated or stacked."""
        gen = self._gen
        if (
            gen.direct is None
            or async_op
            or not (gen.direct.takes(output_tensor) and gen.direct.takes(input_tensor))
        ):
            return self._op("all_gather_into_tensor", async_op, output_tensor, input_tensor)
        try:
            gen.direct.wait(gen.direct.gather_into(output_tensor, input_tensor, gen.direct.of_gather))
        except Exception as exc:  # noqa: BLE001  (same)
            _reraise(gen, exc)
        return None

    def reduce_scatter(
        self, output: Tensor, input_list: list[Tensor], op: Any = None, async_op: bool = False
    ) -> WorldWork | None:
        """Reduce everyone's `input_list` (one tensor per rank) and give each rank its part in `output`."""
        return self._op("reduce_scatter", async_op, output, input_list, **_op_of(op))

    def reduce_scatter_tensor(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002  (torch's name)
        op: Any = None,
        async_op: bool = False,
    ) -> WorldWork | None:
        """The same from one tensor of world_size times `output`."""
        gen = self._gen
        if gen.direct is None or async_op or not (gen.direct.takes(output) and gen.direct.takes(input)):
            return self._op("reduce_scatter_tensor", async_op, output, input, **_op_of(op))
        try:
            gen.direct.wait(gen.direct.scatter_from(output, input, gen.direct.of_scatter(op)))
        except Exception as exc:  # noqa: BLE001  (same)
            _reraise(gen, exc)
        return None

    def all_to_all(
        self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], async_op: bool = False
    ) -> WorldWork | None:
        """Give rank r this rank's ``input_tensor_list[r]``, and get one from each, in `output_tensor_list`."""
        return self._op("all_to_all", async_op, output_tensor_list, input_tensor_list)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002  (torch's name)
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        async_op: bool = False,
    ) -> WorldWork | None:
        """The same with one tensor each, split along its first dimension (evenly where no sizes are given)."""
        return self._op("all_to_all_single", async_op, output, input, output_split_sizes, input_split_sizes)

    def barrier(self, async_op: bool = False, device_ids: Sequence[int] | None = None) -> WorldWork | None:
        """Return when every member has called it."""
        gen = self._gen
        if gen.direct is None or async_op or device_ids is not None or not gen.direct.calm():
            extra = {} if device_ids is None else {"device_ids": list(device_ids)}
            return self._op("barrier", async_op, **extra)
        try:
            gen.direct.wait(gen.direct.barrier(gen.direct.of_barrier))
        except Exception as exc:  # noqa: BLE001  (same)
            _reraise(gen, exc)
        return None

    # -- how ----------------------------------------------------------------------------------------------------

    def _op(self, name: str, async_op: bool, *args: Any, **kwargs: Any) -> WorldWork | None:
        """Run torch's function `name` in this world; with `async_op` its work, wrapped."""
        gen = self._gen
        for arg in args:
            for tensor in arg if isinstance(arg, list) else (arg,):
                if (device := getattr(tensor, "device", None)) is not None:
                    _check_device(gen, device)
        work = self._torch(name, *args, async_op=async_op, **kwargs)
        return WorldWork(work, gen) if async_op and work is not None else None

    def _torch(self, name: str, *args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist  # noqa: PLC0415  (a world exists, so torch is loaded)

        return self._inside(
            getattr(dist, _RENAMED.get(name, name), None) or getattr(dist, name), *args, **kwargs
        )

    def _inside(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `fn` with this world selected, errors translated."""
        from multiworld._c10d.nccl import coalescing  # noqa: PLC0415  (same)
        from multiworld._c10d.routing import router  # noqa: PLC0415  (same)

        gen = self._gen
        state = gen.c10d
        if state is None:
            raise gen.error()
        router.enter(state)
        try:
            return fn(*args, **kwargs)
        except BaseException as exc:
            if state.traffic is not None:
                coalescing.close_left(state.traffic)
            if isinstance(exc, Exception):
                _reraise(gen, exc)
            raise
        finally:
            router.leave()


def _check_device(gen: Generation, device: Any) -> None:
    """Raise if the backend cannot reach `device`: gen's own error, where it is over already."""
    if device.type in gen.device_types:
        return
    if gen.state is not State.ACTIVE:
        raise gen.error()
    raise WrongDeviceError(
        gen.world,
        f"a tensor on device {device} in world {gen.world!r}",
        rule=f"Its backend reaches tensors on: {', '.join(sorted(gen.device_types))}",
        next_step="Move the tensor, or join with a backend for its device, as in backend='cpu:gloo,cuda:nccl'",
    )


def _flat(gen: Generation, tensor: Tensor) -> Tensor:
    # torch takes a meta tensor, and sends nothing.
    _check_device(gen, tensor.device)
    # As torch's own functions do: complex numbers travel as pairs of reals.
    if tensor.is_complex():
        import torch  # noqa: PLC0415

        return torch.view_as_real(tensor)
    return tensor


def _alike(gen: Generation, tensors: Any, tensor: Tensor) -> bool:
    """Whether a collective of a list of tensors and one more goes the direct way."""
    takes = gen.direct.takes
    return (
        type(tensors) is list and takes(tensor) and all(takes(t) and t.dtype is tensor.dtype for t in tensors)
    )


def _peer(gen: Generation, rank: int) -> int:
    if 0 <= rank < gen.size and rank != gen.rank:
        return rank
    raise ValueError(
        f"rank {rank} is not a peer in world {gen.world!r}. Ranks are 0 to {gen.size - 1}, and this process is "
        f"rank {gen.rank}. Name another member."
    )


def _require_others(gen: Generation) -> None:
    if gen.size == 1 and gen.state is State.ACTIVE:
        raise ValueError(
            f"rank {gen.rank} is alone in world {gen.world!r}: there is no other member that a message could come from"
        )


def _op_of(op: Any) -> dict[str, Any]:
    return {} if op is None else {"op": op}


def _reraise(gen: Generation, exc: Exception) -> NoReturn:
    """Raise what `gen` makes of `exc`."""
    try:
        wrong = not_a_tensor(exc)
        raise_instead(exc, gen.explain(exc) if wrong is None else wrong)
    finally:
        del exc  # else this frame and the exception hold each other, and torch's frames the work
