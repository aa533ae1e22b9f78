"""World.aio: the collectives of a world, awaitable and cancellable.

An operation is posted when it is first awaited, or when its task first runs, in that order; one that would come
between the steps of an object operation, or before a collective that waits for torch's group, is posted after
them (`multiworld.turns`).
Messages of the lane are awaited in the loop itself (`multiworld._net.lane.awaiting`), gloo's collectives the
short way (`multiworld._c10d.gloo.await_work`), all else by a kept thread, or the future of the work where torch
has one. Cancelling ends the waiting: a receive of the lane is taken back, and the next one gets its message;
what torch carries goes on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import time
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from multiworld._core.operations.log import ENDED, SIZE
from multiworld._core.reraise import as_new, raise_instead
from multiworld._generation.generation_errors import posting
from multiworld.errors import MultiworldError
from multiworld.events import State
from multiworld.objects import ComingList, OneGeneration
from multiworld.operation_table import TABLE, better, call, peer, reraise
from multiworld.turns import COLLECTIVE, RECEIVE, SEND, batch, collective, message, own_turn
from multiworld.uninterrupted import stream_of_caller
from multiworld.work import seen

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    import torch
    from torch import Tensor
    from torch.distributed import P2POp, Work

    from multiworld._c10d.gloo.await_work import AwaitedWork, Habit, LoopQueue
    from multiworld._c10d.lane.work import MessagesOfWork
    from multiworld._generation.generation import Generation
    from multiworld._net.lane.endpoint import Operation
    from multiworld.objects import ObjectCollectives
    from multiworld.operation_table import ReduceOperation
    from multiworld.turns import Turn, Turns, Way
    from multiworld.work import WorldWork

__all__ = ["Aio", "AioWork"]

_T = TypeVar("_T")

_AGAIN = 0.1
"""Seconds until a thread is asked for again that waits for what is posted."""

_TURN = 10
"""Operations that may end at once in a row; then the loop's other tasks get a turn."""


class AioWork:
    """A started operation; ``await work`` (or ``await work.wait()``) until it is done, as often as one likes."""

    def __init__(self, aio: Aio, gen: Generation, work: WorldWork) -> None:
        self._aio = aio
        self._gen = gen
        # It lets go of torch's work when the world breaks; who keeps this one need not keep gloo's device.
        self.work = work
        self._waited: concurrent.futures.Future[bool] | None = None

    async def wait(self) -> None:
        """Wait until the operation is done. A cancellation ends the waiting only; it may be awaited again."""
        message = self.work.message
        if message is not None:
            await self._aio._over(self._gen, message.messages, message.operation)
            message.land()
            return
        if self._waited is None:
            # One thread: two that wait for one receive of gloo's would take two messages.
            self._waited = _once(self.work.wait)
        await self._aio._until(self._gen, _watched(self._gen, self.work, _anew(self._waited)))

    def __await__(self) -> Generator[object, None, None]:
        return self.wait().__await__()


