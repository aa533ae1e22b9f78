"""World.aio: the collectives of a world, awaitable and cancellable.

An operation is posted at once, in the caller's order; only waiting for it is left to a kept thread, or to the
future of the work where torch has one. Those of plain gloo go the short way (`multiworld._c10d.gloo.direct`, `endings`).
Cancelling ends the waiting, not the operation: torch cannot take back
what was posted. A cancelled receive is kept, and the next receive of the same source and tag gets its message;
until then its tensor belongs to it.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from typing import TYPE_CHECKING, Any, NoReturn

from multiworld._core.raising import not_a_tensor, raise_instead
from multiworld.collectives import _flat, _op_of, _peer
from multiworld.errors import MultiworldError
from multiworld.explaining import posting
from multiworld.receives import Parked, TakenOver, next_order
from multiworld.work import WorldWork, seen

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from multiworld._c10d.gloo.waiting import AwaitedWork, Habit
    from multiworld.generation import Generation
    from multiworld.world import World

__all__ = ["Aio", "AioWork"]


class AioWork:
    """A started operation; ``await work`` (or ``await work.wait()``) until it is done, as often as one likes."""

    def __init__(self, aio: Aio, gen: Generation, work: Any) -> None:
        self._aio = aio
        self._gen = gen
        # It lets go of torch's work when the world breaks; who keeps this one need not keep gloo's device.
        self.work = _of_world(work, gen)
        self._once = Parked(None, self.work.wait, gen.timeout + 5.0)
        self._begun = False

    async def wait(self) -> None:
        """Wait until the operation is done. A cancellation ends the waiting only; it may be awaited again."""
        # Two threads that wait for one receive of gloo's would take two messages.
        wait, self._begun = self._once.join if self._begun else self._once.run, True
        await self._aio._until(self._gen, self._aio._on_waiter(wait))  # noqa: SLF001  (its own)

    def __await__(self) -> Any:
        return self.wait().__await__()


class Aio:
    """The awaitable face of one world; see `multiworld.World` for what each operation does and raises."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._before: asyncio.Future[Any] | None = None  # of those in `_in_lane`
        self._queue: Any = None  # of the loop that was last used, `waiting.LoopQueue`
        # With it, what was learned about them; before, nothing asks.
        self._make: Any = None
        self._sends: Habit | Any = None
        self._receives: Habit | Any = None
        self._others: Habit | Any = None

    # -- point to point -----------------------------------------------------------------------------------------

    async def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send `tensor` to rank `dst`. After a cancellation the message may still be delivered."""
        gen = self._world._gen  # noqa: SLF001  (its own)
        if gen.direct is None or not gen.direct.sends(tensor):
            # No name for the work here: an error that is kept would keep it, and with it gloo's device.
            await self._finish(
                gen, await self._post(gen, lambda: gen.pg.send([_flat(gen, tensor)], _peer(gen, dst), tag))
            )
            return
        try:
            work, written = gen.direct.post_send(tensor, _peer(gen, dst), tag)
            ending = self._ending(work)
            del work  # as in `recv`
            if written:
                ending.wait()
        except Exception as exc:  # noqa: BLE001  (explained, and raised again)
            await self._raise(gen, exc)
        try:
            await self._ended(gen, ending, self._sends, tensor.nbytes)
        finally:
            del ending

    async def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        """Receive into `tensor` from rank `src` (None: whoever sends first); returns the sender's rank."""
        gen = self._world._gen  # noqa: SLF001  (its own)
        if src is None or gen.parked.waiting or gen.direct is None or not gen.direct.sends(tensor):
            return await self._recv(gen, tensor, src, tag)
        try:
            work = gen.direct.posted(gen.direct.recv([tensor], _peer(gen, src), tag))
            ending = self._ending(work, next_order())
            del work  # an error that is kept would keep it, and with it gloo's device
        except Exception as exc:  # noqa: BLE001  (explained, and raised again)
            await self._raise(gen, exc)
        gen.expect(ending)
        try:
            await ending.until_over(self._receives, tensor.nbytes)
        except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
            parked = Parked(
                tensor, None, gen.timeout + 5.0, order=ending.order, source=src, explain=gen.explain
            )
            ending.tell(parked.settle)
            gen.parked.park(src, tag, parked)
            raise
        except Exception as exc:  # noqa: BLE001  (same)
            await self._raise(gen, exc)
        finally:
            gen.expect_no_more(ending)
            del ending
        return src

    async def _recv(self, gen: Generation, tensor: Tensor, src: int | None, tag: int) -> int:
        work = await self._post(gen, lambda: self._world.irecv(tensor, src, tag))
        inner = work._work  # noqa: SLF001  (its own)
        parked = Parked(
            tensor,
            _receiving(work, src),
            gen.timeout + 5.0,
            taking=inner if isinstance(inner, TakenOver) else None,
        )
        del inner
        del work
        waiting = self._on_waiter(parked.run)
        gen.watch(waiting)
        try:
            await asyncio.shield(waiting)
            source: int = parked.source
        except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
            gen.parked.park(src, tag, parked)
            raise
        finally:
            # The future holds an error, its traceback this frame: without this the frame would hold the future.
            del waiting, parked
        return source

    async def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> AioWork:
        """Start a send; await the returned work."""
        gen = self._world._gen  # noqa: SLF001  (its own)
        work = await self._post(gen, lambda: gen.pg.send([_flat(gen, tensor)], _peer(gen, dst), tag))
        return AioWork(self, gen, work)

    async def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> AioWork:
        """Start a receive; `tensor` holds the message once the returned work was awaited."""
        gen = self._world._gen  # noqa: SLF001  (its own)
        return AioWork(self, gen, await self._post(gen, lambda: self._world.irecv(tensor, src, tag)))

    async def batch_isend_irecv(self, p2p_op_list: list[Any]) -> list[AioWork]:
        """Start the operations of `p2p_op_list`; await each of the returned works."""
        gen = self._world._gen  # noqa: SLF001  (its own)
        works = await self._post(gen, lambda: self._world.batch_isend_irecv(p2p_op_list))
        return [AioWork(self, gen, work) for work in works]

    # -- collectives --------------------------------------------------------------------------------------------

    async def broadcast(self, tensor: Tensor, src: int) -> None:
        """Give every member `src`'s `tensor`."""
        gen = self._world._gen  # noqa: SLF001  (its own)
        if gen.direct is None or not gen.direct.takes(tensor):
            await self._op("broadcast", tensor, src)
            return
        await self._collective(gen, lambda: gen.direct.broadcast([tensor], gen.direct.of_broadcast(src)))

    async def all_reduce(self, tensor: Tensor, op: Any = None) -> None:
        """Reduce everyone's `tensor` in place, in everyone."""
        gen = self._world._gen  # noqa: SLF001  (its own)
        if gen.direct is None or not gen.direct.takes(tensor):
            await self._op("all_reduce", tensor, **_op_of(op))
            return
        await self._collective(gen, lambda: gen.direct.allreduce([tensor], gen.direct.of_reduce(op)))

    async def reduce(self, tensor: Tensor, dst: int, op: Any = None) -> None:
        """Reduce everyone's `tensor` into `dst`'s."""
        await self._op("reduce", tensor, dst, **_op_of(op))

    async def all_gather(self, tensor_list: list[Tensor], tensor: Tensor) -> None:
        """Collect everyone's `tensor` in everyone's `tensor_list`."""
        await self._op("all_gather", tensor_list, tensor)

    async def all_gather_into_tensor(self, output_tensor: Tensor, input_tensor: Tensor) -> None:
        """The same into one tensor."""
        await self._op("all_gather_into_tensor", output_tensor, input_tensor)

    async def gather(self, tensor: Tensor, gather_list: list[Tensor] | None = None, dst: int = 0) -> None:
        """Collect everyone's `tensor` in `dst`'s `gather_list`."""
        await self._op("gather", tensor, gather_list, dst)

    async def scatter(self, tensor: Tensor, scatter_list: list[Tensor] | None = None, src: int = 0) -> None:
        """Give each rank its tensor of `src`'s `scatter_list`."""
        await self._op("scatter", tensor, scatter_list, src)

    async def reduce_scatter(self, output: Tensor, input_list: list[Tensor], op: Any = None) -> None:
        """Reduce everyone's `input_list` and give each rank its part."""
        await self._op("reduce_scatter", output, input_list, **_op_of(op))

    async def reduce_scatter_tensor(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002  (torch's name)
        op: Any = None,
    ) -> None:
        """The same from one tensor."""
        await self._op("reduce_scatter_tensor", output, input, **_op_of(op))

    async def all_to_all(self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor]) -> None:
        """Give rank r this rank's ``input_tensor_list[r]``, and get one from each."""
        await self._op("all_to_all", output_tensor_list, input_tensor_list)

    async def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002  (torch's name)
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
    ) -> None:
        """The same with one tensor each."""
        await self._op("all_to_all_single", output, input, output_split_sizes, input_split_sizes)

    async def barrier(self, device_ids: list[int] | None = None) -> None:
        """Return when every member has called it."""
        await self._op("barrier", **({} if device_ids is None else {"device_ids": device_ids}))

    # -- objects ------------------------------------------------------------------------------------------------

    async def send_object_list(self, object_list: list[Any], dst: int, device: Any = None) -> None:
        """Send the objects of `object_list` to rank `dst`."""
        await self._in_lane(lambda: self._world.send_object_list(object_list, dst, device))

    async def recv_object_list(
        self, object_list: list[Any], src: int | None = None, device: Any = None, *, weights_only: bool = True
    ) -> int:
        """Fill `object_list` from rank `src`; returns the sender's rank."""
        sender: int = await self._in_lane(
            lambda: self._world.recv_object_list(object_list, src, device, weights_only=weights_only)
        )
        return sender

    async def broadcast_object_list(
        self, object_list: list[Any], src: int = 0, device: Any = None, *, weights_only: bool = True
    ) -> None:
        """Give every member the objects of `src`'s `object_list`."""
        await self._in_lane(
            lambda: self._world.broadcast_object_list(object_list, src, device, weights_only=weights_only)
        )

    async def all_gather_object(self, object_list: list[Any], obj: Any, *, weights_only: bool = True) -> None:
        """Fill `object_list` with everyone's `obj`."""
        await self._in_lane(
            lambda: self._world.all_gather_object(object_list, obj, weights_only=weights_only)
        )

    async def gather_object(
        self,
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int = 0,
        *,
        weights_only: bool = True,
    ) -> None:
        """Fill `dst`'s `object_gather_list` with everyone's `obj`."""
        await self._in_lane(
            lambda: self._world.gather_object(obj, object_gather_list, dst, weights_only=weights_only)
        )

    async def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int = 0,
        *,
        weights_only: bool = True,
    ) -> None:
        """Put rank r's object of `src`'s list into ``scatter_object_output_list[0]`` of rank r."""
        await self._in_lane(
            lambda: self._world.scatter_object_list(
                scatter_object_output_list, scatter_object_input_list, src, weights_only=weights_only
            )
        )

    # -- how ----------------------------------------------------------------------------------------------------

    def _ending(self, work: Any, order: int = 0) -> AwaitedWork:
        """The end of a work of gloo's, for the running loop."""
        loop = asyncio.get_running_loop()
        queue = self._queue
        if queue is None or queue.loop() is not loop:
            from multiworld._c10d.gloo import waiting  # noqa: PLC0415  (a world exists, so torch is loaded)

            queue = self._queue = waiting.queue_of(loop)
            self._make = waiting.AwaitedWork
            self._sends, self._receives, self._others = waiting.Habit(), waiting.Habit(), waiting.Habit()
        ending: AwaitedWork = self._make(work, queue, loop, order)
        return ending

    async def _collective(self, gen: Generation, start: Callable[[], Any]) -> None:
        """Run a collective of gloo's to its end."""
        try:
            ending = self._ending(start())
        except Exception as exc:  # noqa: BLE001  (explained, and raised again)
            await self._raise(gen, exc)
        try:
            await self._ended(gen, ending, self._others)
        finally:
            del ending

    async def _ended(self, gen: Generation, ending: AwaitedWork, habit: Habit, nbytes: int = 0) -> None:
        """Wait for what need not be kept when nobody waits for it any more."""
        gen.expect(ending)
        try:
            await ending.until_over(habit, nbytes)
        except Exception as exc:  # noqa: BLE001  (explained, and raised again)
            await self._raise(gen, exc)
        finally:
            gen.expect_no_more(ending)
            del ending

    async def _post(self, gen: Generation, start: Callable[[], Any]) -> Any:
        """Run `start`, which does not block, here and now; only explaining an error is waited for."""
        try:
            with posting():
                return start()
        except Exception as exc:  # noqa: BLE001  (explained, and raised again)
            await self._raise(gen, exc)

    async def _raise(self, gen: Generation, error: Exception) -> NoReturn:
        """Raise what `gen` makes of `error`. That may wait for a verdict, so a waiter asks."""
        try:
            if isinstance(error, MultiworldError):
                raise error
            wrong = not_a_tensor(error)
            if wrong is not None:
                raise_instead(error, wrong)
            better = await self._on_waiter(functools.partial(gen.explain, error))
            gen.told()  # in the waiter's thread it was told already
            raise_instead(error, better)
        finally:
            better = None
            del error  # else this frame and the exception hold each other

    async def _op(self, name: str, *args: Any, **kwargs: Any) -> None:
        gen = self._world._gen  # noqa: SLF001  (its own)
        # As in `send`.
        await self._finish(
            gen,
            await self._post(gen, lambda: self._world._op(name, True, *args, **kwargs)),  # noqa: SLF001  (its own)
        )

    async def _finish(self, gen: Generation, work: Any) -> None:
        if work is None:
            return
        ready = self._ready(gen, work)
        del work
        try:
            await self._until(gen, ready)
        finally:
            del ready  # as in recv

    def _ready(self, gen: Generation, work: Any) -> asyncio.Future[Any]:
        from multiworld._c10d import completion  # noqa: PLC0415  (a world exists, so torch is loaded)

        inner = work._work if isinstance(work, WorldWork) else work  # noqa: SLF001  (its own)
        ready = completion.future_of(inner, asyncio.get_running_loop())
        if ready is None:
            ready = self._on_waiter(_of_world(work, gen).wait)
        return ready

    async def _until(self, gen: Generation, ready: asyncio.Future[Any]) -> None:
        gen.watch(ready)
        try:
            await asyncio.shield(ready)
        except Exception as exc:  # noqa: BLE001  (explained, and raised again)
            await self._raise(gen, exc)
        finally:
            del ready  # as in recv

    async def _in_lane(self, fn: Callable[[], Any]) -> Any:
        """Run `fn` on a waiter after those that were given before: object collectives take several steps."""
        before, context = self._before, contextvars.copy_context()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        self._before = done
        try:
            if before is not None and before.get_loop() is loop and not before.done():
                await asyncio.wait([before])
        except asyncio.CancelledError:
            # It never ran: who comes next waits for who came before.
            assert before is not None  # noqa: S101  (nothing else was awaited)
            before.add_done_callback(lambda _: _finished(done))
            raise
        running = self._on_waiter(lambda: context.run(fn))
        running.add_done_callback(lambda _: _finished(done))
        try:
            return await asyncio.shield(running)
        finally:
            del running  # as in recv

    def _on_waiter(self, fn: Callable[[], Any]) -> asyncio.Future[Any]:
        from multiworld._c10d import completion  # noqa: PLC0415  (same)

        future: asyncio.Future[Any] = completion.pool.wait(fn, asyncio.get_running_loop())
        # A future whose awaiter was cancelled may still fail: that is nobody's unhandled error.
        future.add_done_callback(seen)
        return future


def _of_world(work: Any, gen: Generation) -> WorldWork:
    return work if isinstance(work, WorldWork) else WorldWork(work, gen)


def _receiving(work: WorldWork, src: int | None) -> Callable[[], int]:
    """What waits for a receive, and tells whom the message came from."""

    def receive() -> int:
        work.wait()
        return src if src is not None else int(work._source_rank())  # noqa: SLF001  (torch's own recv reads it so)

    return receive


def _finished(lane: asyncio.Future[Any]) -> None:
    if not lane.done():
        lane.set_result(None)
