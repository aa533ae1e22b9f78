"""In-flight operations of one NCCL world: waited for on the host, never mistaken for complete after an abort.

An NCCL operation runs on a stream of the GPU. torch's ``wait`` only makes a stream wait for it, and after an
abort the stream continues with stale output, without an error. So in a world ``wait`` blocks until the
operation has really ended, and the order is fixed: the world is marked as over, all calls leave torch, the
communicator is aborted, and waiters raise when that has ended: until then kernels may write into what is the
caller's after the exception. An operation that is complete while the world is not over was completed by its
peers.

Torch's own watchdog would abort in any order; the environment keeps it from that
(`multiworld._core.nccl_policy`), and in a patched build, where it may, the operation itself says so
afterwards.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from multiworld._c10d.nccl.loaded import queries_beside_captures, wait_for_cuda
from multiworld.logs.source import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Protocol

    class OpenGroup(Protocol):
        """An NCCL group that a thread has open: `multiworld._c10d.nccl.coalescing.Coalescing`."""

        @property
        def queued(self) -> bool: ...

    from torch._C._distributed_c10d import Work


__all__ = ["Canary", "DistBackendError", "Traffic", "failure_of", "plain_wait"]

_log = logger(__name__)
DistBackendError: Any = getattr(torch.distributed, "DistBackendError", RuntimeError)
"""torch's error of a backend, where this version has it."""

_Work: Any = torch._C._distributed_c10d.Work
# torch's own: the hook that replaces it also answers for a world that is over.
_is_completed: Any = getattr(vars(_Work)["is_completed"], "__func__", vars(_Work)["is_completed"])
plain_wait: Callable[[Work], bool] = getattr(vars(_Work)["wait"], "__func__", vars(_Work)["wait"])
"""torch's own ``Work.wait``, without hooks."""

ABORTED = "multiworld: the groups of this world were aborted"
"""Error text of an operation of a world that is over; known to `multiworld._c10d.fault_classification`."""

_LOST = "NCCL operation failed: CUDA error: {}"
"""Error text where CUDA is of no more use to this process; known there as well."""

_RESULTS = {1: "it timed out", 2: "its communicator failed"}

SPIN = 0.0002
"""Seconds of polling without a pause: most operations end within."""

LONGEST_PAUSE = 0.005
"""Seconds between two polls of a long operation; a pause is an eighth of the wait so far."""

TIMEOUT_GRACE = 1.0
"""Seconds by which the runtime waits longer than torch, whose timeout error is more specific."""

QUIET = 0.5
"""Seconds that an abort waits for callers to leave torch. A longer call hangs, and the abort may end it."""

STILL = 3.0
"""Seconds that an operation that failed waits for the aborts, before it raises: until they have ended its
kernel writes into its tensor. On an H100 and an H200 they took up to 2.8 s."""

OPEN_PAUSE = 0.05
"""Seconds between two checks whether a thread has closed its NCCL group, or a hung abort has ended."""

HUNG_PAUSE = 1.0
"""The same, at most, of an abort that hangs for long."""

_hanging: list[Callable[[], bool]] = []
"""What tells whether an abort goes on that torch gave up; with it the backend is kept, whose destructor would
let go of what NCCL writes."""

_aborts: list[Callable[[], Any]] = []
"""The aborts that this process is in, of any world."""

_blocks: contextvars.ContextVar[tuple[tuple[Traffic, bool], ...]] = contextvars.ContextVar("m8d_nccl_blocks")
"""The blocks that this thread or asyncio task is in, innermost last, and whether it was told in each that its
world is over: another task of the same thread was not."""


@dataclass(frozen=True)
class Canary:
    """The first operation of a group, which succeeded: it tells what torch does to the communicator later.

    Attributes:
        work: torch's.
        error_of: returns what the group's backend says is wrong with it, if anything.
        lives: whether the world has the group still.
    """

    work: Work
    error_of: Callable[[], str | None]
    lives: Callable[[], bool]


