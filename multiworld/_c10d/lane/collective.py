"""One collective over the lane, from the call to its end: its messages, and who sees to them.

A thread that waits drives it (`wait`), or an event loop (`awaited`). One that was posted is driven by who
waits for its work, or by the process's background thread; one at a time. Where the one that drives is
interrupted or cancelled, the background thread goes on: the other members are in it, too.

It has its place in the order that all members share from its beginning on; one that is interrupted, or
refused, before that was not called. Python looks for signals after each call. So what must not be lost is
taken by `for`, which stores what it is given before Python looks.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
import time
from typing import TYPE_CHECKING, Any, cast

import torch

from multiworld._c10d.lane import tensors
from multiworld._c10d.lane.reducing import reduce_into
from multiworld._core.lane.operations import SizesDifferError
from multiworld._core.lane.schedules import Want
from multiworld._core.operations.log import ENDED, went_well
from multiworld._core.reraise import as_new, raised_by_the_program
from multiworld._net.lane import destroyed_tasks
from multiworld._net.lane.background import background
from multiworld._net.lane.waiting import LateError, seconds_until
from multiworld.errors import MultiworldError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from multiworld._c10d.lane.reducing import Kernel, Scratch
    from multiworld._core.lane.operations import Receive, Send
    from multiworld._core.lane.schedules import Steps
    from multiworld._core.operations.log import Entry
    from multiworld._net.lane.awaiting import Watch
    from multiworld._net.lane.endpoint import Endpoint

__all__ = ["Collective"]

_READ_WRITE = 0x200  # PyBUF_WRITE
_NUMBER = 13  # bytes: no tensor has as many but one of 13 elements of a byte each
_AT_ONCE = 4  # steps without a turn of the loop, each at most a piece
_view = tensors.memory_view


def _bytes(buffer: Tensor) -> memoryview:
    return _view(buffer.data_ptr() or tensors.nowhere(buffer), buffer.nbytes, _READ_WRITE)


def _none() -> Steps[Tensor]:
    yield from ()


def _failed(name: str, error: Exception) -> ConnectionAbortedError:
    """Return what breaks the world, for an error of this member alone."""
    found = ConnectionAbortedError(f"{name} failed with {type(error).__name__}: {error}")
    found.__cause__ = error
    return found


class Collective:
    """See the module. The `Line` of its own schedule.

    Args:
        name: as torch has it, "all_reduce".
        endpoint: of the world's lane.
        channel: of the group's collectives.
        ranks: of the group's members in the world.
        rank: of this process in the group.
        timeout: seconds.
        outputs: what its work's ``result`` is.
        entry: in the log of the world's operations.
        number: sets its `tag`, and logs it.

    Attributes:
        steps: its schedule; set once.
        tag: of its messages; -1 before it begins.
        entry: as given.
        first: called before it has its `tag`: changes this member's tensors.
        done: whether it is over.
        error: why it failed; None if it did not.
        recorded: called once when it is over: ends the profiler's record.
        failed: called once with the error by the background thread, where no caller waits.
    """

    __slots__ = (
        "__weakref__", "_callers", "_claim", "_deadline", "_kernel", "_last", "_memory", "_number",
        "_pending", "_scratch", "_sends",
        "channel", "done", "endpoint", "entry", "error", "failed", "first", "name", "outputs", "rank",
        "ranks", "recorded", "size", "steps", "tag", "timeout",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        channel: int,
        ranks: Sequence[int],
        rank: int,
        timeout: float,
        outputs: Any,
        kernel: Kernel | None,
        scratch: Scratch,
        entry: Entry,
        number: Callable[[Collective], None],
    ) -> None:
        self.name = name
        self.endpoint = endpoint
        self.channel = channel
        self.tag = -1
        self.ranks = ranks
        self.rank = rank
        self.size = len(ranks)
        self.timeout = timeout
        self.outputs = outputs
        self.steps: Steps[Tensor] = _none()
        self._last: list[Callable[[], None]] = []
        self.failed: Callable[[Exception], None] | None = None
        self.first: Callable[[], None] | None = None
        self.done = False
        self._callers = 0  # threads and tasks that wait for it
        self.error: Exception | None = None
        self.recorded: Callable[[], None] | None = None
        self._kernel = kernel
        self._scratch = scratch
        self._memory: list[Tensor] = []
        self._sends: list[Send] = []
        self._pending: Want[Tensor] | Send | Receive | None = None
        self._claim = threading.Lock()  # held by who drives
        self.entry = entry
        self._number = number
        self._deadline = time.monotonic() + timeout

    @property
    def has_caller(self) -> bool:
        """Whether a thread or a task waits for it."""
        return self._callers > 0

    # -- the line --------------------------------------------------------------------------------------------

    def send(self, peer: int, buffer: Tensor) -> Send:
        """Post a message to a rank of the group."""
        view, address = _bytes(buffer), buffer.data_ptr()
        send = self.endpoint.post_send(self.ranks[peer], self.channel, self.tag, view, address, buffer)
        if not send.done:
            self._sends.append(send)
        return send

    def reduce(self, first: Tensor, second: Tensor, into: Tensor) -> None:
        """See `Line`."""
        reduce_into(cast("Kernel", self._kernel), first, second, into)

    def number(self, value: int) -> Tensor:
        """See `Line`."""
        return torch.tensor(list(value.to_bytes(_NUMBER, "little")), dtype=torch.uint8, device="cpu")

    def compare(self, peer: int, buffer: Tensor, value: int) -> None:
        """See `Line`."""
        if (theirs := int.from_bytes(bytes(buffer.tolist()), "little")) != value:
            raise self._mismatch(SizesDifferError(theirs, value, self.ranks[peer]))

    def scratch(self, like: Tensor) -> Tensor:
        """See `Line`; the memory is given back at the end."""
        if self._memory and self._memory[-1].nbytes >= like.nbytes:
            return self._memory[-1][: like.nbytes].view(like.dtype).view(like.shape)
        given, memory = self._scratch.take(like)
        if memory is not None:
            self._memory.append(memory)
        return given

    def finally_(self, call: Callable[[], None]) -> None:
        """Have `call` called once when all went well, by who drives, after those given before."""
        self._last.append(call)

    def of(self, steps: Steps[Tensor]) -> Collective:
        """Return this one, with its schedule."""
        self.steps = steps
        return self

    # -- driving ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Post what can be posted without waiting; then the background thread goes on."""
        try:
            self._number(self)
            steps = self.steps
            for self._pending in steps:
                break
            else:
                self._end(None)
            if not self.done:
                background.take_on(self.endpoint, self)
        except BaseException as error:
            if not isinstance(error, Exception) or raised_by_the_program(error):
                if self._claim.acquire(blocking=False):  # else the background thread has it
                    self._interrupted()
                raise
            self._end(error)

    def wait(self, timeout: float = 0.0) -> None:
        """Wait until it is over, `error` included, and drive it meanwhile if no other does.

        Args:
            timeout: seconds; 0: until its own timeout is over.

        Raises:
            LateError: it is not over.
            NoDescriptorError: the process has none left for this thread; one that was not begun is not now.
            Exception: of a signal's handler, KeyboardInterrupt as a rule: it goes on.
        """
        if self.done:
            return
        self.endpoint.require_wait()
        deadline = time.monotonic() + timeout if timeout else self._deadline
        self._callers += 1
        try:
            self._wait(deadline, timeout or self.timeout)
        finally:
            self._callers -= 1

    def _wait(self, deadline: float, seconds: float) -> None:
        claim, claimed, interrupted = self._claim, False, True
        try:
            for claimed in map(claim.acquire, (True,), (seconds_until(deadline),)):
                if claimed and not self.done:
                    self._drive(deadline, seconds)
                interrupted = False
        except Exception as error:
            if not claimed or raised_by_the_program(error):
                raise  # the other members are in it: it goes on
            self._end(error)
            interrupted = False
        finally:
            if claimed and interrupted:
                self._interrupted()
            elif claimed:
                claim.release()
        if not claimed and not self.done:
            raise LateError(*self._late(seconds).args)

    def _drive(self, deadline: float, seconds: float) -> None:
        if self.tag < 0:
            self._number(self)
        endpoint, channel, tag, ranks, steps = self.endpoint, self.channel, self.tag, self.ranks, self.steps
        # `_pending` is where another goes on if this thread is interrupted.
        while True:
            step = self._pending
            if step is not None:
                try:
                    if type(step) is Want:
                        buffer = step.buffer
                        given = ranks[step.peer], channel, tag, _bytes(buffer), deadline, buffer
                        for _ in itertools.starmap(endpoint.receive, (given,)):
                            self._pending = None  # before Python looks: the message has come, and none after
                    else:
                        operation = cast("Send | Receive", step)
                        if not operation.done:
                            endpoint.wait(operation, deadline)
                        if operation.error is not None:
                            raise as_new(operation.error)
                except SizesDifferError as error:
                    raise self._mismatch(error) from None
                except LateError:
                    raise self._late(seconds) from None
            for self._pending in steps:
                break
            else:
                break
        self._end(None)

    async def awaited(self, watch: Watch) -> None:
        """Drive it to its end, `error` included, in the running loop.

        Cancelled, it goes on in the background.
        """
        self._claim.acquire()
        self._callers += 1
        try:
            self._number(self)
            await self._drive_awaited(watch)
        except Exception as error:
            if raised_by_the_program(error):
                self._interrupted()
                raise
            self._end(error)
        except GeneratorExit:
            destroyed_tasks.run(self._interrupted)
            raise
        except BaseException:
            self._interrupted()
            raise
        finally:
            self._callers -= 1
        self._claim.release()

    def _interrupted(self) -> None:
        """Let the background thread drive in place of this one, which has the claim, if it has begun."""
        begun = self.tag >= 0
        if begun and not self.done and inspect.getgeneratorstate(self.steps) == inspect.GEN_CLOSED:
            self._abort()
        self._claim.release()
        if begun and not self.done:
            background.take_on(self.endpoint, self)

    def _abort(self) -> None:
        """A signal's handler raised inside of the schedule, of which it is not known how far it came."""
        self._end(ConnectionAbortedError(f"{self.name} was interrupted"))
        self._tell_failure()

    def _tell_failure(self) -> None:
        if self.failed is not None and self.error is not None:
            self.failed(self.error)

    async def progress(self, watch: Watch) -> None:
        """Drive it to its end, in the background thread's loop, if no other does."""
        if self.done or not self._claim.acquire(blocking=False):
            return
        try:
            if not self.done:
                await self._drive_awaited(watch)
        except Exception as error:
            self._end(error)
            self._tell_failure()
        finally:
            self._claim.release()

    async def _drive_awaited(self, watch: Watch) -> None:
        post, steps, at_once = self.endpoint.post_receive, self.steps, 0
        while True:
            step = self._pending
            if step is not None:
                if type(step) is Want:
                    buffer = step.buffer
                    given = self.ranks[step.peer], self.channel, self.tag, _bytes(buffer), buffer
                    for self._pending in itertools.starmap(post, (given,)):
                        break
                operation = cast("Send | Receive", self._pending)
                left = max(0.0, self._deadline - time.monotonic())
                if not operation.done and not await watch.until_over(
                    operation, left, everywhere=not all(each.done for each in self._sends)
                ):
                    raise self._late(self.timeout)
                at_once += 1
                if at_once % _AT_ONCE == 0:
                    await asyncio.sleep(0)
                if isinstance(operation.error, SizesDifferError):
                    raise self._mismatch(operation.error)
                if operation.error is not None:
                    raise as_new(operation.error)
            for self._pending in steps:
                break
            else:
                break
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        """It is over."""
        self.entry[ENDED] = time.monotonic()
        if self.recorded is not None:
            self.recorded()
        try:
            for call in self._last if error is None else ():
                call()
        except Exception as raised:  # kept
            error = raised
        if error is None:
            went_well(self.entry)
        else:
            if self.tag >= 0 and not isinstance(error, OSError | MultiworldError):
                # The others have this one: called again, it would be the next one here.
                error = _failed(self.name, error)
            self.error = as_new(error)  # its frames would keep the caller's group, and that its sockets
        self.done = True
        if error is None:
            for memory in self._memory:  # else a message may still be written into it
                self._scratch.give_back(memory)
        self._memory.clear()
        self.steps, self._pending, self.first = _none(), None, None
        self._last.clear()
        self._sends.clear()

    def _mismatch(self, error: SizesDifferError) -> ConnectionAbortedError:
        return ConnectionAbortedError(
            f"{self.name}: rank {error.sender} sent {error.sent} bytes, and {error.expected} were expected. "
            "All members call a collective with the same sizes; M8D_CHECK=1 compares the calls first."
        )

    def _late(self, seconds: float) -> TimeoutError:
        waits = self._pending
        peer = ""
        if type(waits) is Want:
            peer = f" from rank {self.ranks[waits.peer]}"
        return TimeoutError(f"{self.name} timed out: no message{peer} within {seconds:g} s")
