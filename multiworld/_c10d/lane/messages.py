"""The point-to-point operations of one generation of a world, on tensors of the CPU, over its lane.

Ranks are ranks of the world; a process group's own are translated where its messages are posted (`channels`).
A message's channel says which group it belongs to: messages of one group never match receives of another.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
import weakref
from operator import index
from typing import TYPE_CHECKING, NoReturn

from multiworld._c10d.futures import fail
from multiworld._c10d.lane import records, tensors
from multiworld._c10d.lane.work import LaneWork
from multiworld._core.lane.operations import Send, SizesDifferError
from multiworld._core.operations.log import ENDED
from multiworld._core.reraise import as_new, raise_instead
from multiworld._net.lane import destroyed_tasks
from multiworld._net.lane.awaiting import Watch
from multiworld._net.lane.background import background
from multiworld._net.lane.waiting import LateError
from multiworld.errors import SizeMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from multiworld._core.lane.operations import Receive
    from multiworld._core.operations.log import LoggedGroup, OperationLog
    from multiworld._net.lane.endpoint import Endpoint, Operation

__all__ = ["MAX_TAG", "Messages"]

MAX_TAG = 0x7FFF_FFFF
"""torch's tags are C++ ints."""

_READ_WRITE = 0x200  # PyBUF_WRITE
_view = tensors.memory_view
_profiled = records.profiled