class Traffic:
    """The calls into torch's NCCL that one world of this process makes, and their end.

    Args:
        timeout: seconds an operation may take.
        device: the GPU of this member.
        fragile: whether a call that fails leaves the thread's NCCL group open, or ends the process (an
            unpatched torch).
        torch_aborts: whether torch's own watchdog may abort a communicator.
        abort_returns: whether torch's abort may return before NCCL's is over, and its backend tells.

    Attributes:
        over: set when the world's groups are about to be aborted.
        ready: whether the world has been built.
        timeout, device, fragile, torch_aborts, abort_returns: as given.
    """

    def __init__(
        self,
        *,
        timeout: float,
        device: torch.device,
        fragile: bool = False,
        torch_aborts: bool = True,
        abort_returns: bool = False,
    ) -> None:
        self.timeout = timeout
        self.device = device
        self.fragile = fragile
        self.torch_aborts = torch_aborts
        self.over = threading.Event()
        self.ready = False
        self._lock = threading.Lock()
        self._canaries: list[Canary] = []
        self._inside = 0
        self._quiet = threading.Event()
        self._here = threading.local()
        self.abort_returns = abort_returns
        self._ends: list[Callable[[], Callable[[], bool] | None]] = []
        self._aborting: list[threading.Thread] = []
        self._running = 0  # aborts
        self._hung: list[Callable[[], bool]] = []
        self._unended: list[Work] = []
        self._open: set[OpenGroup] = set()
        self._in_blocks: set[int] = set()  # threads
        self._for_blocks: list[Any] = []

    # -- calls into torch ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Context of a short call into torch, during which no abort begins.

        An abort frees a communicator that other threads may still use, and asking a work whether it is
        complete takes a lock, while holding the GIL, that a hanging abort holds.

        Raises:
            torch.distributed.DistBackendError: the world is over.
        """
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """Begin a call; see `call`."""
        with self._lock:
            if not self.over.is_set():
                self._inside += 1
                return
        raise DistBackendError(ABORTED)

    def leave(self) -> None:
        """End a call."""
        with self._lock:
            self._inside -= 1
            if not self._inside and self.over.is_set():
                self._quiet.set()

    def opened(self, group: OpenGroup) -> None:
        """Count an opened NCCL group as a call until `closed`; raises as `call`."""
        self.enter()
        with self._lock:
            self._open.add(group)

    def closed(self, group: OpenGroup) -> None:
        """End that call."""
        with self._lock:
            self._open.discard(group)
        self.leave()

    def verify(self) -> None:
        """Raise if the world is over; see `call`."""
        with self.call():
            pass

    # -- waiting ---------------------------------------------------------------------------------------------

    def finish(
        self, work: Work, error_of: Callable[[], str | None] = lambda: None, timeout: float | None = None
    ) -> None:
        """Block until `work` has ended on the GPU.

        Args:
            work: torch's, of this world.
            error_of: what the backend that runs it says is wrong with it.
            timeout: seconds; None takes the world's.

        Raises:
            torch.distributed.DistBackendError: it failed, it took too long, or the world is over.
        """
        self.until(lambda: bool(_is_completed(work)), timeout)
        with self.call(), queries_beside_captures():
            if self.torch_aborts:
                # torch's watchdog may have ended it after the last query, and reports that by now.
                _is_completed(work)
            failed = failure_of(work) or (error_of() if self.torch_aborts else None)
            if failed is not None and self.torch_aborts:
                # What it raises says more. It first lets the current stream wait for the operation, which
                # does not end as long as the abort hangs: not the caller's stream.
                aside: Any = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call, unused-ignore]
                with torch.cuda.stream(aside):
                    plain_wait(work)
        if failed is not None:
            raise DistBackendError(failed)

    def settle(self) -> None:
        """Block until what the current stream of the world's GPU has been given has ended.

        For operations that torch waits for in C++ (DDP's gradients, functional collectives): there is no work
        to ask, but the stream waits for them.

        Raises:
            torch.distributed.DistBackendError: as `finish`.
        """
        if torch.cuda.is_current_stream_capturing():
            return
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
        event.record(torch.cuda.current_stream(self.device))
        self.until(event.query, None)
        # An abort does not wait for a thread that stands still in there: it may have ended the operation.
        with self.call():
            # Whether the stream went on because torch's watchdog aborted a communicator is told by an older
            # work of that communicator: waiting for it raises, in a patched build, or its backend knows.
            for canary in self._living() if self.torch_aborts else ():
                plain_wait(canary.work)
                if (failed := canary.error_of()) is not None:
                    raise DistBackendError(failed)

    def of_device(self, error: Exception) -> Exception:
        """Return `error`, which torch raised; where the GPU is of no more use, an error of NCCL's."""
        with queries_beside_captures():
            lost = wait_for_cuda(self.device)
        return error if lost is None else DistBackendError(_LOST.format(lost))

    def connected(self, canary: Canary) -> None:
        """Take the canary of a group that was made."""
        wait_for_cuda(self.device)  # its event is made while CUDA works
        self._living()
        with self._lock:
            self._canaries.append(canary)

    def _living(self) -> list[Canary]:
        """Return the canaries of groups that are there still: another one's error is none of the world's."""
        with self._lock:
            self._canaries = [each for each in self._canaries if each.lives()]
            return list(self._canaries)

    def released(self) -> None:
        """Forget the canaries: the world's groups are being freed."""
        with self._lock:
            self._canaries.clear()

    @queries_beside_captures()
    def until(self, done: Callable[[], bool], timeout: float | None) -> None:
        """Block until `done`, which must be quick, says so while the world is not over; see `finish`."""
        limit = self.timeout + TIMEOUT_GRACE if timeout is None else timeout
        began = time.monotonic()
        waited = 0.0
        while True:
            # Of a torch that aborts by itself it is not known when.
            lost = wait_for_cuda(self.device) if waited >= SPIN or _aborts or _hanging else None
            if lost is not None:
                raise DistBackendError(_LOST.format(lost))
            with self.call():
                if done():
                    return
            waited = time.monotonic() - began
            if waited > limit:
                raise DistBackendError(
                    f"multiworld: an operation of NCCL timed out after {waited:.1f} s on {self.device}"
                )
            if waited < SPIN:
                time.sleep(0)
            else:
                self.over.wait(min(LONGEST_PAUSE, waited / 8))

    # -- blocks (`with world:`) ------------------------------------------------------------------------------

    def block_begins(self) -> None:
        """Enter a block of this world in this thread."""
        here = self._here
        here.blocks = getattr(here, "blocks", 0) + 1
        if here.blocks == 1:
            self._in_blocks.add(threading.get_ident())
        _blocks.set((*_blocks.get(()), (self, self.over.is_set())))

    def blocks(self) -> int:
        """Return how many blocks of this world this thread is in."""
        count: int = getattr(self._here, "blocks", 0)
        return count

    def keep_for_blocks(self, backends: list[Any]) -> None:
        """Keep these backends of the released world until no thread is in a block of it."""
        if self._in_blocks:
            self._for_blocks.extend(backends)

    def kept_for_blocks(self) -> list[Any]:
        """Return the backends that are kept so."""
        return list(self._for_blocks)

    def told(self) -> None:
        """Note that this thread or asyncio task was told that the world is over."""
        if entered := _blocks.get(()):
            _blocks.set(tuple((each, told or each is self) for each, told in entered))

    def block_ends(self, *, failed: bool) -> None:
        """Leave the block: wait for the operations that it gave to the GPU.

        Args:
            failed: an exception leaves the block.

        Raises:
            torch.distributed.DistBackendError: the world ended during the block, and no call in it has said
            so.
        """
        here = self._here
        here.blocks = getattr(here, "blocks", 1) - 1
        if here.blocks == 0:
            self._in_blocks.discard(threading.get_ident())
            if not self._in_blocks:
                self._for_blocks.clear()
        entered = _blocks.get(())
        place = max((place for place, (each, _) in enumerate(entered) if each is self), default=-1)
        if place >= 0:
            _blocks.set((*entered[:place], *entered[place + 1 :]))
        if not failed and not (place >= 0 and entered[place][1]):
            self.settle()

    # -- the end ---------------------------------------------------------------------------------------------

    def abort(self, ends: list[Callable[[], Callable[[], bool] | None]]) -> None:
        """Mark the world as over, wake its waiters, and abort on one daemon thread each; return at once.

        Args:
            ends: each aborts one backend, and may hang for as long as NCCL does. It returns what tells
                whether NCCL goes on though it has returned; None: NCCL does not.
        """
        with self._lock:
            self.over.set()
            if not self._inside:
                self._quiet.set()
            self._ends += ends
        self._begin()

    def _begin(self) -> None:
        """Begin the aborts that were not yet: those for which the host had no thread left."""
        with self._lock:
            while self._ends:
                thread = threading.Thread(
                    target=self._end, args=(self._ends[0],), name="m8d-abort", daemon=True
                )
                try:
                    thread.start()  # before other threads can find and join it
                except RuntimeError:
                    return
                del self._ends[0]
                self._running += 1
                self._aborting.append(thread)

    def _end(self, end: Callable[[], Callable[[], bool] | None]) -> None:
        """Abort one backend, and let go of what is kept for it when that has ended, however late."""
        self._quiet.wait(QUIET)
        if self._spare():
            self._quiet.wait(QUIET)  # it is being closed
        hung = []
        _aborts.append(end)
        # A backend that fails to abort is unusable, and its world is over.
        with contextlib.suppress(Exception):
            goes_on = end()
            if goes_on is not None and goes_on():
                hung.append(goes_on)
        _aborts.remove(end)
        with self._lock:
            self._hung += hung
            _hanging.extend(hung)
            self._running -= 1
            if not self._goes_on():
                self._unended.clear()
            if hung:
                self._aborting.remove(threading.current_thread())
        if hung:
            self._look_on()

    def _look_on(self) -> None:
        """Look at the aborts that torch gave up until they end: of a closed world, nothing else does."""
        thread, pause = threading.current_thread(), OPEN_PAUSE
        while self._hangs():
            # Asleep it is not in torch: the program's end need not wait for it.
            thread.name = "m8d-hung-abort"
            time.sleep(pause)
            thread.name = "m8d-abort"
            pause = min(2 * pause, HUNG_PAUSE)

    def _goes_on(self) -> bool:
        """Whether the abort is not over, of a world that is; the lock is held."""
        return bool(self._running or self._ends or self._hung)

    def _spare(self) -> bool:
        """Wait until no thread has operations of this world in an open NCCL group; whether there was one."""
        deadline = time.monotonic() + self.timeout
        waited = False
        while time.monotonic() < deadline:
            with self._lock:
                if not any(each.queued for each in self._open):
                    break
            waited = True
            self._quiet.wait(OPEN_PAUSE)
        return waited

    def still(self, work: Work | None) -> None:
        """Wait until nothing of the ended world writes on the GPU any more, `STILL` seconds at most.

        Args:
            work: that failed, if there is one. Where an abort hangs it is kept, and with it what torch keeps
                from being allocated anew.
        """
        deadline = time.monotonic() + STILL
        if not self.over.wait(STILL) or not self.ended(deadline):
            if work is not None:
                with self._lock:
                    if not self.over.is_set() or self._goes_on():
                        self._unended.append(work)
            _log.warning(
                "NCCL has not ended an operation after %g s: until it does, it may write into its tensor",
                STILL,
            )

    def ended(self, deadline: float) -> bool:
        """Wait for the aborts until `deadline` (``time.monotonic()`` seconds); return whether they ended."""
        self._begin()
        with self._lock:
            aborting = list(self._aborting)
        for thread in aborting:
            thread.join(max(0.0, deadline - time.monotonic()))
        while self._hangs() and time.monotonic() < deadline:
            time.sleep(OPEN_PAUSE)
        with self._lock:
            self._aborting = [thread for thread in self._aborting if thread.is_alive()]
            return not self._aborting and not self._goes_on()

    def _hangs(self) -> bool:
        """Whether an abort that torch gave up goes on; those that have ended are let go."""
        ended = [goes_on for goes_on in [*self._hung] if not goes_on()]
        with self._lock:  # `ended` holds the backends: no destructor runs under it
            for each in ended:
                if each in self._hung:
                    self._hung.remove(each)
                    _hanging.remove(each)
            if not self._goes_on():
                self._unended.clear()
            return bool(self._hung)


def failure_of(work: Work) -> str | None:
    """Return the error of a completed work, in one or more lines; None if it succeeded.

    Torch 2.6 and newer know the outcome of a work as a future that is there when the work is complete, or
    comes a moment later where it succeeded; older ones only as its exception.
    """
    outcome = getattr(work, "get_future_result", None)
    result = 0
    if outcome is not None:
        with contextlib.suppress(RuntimeError):  # a kind of work that has none
            future = outcome()
            result = int(future.value()) if future.done() else 0
            if result == 0:
                return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, without a replacement
            error = work.exception()
    except TypeError:  # torch 2.6 cannot hand it over
        error = f"NCCL operation failed: {_RESULTS.get(result, result)}" if result else None
    return None if error is None else str(error)