class Aio:
    """The awaitable face of one world; see `multiworld.World` for what each operation does and raises."""

    # Set with `_queue`, the second is what was learned about awaiting; before, nothing asks.
    _make: type[AwaitedWork]
    _habit: Habit

    def __init__(self, world: ObjectCollectives, turns: Turns) -> None:
        self._world = world
        self._turns = turns
        self._taken = self._turns.taken  # empty as a rule: an operation asks that, and pays for no more
        self._making: asyncio.Task[object] | None = None  # of the last message that waits for torch's group
        self._in_a_row = 0  # operations of the lane that ended without a turn of the loop
        self._queue: LoopQueue | None = None  # of the loop that was last used

    def _forked(self, turns: Turns) -> None:
        """In a forked child: what the turns that were taken wait for goes on in the parent alone."""
        self._turns, self._taken, self._making = turns, turns.taken, None

    # -- point to point --------------------------------------------------------------------------------------

    async def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send `tensor` to rank `dst`. After a cancellation the message may still be delivered."""
        if self._taken and self._turns.hold(message(SEND, dst, tag, tensor)):
            await (await self.isend(tensor, dst, tag))
            return
        gen = self._world._gen
        try:
            lane = gen.lane
            send = None
            if lane is not None and lane.takes(tensor):
                send = lane.begin_send(tensor, peer(gen, dst), tag)
        except Exception as exc:
            await self._raise(gen, exc)
        if lane is None or send is None:
            # No name for the work here: an error that is kept would keep it, and with it gloo's device.
            started = await self._post_by_torch(gen, lambda: self._of(gen).isend(tensor, dst, tag))
            await self._finish(gen, started)
            return
        await self._over(gen, lane, send)

    async def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        """Receive into `tensor` from rank `src` (None: the first that sends); returns the sender's rank.

        A receive that is cancelled is taken back: its message goes to the next one.
        """
        gen = self._world._gen
        if self._taken and self._turns.hold(ways := message(RECEIVE, src, tag, tensor)):
            turn = self._turns.take(ways)
            try:
                return await self._recv_in_turn(gen, turn, tensor, src, tag)
            finally:
                turn.over()
        try:
            lane = gen.lane
            receive = None
            if lane is not None and lane.takes(tensor):
                receive, landed = lane.begin_receive(tensor, None if src is None else peer(gen, src), tag)
        except Exception as exc:
            await self._raise(gen, exc)
        if lane is None or receive is None:
            return await self._recv(gen, tensor, src, tag)
        try:
            await self._over(gen, lane, receive)
        except BaseException as error:
            lane.take_back(receive, error, (tensor, landed))
            raise
        if landed is not None:
            landed()
        assert receive.sender is not None  # noqa: S101  (it has a message)
        return receive.sender

    async def _recv_in_turn(
        self, gen: Generation, turn: Turn, tensor: Tensor, src: int | None, tag: int = 0
    ) -> int:
        """`recv` once `turn` has come, which is not over then; the usual way does not pay for this call."""
        await turn.come()
        lane = gen.lane
        if lane is None or not lane.takes(tensor):
            return await self._recv(gen, tensor, src, tag)
        try:
            receive, landed = lane.begin_receive(tensor, None if src is None else peer(gen, src), tag)
        except Exception as exc:
            await self._raise(gen, exc)
        try:
            await self._over(gen, lane, receive)
        except BaseException as error:
            lane.take_back(receive, error, (tensor, landed))
            raise
        if landed is not None:
            landed()
        assert receive.sender is not None  # noqa: S101  (it has a message)
        return receive.sender

    async def _recv(self, gen: Generation, tensor: Tensor, src: int | None, tag: int) -> int:
        """Receive what torch carries. It cannot take back what was posted: cancelled, it stays so."""
        work = await self._post_by_torch(gen, lambda: self._of(gen).irecv(tensor, src, tag))
        waiting = _watched(gen, work, self._posted_on_waiter(_receiving(work, src)))
        del work
        try:
            source = await asyncio.shield(waiting)
        finally:
            # The future holds an error, its traceback this frame: without this the frame would hold the
            # future.
            del waiting
        return source

    async def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> AioWork:
        """Start a send; await the returned work."""
        gen = self._world._gen
        turn = await self._turn(message(SEND, dst, tag, tensor)) if self._taken else None
        try:
            post = self._post if _over_lane(gen, tensor) else self._post_by_torch
            return AioWork(self, gen, await post(gen, lambda: self._of(gen).isend(tensor, dst, tag)))
        finally:
            if turn is not None:
                turn.over()

    async def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> AioWork:
        """Start a receive; `tensor` holds the message once the returned work was awaited."""
        gen = self._world._gen
        turn = await self._turn(message(RECEIVE, src, tag, tensor)) if self._taken else None
        try:
            post = self._post if _over_lane(gen, tensor) else self._post_by_torch
            return AioWork(self, gen, await post(gen, lambda: self._of(gen).irecv(tensor, src, tag)))
        finally:
            if turn is not None:
                turn.over()

    async def batch_isend_irecv(self, p2p_op_list: list[P2POp]) -> list[AioWork]:
        """Start the sends and receives of `p2p_op_list`; await each of the returned works."""
        gen = self._world._gen
        turn = await self._turn(batch(p2p_op_list)) if self._taken else None
        try:
            works = await self._post_by_torch(gen, lambda: self._of(gen).batch_isend_irecv(p2p_op_list))
        finally:
            if turn is not None:
                turn.over()
        return [AioWork(self, gen, work) for work in works]

    # -- collectives -----------------------------------------------------------------------------------------

    async def broadcast(self, tensor: Tensor, src: int) -> None:
        """Give every member `src`'s `tensor`."""
        await self._do("broadcast", tensor, src)

    async def all_reduce(self, tensor: Tensor, op: ReduceOperation | None = None) -> None:
        """Reduce everyone's `tensor` in place, in everyone."""
        await self._do("all_reduce", tensor, op)

    async def reduce(self, tensor: Tensor, dst: int, op: ReduceOperation | None = None) -> None:
        """Reduce everyone's `tensor` into `dst`'s."""
        await self._do("reduce", tensor, dst, op)

    async def all_gather(self, tensor_list: list[Tensor], tensor: Tensor) -> None:
        """Collect everyone's `tensor` in everyone's `tensor_list`."""
        await self._do("all_gather", tensor_list, tensor)

    async def all_gather_into_tensor(self, output_tensor: Tensor, input_tensor: Tensor) -> None:
        """Collect all `input_tensor`s in one tensor."""
        await self._do("all_gather_into_tensor", output_tensor, input_tensor)

    async def gather(self, tensor: Tensor, gather_list: list[Tensor] | None = None, dst: int = 0) -> None:
        """Collect everyone's `tensor` in `dst`'s `gather_list`."""
        await self._do("gather", tensor, gather_list, dst)

    async def scatter(self, tensor: Tensor, scatter_list: list[Tensor] | None = None, src: int = 0) -> None:
        """Give each rank its tensor of `src`'s `scatter_list`."""
        await self._do("scatter", tensor, scatter_list, src)

    async def reduce_scatter(
        self, output: Tensor, input_list: list[Tensor], op: ReduceOperation | None = None
    ) -> None:
        """Reduce everyone's `input_list` and give each rank its part."""
        await self._do("reduce_scatter", output, input_list, op)

    async def reduce_scatter_tensor(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002  (torch's name)
        op: ReduceOperation | None = None,
    ) -> None:
        """Reduce everyone's `input` and give each rank its part."""
        await self._do("reduce_scatter_tensor", output, input, op)

    async def all_to_all(self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor]) -> None:
        """Give rank r this rank's ``input_tensor_list[r]``, and get one from each."""
        await self._do("all_to_all", output_tensor_list, input_tensor_list)

    async def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002  (torch's name)
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
    ) -> None:
        """Give rank r part r of `input`."""
        await self._do("all_to_all_single", output, input, output_split_sizes, input_split_sizes)

    async def barrier(self, device_ids: Sequence[int] | None = None) -> None:
        """Return when every member has called it."""
        await self._do("barrier", None if device_ids is None else list(device_ids))

    # -- objects ---------------------------------------------------------------------------------------------

    async def send_object_list(
        self, object_list: list[Any], dst: int, device: torch.device | None = None
    ) -> None:
        """Send the objects of `object_list` to rank `dst`."""
        here = self._of(self._world._gen)
        turn = self._turns.take(message(SEND, dst, 0, device or here.device))
        await self._in_turn(turn, functools.partial(here.send_objects, object_list, dst, device, turn.over))

    async def recv_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        device: torch.device | None = None,
        *,
        weights_only: bool = True,
    ) -> int:
        """Fill `object_list`; returns the sender's rank.

        One of the CPU that is cancelled before anything has come is taken back, as a tensor's receive is; all
        others are received nevertheless, and lost.
        """
        gen = self._world._gen
        here = self._of(gen)
        device = device or here.device
        coming = ComingList(object_list, device)

        def whole() -> int:
            return here.recv_object_list(object_list, src, device, weights_only=weights_only)

        over_lane = coming.over_lane(gen)  # or the world is over: no turn is taken then
        turn = self._turns.take(message(RECEIVE, src, 0, device))
        if not over_lane:
            return int(await self._in_turn(turn, whole))  # a task would end with its loop
        try:
            sender = await self._recv_in_turn(gen, turn, coming.sizes, src)
            # No await before: from here on the data comes in, whatever becomes of this task or its loop.
            data = await self._post_data(here, coming, sender)
        finally:
            turn.over()
        await data
        fill = functools.partial(coming.fill, sender, weights_only=weights_only)
        try:
            filled = self._on_waiter(fill)
        except RuntimeError:  # the process gets no thread
            fill()
        else:
            await filled
        return sender

    async def _post_data(self, here: OneGeneration, coming: ComingList, sender: int) -> AioWork:
        """Post the receive of a list's data, once its sizes have come; awaits nothing but an error's explanation."""
        try:
            with posting():
                return AioWork(self, here._gen, here.irecv(coming.room(), sender))
        except Exception as exc:
            await self._on_waiter(functools.partial(_left_out, here, exc))
            raise

    async def broadcast_object_list(
        self,
        object_list: list[Any],
        src: int = 0,
        device: torch.device | None = None,
        *,
        weights_only: bool = True,
    ) -> None:
        """Give every member the objects of `src`'s `object_list`."""
        await self._objects("broadcast_object_list", object_list, src, device, weights_only=weights_only)

    async def all_gather_object(
        self, object_list: list[Any], obj: object, *, weights_only: bool = True
    ) -> None:
        """Fill `object_list` with everyone's `obj`."""
        await self._objects("all_gather_object", object_list, obj, weights_only=weights_only)

    async def gather_object(
        self,
        obj: object,
        object_gather_list: list[Any] | None = None,
        dst: int = 0,
        *,
        weights_only: bool = True,
    ) -> None:
        """Fill `dst`'s `object_gather_list` with all ranks' `obj`."""
        await self._objects("gather_object", obj, object_gather_list, dst, weights_only=weights_only)

    async def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int = 0,
        *,
        weights_only: bool = True,
    ) -> None:
        """Put rank r's object of `src`'s list into ``scatter_object_output_list[0]`` of rank r."""
        await self._objects(
            "scatter_object_list",
            scatter_object_output_list,
            scatter_object_input_list,
            src,
            weights_only=weights_only,
        )

    # -- how -------------------------------------------------------------------------------------------------

    def _of(self, gen: Generation) -> OneGeneration:
        """The world in the generation in which an operation was called: the next one's members do not call it."""
        return OneGeneration(self._world, gen)

    async def _over(self, gen: Generation, lane: MessagesOfWork, operation: Operation) -> None:
        """Wait until a message of the lane has come, or gone.

        Raises:
            asyncio.CancelledError: it goes on.
            Exception: the world's error, or `SizeMismatchError`.
        """
        if operation.done:
            self._in_a_row += 1
            if self._in_a_row >= _TURN:  # other tasks get theirs
                self._in_a_row = 0
                await asyncio.sleep(0)
        else:
            self._in_a_row = 0
            try:
                await lane.until_over(operation)
            except Exception as exc:
                await self._raise(gen, exc)
        if operation.error is not None:
            await self._raise(gen, lane.told(operation.error))

    def _ending(self, work: Work) -> AwaitedWork:
        """The end of a work of gloo's, for the running loop."""
        loop = asyncio.get_running_loop()
        queue = self._queue
        if queue is None or queue.loop() is not loop:
            from multiworld._c10d.gloo import await_work  # noqa: PLC0415  (a world exists, so torch is loaded)

            queue = self._queue = await_work.queue_of(loop)
            self._make = await_work.AwaitedWork
            self._habit = await_work.Habit()
        return self._make(work, queue, loop)

    async def _do(self, name: str, *args: object) -> None:
        """Run the collective `name` to its end."""
        row, gen = TABLE[name], self._world._gen
        if self._taken and self._turns.hold(COLLECTIVE):
            await self._blocking(gen, name, *args)
            return
        work = ending = entry = None
        try:
            lane = gen.collectives
            collective = None
            by_torch = lane is not None and lane.by_torch()
            if lane is not None and lane.default is not None and not by_torch:
                collective = row.over_lane(lane.default, *args)
        except Exception as exc:
            await self._raise(gen, exc)
        if lane is not None and collective is not None:
            try:
                await lane.until_over(collective)
            except Exception as exc:
                await self._raise(gen, exc)
            self._in_a_row += 1
            if self._in_a_row >= _TURN:  # it may have been over at once; other tasks get their turns
                self._in_a_row = 0
                await asyncio.sleep(0)
            return
        if lane is not None and lane.checks:  # to compare the calls blocks
            await self._blocking(gen, name, *args)
            return
        if row.post is not None and not by_torch:
            try:
                work = row.post(gen, *args)
                if work is not None:
                    entry = gen.operations.begun(name, args)
                    ending = self._ending(work)
            except Exception as exc:
                await self._raise(gen, exc)
            finally:
                work = None  # an error that is kept would keep it, and with it gloo's device
        if ending is None:
            post = functools.partial(call, gen, row, args, async_op=True)
            await self._finish(gen, await self._post_collective(gen, post))
            return
        try:
            await self._ended(gen, ending)
            if entry is not None:
                totals = gen.operations.totals  # written out, as a call would cost
                totals.collectives[name] += 1
                totals.collective_bytes[name] += entry[SIZE]
        finally:
            if entry is not None:
                entry[ENDED] = time.monotonic()
            del ending

    async def _ended(self, gen: Generation, ending: AwaitedWork) -> None:
        """Wait for an operation that need not be kept once its task has stopped waiting."""
        gen.expect(ending)
        try:
            await ending.until_over(self._habit)
        except Exception as exc:
            await self._raise(gen, exc)
        finally:
            gen.expect_no_more(ending)
            del ending

    async def _post(self, gen: Generation, start: Callable[[], _T]) -> _T:
        """Run `start`, which does not block, here and now; only explaining an error is waited for."""
        try:
            with posting(), own_turn():
                return start()
        except Exception as exc:
            await self._raise(gen, exc)

    async def _post_collective(self, gen: Generation, start: Callable[[], _T]) -> _T:
        """`_post`, of a collective. Where torch's group is to be made first, those called meanwhile come after it."""
        if gen.stands:
            return await self._post(gen, start)
        return await self._in_turn(self._turns.take(COLLECTIVE), start, goes_on=True)

    async def _post_by_torch(self, gen: Generation, start: Callable[[], _T]) -> _T:
        """`_post`, of messages that need torch's group: that is waited for, in the order of the callers.

        Cancelled meanwhile, they are posted all the same.
        """
        before = self._making
        if before is None and gen.stands:
            return await self._post(gen, start)
        self._making = task = asyncio.create_task(self._post_after(before, gen, start))
        task.add_done_callback(self._posted)
        try:
            return await asyncio.shield(task)
        finally:
            del task  # it has the error, which has this frame

    async def _post_after(
        self, before: asyncio.Task[object] | None, gen: Generation, start: Callable[[], _T]
    ) -> _T:
        if before is not None and before.get_loop() is asyncio.get_running_loop() and not before.done():
            await asyncio.wait([before])
        if not gen.stands:
            try:
                await self._on_waiter(gen.make)
            except Exception as exc:
                await self._raise(gen, exc)
        return await self._post(gen, start)

    def _posted(self, task: asyncio.Task[object]) -> None:
        seen(task)  # perhaps no caller waits any more
        if self._making is task:
            self._making = None

    async def _raise(self, gen: Generation, error: Exception) -> NoReturn:
        """Raise what `gen` makes of `error`. That may wait for a verdict, so a waiter asks."""
        try:
            if isinstance(error, MultiworldError):
                raise error
            instead: BaseException | None = await self._on_waiter(functools.partial(better, gen, error))
            if gen.state is not State.ACTIVE:
                gen.told()  # in the waiter's thread it was told already
            raise_instead(error, instead)
        finally:
            instead = None
            del error  # else this frame and the exception hold each other

    async def _finish(self, gen: Generation, work: WorldWork | None) -> None:
        if work is None:
            return
        ready = _watched(gen, work, self._ready(work))
        del work
        try:
            await self._until(gen, ready)
        finally:
            del ready  # it has the error, which has this frame

    def _ready(self, work: WorldWork) -> asyncio.Future[object]:
        from multiworld._c10d import waiter_pool  # noqa: PLC0415  (a world exists, so torch is loaded)

        ready = waiter_pool.future_of(work._work, asyncio.get_running_loop())
        return self._posted_on_waiter(work.wait) if ready is None else ready

    async def _until(self, gen: Generation, ready: asyncio.Future[_T]) -> None:
        try:
            await asyncio.shield(ready)
        except Exception as exc:
            await self._raise(gen, exc)
        finally:
            del ready  # it has the error, which has this frame

    async def _turn(self, ways: Sequence[Way]) -> Turn | None:
        """Wait for the turn of an operation on `ways`; None if it needs none."""
        if not self._turns.hold(ways):
            return None
        turn = self._turns.take(ways)
        await turn.come()
        return turn

    async def _objects(self, name: str, *args: object, **kwargs: object) -> None:
        """Run the object collective `name` in its turn; cancelled before, it goes on: the other members wait for it."""
        here = self._of(self._world._gen)
        turn = self._turns.take(collective(here.device))
        run = functools.partial(getattr(here, name), *args, **kwargs)
        await self._in_turn(turn, run, goes_on=True)

    async def _blocking(self, gen: Generation, name: str, *args: object) -> None:
        """Run the collective `name` in its turn, as `_objects` does."""
        run = functools.partial(self._of(gen)._do, name, False, *args)
        await self._in_turn(self._turns.take(COLLECTIVE), run, goes_on=True)

    async def _in_turn(self, turn: Turn, fn: Callable[[], _T], *, goes_on: bool = False) -> _T:
        """Run `fn`, which blocks, on a waiter once `turn` has come, which then is over.

        Cancelled while it runs, it goes on; cancelled before, only if `goes_on`.
        """
        running = self._begin(turn, fn)
        try:
            return await asyncio.shield(running)
        finally:
            if not goes_on:
                turn.give_up()
            del running  # it has the error, which has this frame

    def _begin(self, turn: Turn, fn: Callable[[], _T]) -> asyncio.Future[_T]:
        from multiworld._c10d import waiter_pool  # noqa: PLC0415  (a world exists, so torch is loaded)

        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        stream = stream_of_caller()
        turn.loop = None  # from here on a thread does it
        running: asyncio.Future[_T] = loop.create_future()
        running.add_done_callback(seen)

        def run() -> _T:
            try:
                with own_turn(), stream():
                    return context.run(fn)
            finally:
                turn.over()

        def begin() -> None:
            try:
                waiter_pool.pool.run(waiter_pool.outcome_of(run, loop, running))
            except RuntimeError as error:  # the process gets no other thread
                turn.over()
                waiter_pool.fail(loop, running, error)

        turn.when_come(begin)
        return running

    def _on_waiter(self, fn: Callable[[], _T]) -> asyncio.Future[_T]:
        from multiworld._c10d import waiter_pool  # noqa: PLC0415  (a world exists, so torch is loaded)

        future = waiter_pool.pool.wait(fn, asyncio.get_running_loop())
        # A future whose awaiter was cancelled may still fail: that is not an unhandled error.
        future.add_done_callback(seen)
        return future

    def _posted_on_waiter(self, wait: Callable[[], _T]) -> asyncio.Future[_T]:
        """`_on_waiter`, for what is posted: where the process gets no thread now, as soon as it gets one."""
        from multiworld._c10d import waiter_pool  # noqa: PLC0415  (a world exists, so torch is loaded)

        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()
        future.add_done_callback(seen)
        job = waiter_pool.outcome_of(wait, loop, future)

        def give() -> None:
            try:
                waiter_pool.pool.run(job)
            except RuntimeError:
                loop.call_later(_AGAIN, give)

        give()
        return future