class Messages:
    """See the module.

    Args:
        endpoint: of the lane; the caller ends it.
        world: name, for errors.
        timeout: seconds, of each operation.
        explain: makes of an error what an operation raises; may wait for a verdict.
        log: of the world's operations.

    Attributes:
        takes: ``(tensor) -> bool``: whether its messages go over the lane; others are torch's to decide.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        world: str,
        timeout: float,
        explain: Callable[[BaseException], BaseException],
        log: OperationLog,
    ) -> None:
        self.log = log
        self._logged, self._group, totals = log.append, log.world, log.totals
        self._sent, self._sent_bytes = totals.sent, totals.sent_bytes
        self._received, self._received_bytes = totals.received, totals.received_bytes
        self._posted = totals.posted
        self.endpoint = endpoint
        endpoint.left_alone = background.take_on
        self.world = world
        self.timeout = timeout
        self._explain = explain
        self._lock = threading.Lock()
        self._watches: dict[asyncio.AbstractEventLoop, Watch] = {}  # replaced as a whole

    takes = staticmethod(tensors.carried)

    # -- blocking --------------------------------------------------------------------------------------------

    # Every call costs: checks and views are written out here.

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send, in the world's own group, and wait until `tensor` may be reused.

        Raises:
            Exception: the lane's or this process's own, for `explain`.
        """
        if _profiled():
            self.endpoint.require_descriptor()
            self.post_send(tensor, dst, tag).wait()
            return
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            tensor = tensors.sendable(tensor)
        if not 0 <= (tag := index(tag)) <= MAX_TAG:
            raise _bad_tag(tag)
        address = tensor.data_ptr()
        view = _view(address or tensors.nowhere(tensor), tensor.nbytes, _READ_WRITE)
        now, size = time.monotonic(), len(view)
        self._logged(entry := [self._group, "send", None, size, dst, tag, now, None])
        try:
            self.endpoint.send(dst, 0, tag, view, now + self.timeout, address, tensor)
        except LateError:
            raise _late_send(dst, self.timeout) from None
        finally:
            entry[ENDED] = time.monotonic()
        self._sent[dst] += 1
        self._sent_bytes[dst] += size

    def receive(self, tensor: Tensor, src: int | None, tag: int = 0) -> int:
        """Receive, in the world's own group; returns the sender's rank. `src` None: any.

        Raises:
            SizeMismatchError: the message has another size.
            Exception: as `send`.
        """
        if _profiled():
            self.endpoint.require_descriptor()
            work = self.post_receive(tensor, src, tag)
            work.wait()
            return work.source_rank()
        given = tensor
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            given = tensors.landing(tensor)
        if not 0 <= (tag := index(tag)) <= MAX_TAG:
            raise _bad_tag(tag)
        view = _view(given.data_ptr() or tensors.nowhere(given), given.nbytes, _READ_WRITE)
        now, size = time.monotonic(), len(view)
        self._logged(entry := [self._group, "recv", None, size, src, tag, now, None])
        try:
            sender = self.endpoint.receive(src, 0, tag, view, now + self.timeout, given)
        except SizesDifferError as error:
            raise _mismatch(self.world, error) from None
        except LateError:
            raise _late_receive(src, self.timeout) from None
        finally:
            entry[ENDED] = time.monotonic()
        self._received[sender] += 1
        self._received_bytes[sender] += size
        if given is not tensor:
            tensors.copied_back(given, tensor)
        return sender

    # -- posted ----------------------------------------------------------------------------------------------

    def post_send(
        self, tensor: Tensor, dst: int, tag: int = 0, channel: int = 0, rank_of: Callable[[int], int] = int
    ) -> LaneWork:
        """Begin to send."""
        if _profiled():
            ended = records.begin("send", tensor, None)
            with records.posting("send"):
                send = self.begin_send(tensor, dst, tag, channel)
        else:
            send, ended = self.begin_send(tensor, dst, tag, channel), None
        if not send.done:
            background.take_on(self.endpoint, send)
        return LaneWork(self, send, tensor, rank_of, ended)

    def post_receive(
        self,
        tensor: Tensor,
        src: int | None,
        tag: int = 0,
        channel: int = 0,
        rank_of: Callable[[int], int] = int,
    ) -> LaneWork:
        """Begin to receive."""
        if _profiled():
            name = "recvAnySource" if src is None else "recv"
            with records.posting(name):
                receive, landed = self.begin_receive(tensor, src, tag, channel)
            landed = records.begin(name, tensor, landed)
        else:
            receive, landed = self.begin_receive(tensor, src, tag, channel)
        if not receive.done:
            background.take_on(self.endpoint, receive)
        return LaneWork(self, receive, tensor, rank_of, landed)

    def begin_send(self, tensor: Tensor, dst: int, tag: int = 0, channel: int = 0) -> Send:
        """Begin to send; the caller waits for it."""
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            tensor = tensors.sendable(tensor)
        if not 0 <= (tag := index(tag)) <= MAX_TAG:
            raise _bad_tag(tag)
        address = tensor.data_ptr()
        view = _view(address or tensors.nowhere(tensor), tensor.nbytes, _READ_WRITE)
        now = time.monotonic()
        send = self.endpoint.post_send(dst, channel, tag, view, address, tensor)
        group = self._of(channel)
        self._logged([group, "send", None, len(view), dst, tag, now, weakref.ref(send)])
        if group.number == channel:  # else it is a part of a state
            if send.done and send.error is None:  # as most are; a call would cost
                self._sent[dst] += 1
                self._sent_bytes[dst] += len(view)
            else:
                self._posted(send)
        return send

    def begin_receive(
        self, tensor: Tensor, src: int | None, tag: int = 0, channel: int = 0
    ) -> tuple[Receive, Callable[[], None] | None]:
        """Begin to receive; the caller waits for it, and then calls the second value, if there is one."""
        given, landed = tensor, None
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            given = tensors.landing(tensor)
            landed = functools.partial(tensors.copied_back, given, tensor)
        if not 0 <= (tag := index(tag)) <= MAX_TAG:
            raise _bad_tag(tag)
        view = _view(given.data_ptr() or tensors.nowhere(given), given.nbytes, _READ_WRITE)
        now = time.monotonic()
        receive = self.endpoint.post_receive(src, channel, tag, view, given)
        group = self._of(channel)
        self._logged([group, "recv", None, len(view), src, tag, now, weakref.ref(receive)])
        if group.number == channel:
            self._posted(receive)
        return receive, landed

    def _of(self, channel: int) -> LoggedGroup:
        return self.log.known(channel) if channel else self._group

    # -- the end of what was posted --------------------------------------------------------------------------

    def finish(self, operation: Operation, timeout: float = 0.0) -> None:
        """Wait until an operation is over.

        Args:
            operation: of this lane.
            timeout: seconds; 0: the world's.

        Raises:
            Exception: the world's error, or `SizeMismatchError`.
        """
        try:
            if not operation.done:
                self.endpoint.wait(operation, time.monotonic() + (timeout or self.timeout))
            error = operation.error
        except LateError:
            error = self._late(operation, timeout or self.timeout)
        except ConnectionAbortedError as forked:
            error = ConnectionAbortedError(*forked.args)  # without its frames, which would hold it
        if error is not None:
            self.raise_explained(error)

    def raise_explained(self, error: Exception) -> NoReturn:
        """Raise what an operation raises that ended with `error`; may wait for a verdict."""
        told = self.told(error)
        try:
            raise_instead(told, self._explain(told))
        finally:
            del error, told  # else this frame and the exception hold each other

    def explained(self, error: Exception) -> Exception:
        """Return what waiting for an operation raises that ended with `error`; may wait for a verdict."""
        told = self.told(error)
        found = self._explain(told)
        return found if isinstance(found, Exception) else told

    def told(self, error: Exception) -> Exception:
        """Return a lane's error as a new one, to be raised: the sizes' in the world's words."""
        if isinstance(error, SizesDifferError):
            return _mismatch(self.world, error)
        return as_new(error)

    def _late(self, operation: Operation, seconds: float) -> TimeoutError:
        if isinstance(operation, Send):
            return _late_send(operation.peer, seconds)
        return _late_receive(operation.source, seconds)

    # -- awaited ---------------------------------------------------------------------------------------------

    async def until_over(self, operation: Operation) -> None:
        """Wait for an operation in the running loop; cancelled, it goes on.

        Raises:
            TimeoutError: it took longer than the world's timeout.
        """
        watch = self.watch_of(asyncio.get_running_loop())
        try:
            over = await watch.until_over(operation, self.timeout)
        except BaseException as error:
            if isinstance(operation, Send) and not operation.done:
                go_on = functools.partial(background.take_on, self.endpoint, operation)
                destroyed_tasks.run(go_on) if isinstance(error, GeneratorExit) else go_on()
            raise
        if not over:
            raise self._late(operation, self.timeout)

    def take_back(self, receive: Receive, error: BaseException, keep: object) -> None:
        """Take back a receive whose task ends with `error`: its message goes to the next one.

        Args:
            receive: over or not.
            error: that ends the task.
            keep: what holds the memory into which it received.
        """

        def take_back(_keep: object = keep) -> None:
            self.endpoint.take_back(receive)

        destroyed_tasks.run(take_back) if isinstance(error, GeneratorExit) else take_back()

    def watch_of(self, loop: asyncio.AbstractEventLoop) -> Watch:
        """Return the loop's one watch: two would take its descriptors from each other."""
        watch = self._watches.get(loop)
        if watch is None:
            with self._lock:  # other loops run in other threads
                before = self._watches
                living = {each: kept for each, kept in before.items() if not each.is_closed()}
                watch = living[loop] = Watch(self.endpoint, loop)
                self._watches = living
            for each in before.keys() - living.keys():  # without the lock: the tasks' own code may run
                before[each].give_up()
        return watch

    def when_over(self, work: LaneWork, future: torch.futures.Future[list[Tensor]]) -> None:
        """Complete torch's `future` when a work is over, in a thread of the pool."""
        from multiworld._c10d.waiter_pool import pool  # noqa: PLC0415  (only who asks for a future pays)

        once = [work]

        def complete() -> None:
            try:
                once.pop()
            except IndexError:
                return  # it was told twice
            try:
                work.wait()
            except Exception as error:
                fail(future, error)
            else:
                future.set_result(work.result())

        if not self.endpoint.when_over(work.operation, lambda: pool.run(complete, later=True)):
            complete()


def _mismatch(world: str, error: SizesDifferError) -> SizeMismatchError:
    return SizeMismatchError(
        world,
        f"rank {error.sender} of world {world!r} sent {error.sent} bytes, "
        f"and the tensor to receive has {error.expected}",
        rule="Both ends give tensors of the same number of bytes",
        next_step="Compare shape and dtype on both; the message is gone, and the world goes on",
        sent=error.sent,
        expected=error.expected,
        sender=error.sender,
    )


def _late_send(peer: int, seconds: float) -> TimeoutError:
    return TimeoutError(f"a send to rank {peer} timed out: not received within {seconds:g} s")


def _late_receive(source: int | None, seconds: float) -> TimeoutError:
    sender = "any rank" if source is None else f"rank {source}"
    return TimeoutError(f"a receive from {sender} timed out: no message within {seconds:g} s")


def _bad_tag(tag: int) -> ValueError:
    return ValueError(f"tag {tag}. Tags are 0 to {MAX_TAG}. Choose another, the same on both ends.")