def _watched(gen: Generation, work: WorldWork, ready: asyncio.Future[_T]) -> asyncio.Future[_T]:
    """Return `ready`, a wait for `work`, which fails where the end of `gen` leaves it waiting.

    NCCL's is left alone: it may write into its tensors until the abort has ended, and then its waiter raises.
    """
    from multiworld._c10d import waiter_pool  # noqa: PLC0415  (a world exists, so torch is loaded)

    if not waiter_pool.raises_last(work._work):
        gen.watch(ready)
    return ready


def _anew(waited: concurrent.futures.Future[bool]) -> asyncio.Future[bool]:
    """Return a future of the running loop that fails with a new exception; see `as_new`."""
    found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def settle(over: asyncio.Future[bool]) -> None:
        error = over.exception()
        if found.done():
            return
        if error is None:
            found.set_result(over.result())
        else:
            found.set_exception(as_new(error))

    asyncio.wrap_future(waited).add_done_callback(settle)
    return found


def _once(wait: Callable[[], bool]) -> concurrent.futures.Future[bool]:
    """Wait on a thread, for all that ask."""
    from multiworld._c10d.waiter_pool import pool  # noqa: PLC0415  (a world exists, so torch is loaded)

    future: concurrent.futures.Future[bool] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # else a task that is cancelled would cancel it

    def run() -> None:
        try:
            done = wait()
        except BaseException as error:  # it is raised where the work is awaited
            future.set_exception(as_new(error))  # without its frames, which hold what holds the error
        else:
            future.set_result(done)

    pool.run(run)
    return future


def _receiving(work: WorldWork, src: int | None) -> Callable[[], int]:
    """What waits for a receive, and tells whom the message came from."""

    def receive() -> int:
        work.wait()
        return src if src is not None else int(work._source_rank())  # as torch's recv

    return receive


def _left_out(here: OneGeneration, error: Exception) -> NoReturn:
    """Raise what a list ends with whose sizes have come, and whose data is not received."""
    try:
        with here.steps("recv_object_list", begun=True):
            reraise(here._gen, error)
    finally:
        del error  # else this frame and the exception hold each other


def _over_lane(gen: Generation, tensor: Tensor) -> bool:
    return gen.lane is not None and gen.lane.takes(tensor)
