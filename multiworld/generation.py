"""One life of a world in this process: from the join that made it to the breakage or the close that ends it.

A `World` is the user's handle and may live through several of these; a generation ends once and stays ended.
Decisions are made under the lock by `multiworld._core.lifecycle`; everything that touches torch, sockets or user
code happens outside of it.
"""

from __future__ import annotations

import contextlib
import dis
import threading
import time
from typing import TYPE_CHECKING, Any

from multiworld._core import lifecycle
from multiworld._core.lifecycle import Action
from multiworld.errors import BrokenWorldException, MultiworldError, WorldClosedError
from multiworld.events import Breakage, Cause, MemberBusy, State, bus
from multiworld.receives import ParkedReceives
from multiworld.releasing import releaser

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator

    from multiworld._c10d.gloo.waiting import AwaitedWork
    from multiworld._c10d.groups import Group
    from multiworld._c10d.routing.state import WorldState
    from multiworld._core.membership.roster import Roster
    from multiworld._net.stores.rendezvous import Rendezvous
    from multiworld._net.stores.store import StoreHandle
    from multiworld.watchdog import Attachment

__all__ = ["LEFT_GRACE", "Generation", "posting"]

LEFT_GRACE = 0.25
"""Seconds an operation in flight has to end by itself after a member left in good order.

What the leaver sent before it left is in the kernel's buffers by then; cutting the sockets at once would lose it.
"""

CUT_GRACE = 0.5
"""Seconds after a breakage in which awaited operations end by themselves; what then still waits is ended."""

RELEASE_DELAY = 1.0
"""Seconds after a breakage until what the generation holds is freed: its pending operations have raised by then.

Longer than `LEFT_GRACE` and `CUT_GRACE` one after the other. A join that comes before frees it at once.
"""

RELEASE_BUDGET = 2.0
"""Seconds that freeing it may take; a destructor that hangs goes on in a thread of its own after that."""

STORE_LOOK = 1.0
"""Seconds between two looks at whether others use the store that this process served for it."""

REPORT_GRACE = 2.0
"""Seconds an operation that failed waits at most for the watchdog to say why; its own grace is far shorter."""


_here = threading.local()

_inherited: list[object] = []
"""What a forked child has of its parent's worlds: destroying it would wait for threads that are not there."""

_NOT_DISTRIBUTED = ("torch.utils.", "torch.hub", "torch.multiprocessing")
"""Parts of torch whose timeouts and broken pipes are not a world's (data loaders, downloads, child processes)."""

_RAISE = dis.opmap["RAISE_VARARGS"]


@contextlib.contextmanager
def posting() -> Iterator[None]:
    """For code on an event loop's thread: a transport error comes out as it is, and no verdict is waited for."""
    before = getattr(_here, "posting", False)
    _here.posting = True
    try:
        yield
    finally:
        _here.posting = before


def _fail(future: asyncio.Future[Any] | AwaitedWork, error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _on_pool(job: Callable[[], None]) -> None:
    from multiworld._c10d.completion import pool  # noqa: PLC0415  (a receive was posted, so torch is loaded)

    pool.run(job)


def _nothing() -> None:
    """There is nothing to close."""


class _Refusal:
    """Stands where the process group stood: whatever is asked of it raises."""

    def __init__(self, error: Callable[[], Exception]) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise self._error()


class Generation:
    """One generation of one world in this process.

    Args:
        world: name.
        rank: of this process.
        size: number of members.
        on_end: called once, outside of all locks, with this generation when it breaks.
    """

    def __init__(self, world: str, rank: int, size: int, on_end: Callable[[Generation], None]) -> None:
        self.world = world
        self.rank = rank
        self.size = size
        self.number = 0
        self.breakage: Breakage | None = None
        self.pg: Any = _Refusal(self.error)
        # Its hot operations, where its backend is plain gloo: else None, and from its end on it refuses like `pg`.
        self.direct: Any = None
        self.c10d: WorldState | None = None
        self.group: Group | None = None
        self.roster: Roster | None = None
        self.attachment: Attachment | None = None
        self.rendezvous: Rendezvous | None = None
        self.store: StoreHandle | None = None
        self._kept_store: StoreHandle | None = None
        self.timeout = 0.0
        self.busy: tuple[int, ...] = ()
        self.failure = ""  # what ends this program, where that is no good order
        self.device_types: frozenset[str] = frozenset()
        self.keys: Callable[[], list[str]] = list
        self.parked = ParkedReceives(_on_pool)
        self._on_end = on_end
        self._lock = threading.Lock()
        self._life = State.JOINING
        self._early: Breakage | None = None
        self._heeding = False
        self._retired = False
        self._forked = False
        self._timer: threading.Timer | None = None
        self._cutter: threading.Timer | None = None
        self._watched: set[asyncio.Future[Any] | AwaitedWork] = set()
        self._ended = threading.Event()
        self._released = threading.Event()
        self._freed = True
        self._lingers = False  # whether a store that this process serves outlives the rest
        self._leftover: Group | None = None

    @property
    def state(self) -> State:
        """Where this generation stands; one that broke and gave way to the next stays broken."""
        life = self._life
        return State.BROKEN if self._retired and life is State.CLOSED else life

    # -- its beginning ------------------------------------------------------------------------------------------

    def check_early(self) -> None:
        """Raise if a member was lost while the world was being built."""
        if self._early is not None:
            raise self._broken(self._early)

    def activate(self) -> None:
        """Everyone is there, and `group` is set. Verdicts take effect with `heed`."""
        from multiworld._c10d.gloo import direct  # noqa: PLC0415  (torch is loaded by now)

        with self._lock:
            self._life, _ = lifecycle.step(self._life, lifecycle.Joined())
            group = self.group
            if self._life is State.ACTIVE and group is not None:  # it may have been closed meanwhile
                self.device_types = group.device_types
                self.pg = group.pg
                self.direct = direct.of(group.pg, self.c10d)

    def heed(self) -> None:
        """Take verdicts from now on, and the one that came before everybody had heard that this is active."""
        with self._lock:
            self._heeding = True
            early, self._early = self._early, None
        if early is not None:
            self.verdict(early)

    def answers(self, ranks: tuple[int, ...], busy: bool) -> None:
        """The watchdog's word that members run, but do not answer (`busy`), or answer again."""
        with self._lock:
            others = tuple(rank for rank in self.busy if rank not in ranks)
            self.busy = tuple(sorted({*others, *ranks})) if busy else others
        bus.publish(MemberBusy(self.world, self.number, self.rank, time.monotonic(), ranks, busy))

    # -- its end ------------------------------------------------------------------------------------------------

    def verdict(self, breakage: Breakage) -> None:
        """The watchdog's word that this generation is over. Quick; any thread; the first one counts."""
        with self._lock:
            if self._life not in {State.JOINING, State.ACTIVE}:
                return
            if not self._heeding:
                self._early = self._early or breakage
                return
            self._life, actions = lifecycle.step(self._life, lifecycle.Broke(breakage))
            self.breakage = breakage
            self.pg = self.direct = _Refusal(self.error)
        self._act(actions)
        self._ended.set()
        if self._watched:
            self._cut_later()
        self._on_end(self)
        releaser.add(RELEASE_DELAY, self._release)

    def _act(self, actions: tuple[Action, ...]) -> None:
        if self.c10d is not None:
            self.c10d.break_(self.error)
        group = self.group  # a close in another thread may take it meanwhile
        if Action.ABORT_GROUP in actions and group is not None:
            if self.breakage is not None and self.breakage.cause is Cause.LEFT:
                timer = self._timer = threading.Timer(LEFT_GRACE, group.abort)
                timer.daemon = True
                timer.name = f"m8d-abort-{self.world}"
                timer.start()
            else:
                group.abort()

    def retire(self, deadline: float) -> bool:
        """Free what it holds, for the next generation: as `close`, but if it broke, it stays broken.

        Operations that are still on their way out of a broken world raise what broke it, not that it was closed.
        """
        with self._lock:
            self._retired = self._retired or self._life is State.BROKEN
        return self._close(deadline)

    def close(self, deadline: float) -> bool:
        """End it in good order and free what it holds, until `deadline` (``time.monotonic()`` seconds).

        Returns:
            Whether all is free; False when the deadline came first (a daemon thread goes on).
        """
        self._retired = False
        freed = self._close(deadline)
        # A breakage may have freed all else already.
        self._let_store_go()
        return freed

    def _release(self) -> float | None:
        """Free what it holds, some time after its breakage; for `releaser`.

        The store that this process serves stays for as long as others use it: see `StoreHandle.spare`.
        """
        if self._forked:
            return None
        self._lingers = True
        self.retire(time.monotonic() + RELEASE_BUDGET)
        store = self.store
        if store is None:
            return None
        if not store.spare():
            return STORE_LOOK
        self._let_store_go()
        return None

    def _close(self, deadline: float) -> bool:
        with self._lock:
            first = self._life is not State.CLOSED
            if first:
                was = self._life
                self._life, _ = lifecycle.step(self._life, lifecycle.CloseAsked())
                self.pg = self.direct = _Refusal(self.error)
        if not first:
            self._released.wait(max(0.0, deadline - time.monotonic()))
            leftover = self._leftover
            if leftover is not None and leftover.close(deadline):
                self._leftover, self._freed = None, True
            return self._released.is_set() and self._freed
        if self.c10d is not None:
            self.c10d.break_(self.error)
        if self.attachment is not None:
            if was is State.BROKEN:
                self.attachment.detach()
            else:
                self.attachment.leave(self.failure)
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()
        self._freed = self._free(deadline)
        self._released.set()
        if self._cutter is not None:
            self._cutter.cancel()
        self._cut()
        return self._freed

    def keep_store(self) -> Callable[[], None]:
        """Let the store outlive this generation, if this process serves it; returns what closes it."""
        with self._lock:
            store = self.store
            if store is None or not store.serves:
                return _nothing
            self.store, self._kept_store = None, store
        return store.close

    def _let_store_go(self) -> None:
        with self._lock:
            store, self.store = self.store, None
        if store is not None:
            store.close()

    def _free(self, deadline: float) -> bool:
        freed = True
        self.parked.clear()
        group, self.group = self.group, None
        if group is not None:
            freed = group.close(deadline)
            self._leftover = None if freed else group
            lender = self.store or self._kept_store
            if freed and lender is not None:
                lender.idle()
        self._kept_store = None
        if self.c10d is not None:
            self.c10d.forget()
        rendezvous, self.rendezvous = self.rendezvous, None
        if rendezvous is not None:
            # The store may be the very thing that died; nobody depends on this mark.
            with contextlib.suppress(Exception):
                rendezvous.over(self.keys())
        self.keys = list  # what it was knew the store
        store = self.store
        if store is not None and not (self._lingers and store.serves):
            self._let_store_go()
        return freed

    # -- awaited operations -------------------------------------------------------------------------------------

    def watch(self, future: asyncio.Future[Any]) -> None:
        """Fail `future`, of the running loop, some time after this generation broke, if nothing else has.

        gloo can lose a send whose connection breaks in the very moment of writing: nobody is told, and its work
        ends at the operation's timeout only.
        """
        self._watched.add(future)
        future.add_done_callback(self._watched.discard)
        if self._life is not State.ACTIVE:
            self._cut_later()

    def expect(self, ending: AwaitedWork) -> None:
        """`watch`, for an operation whose awaiter says itself when it is over (`expect_no_more`)."""
        self._watched.add(ending)
        if self._life is not State.ACTIVE:
            self._cut_later()

    def expect_no_more(self, ending: AwaitedWork) -> None:
        """It is over, or nobody waits for it."""
        self._watched.discard(ending)

    def _cut_later(self) -> None:
        timer = self._cutter = threading.Timer(CUT_GRACE, self._cut)
        timer.daemon = True
        timer.name = f"m8d-cut-{self.world}"
        timer.start()

    def _cut(self) -> None:
        for future in tuple(self._watched):
            with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits
                future.get_loop().call_soon_threadsafe(_fail, future, self.error())

    # -- errors -------------------------------------------------------------------------------------------------

    def error(self) -> Exception:
        """What an operation of this generation raises now that it is over."""
        if self._forked:
            return WorldClosedError(
                self.world,
                f"world {self.world!r} (generation {self.number}) belongs to the process that this one was forked from",
                rule="A world's connections are its own process's",
                next_step="Use it there, or join a world of another name here",
            )
        told = self.breakage if self.state is State.BROKEN else None
        if told is None and self._life is not State.CLOSED:
            told = self._early
        if told is not None:
            return self._broken(told)
        return WorldClosedError(
            self.world,
            f"world {self.world!r} (generation {self.number}) was closed by this process",
            rule="Operations need an active world",
            next_step="Join it again: that makes the next generation",
        )

    def told(self) -> None:
        """This thread is being told that this generation is over."""
        if self.c10d is not None and self.c10d.traffic is not None:
            self.c10d.traffic.told()

    def _broken(self, breakage: Breakage) -> BrokenWorldException:
        self.told()
        return BrokenWorldException(
            self.world,
            breakage.detail,
            generation=self.number,
            cause=breakage.cause.value,
            ranks=breakage.ranks,
        )

    def explain(self, exc: BaseException) -> BaseException:
        """What to raise instead of `exc`, which an operation of this generation raised; `exc` itself if it stands.

        A transport error waits a moment for the watchdog's verdict, so that everyone names the same cause.
        """
        if isinstance(exc, MultiworldError) or not isinstance(exc, Exception):
            return exc
        if self._life is not State.ACTIVE:
            return self.error()
        from multiworld._c10d import faults  # noqa: PLC0415  (torch is loaded by now)

        fault = faults.classify(exc)
        if fault is None:
            return exc  # the caller's fault, not the world's
        if getattr(_here, "posting", False):
            return exc  # who posts on an event loop has it explained where waiting does not hold up the loop
        ranks = () if fault.rank is None else (fault.rank,)
        if self.attachment is not None and not self._ended.is_set():
            self.attachment.report(fault.detail, ranks, deadline=time.monotonic() + REPORT_GRACE)
        if self._life is State.ACTIVE:
            self.verdict(Breakage(Cause.FAILED, ranks, fault.detail, time.monotonic()))
        return self.error()

    def translate(self, _state: object, exc: BaseException) -> BaseException | None:
        """For the router: what a bare ``torch.distributed`` call in this world raises instead; None if it stands.

        Inside ``with world:`` errors of all kinds pass: only torch's own can say anything about the world. A file that
        is missing or somebody else's connection that timed out must neither break it nor be hidden.
        """
        if not isinstance(exc, RuntimeError) or not self._raised_by_torch(exc):
            return None
        better = self.explain(exc)
        return None if better is exc else better

    def _raised_by_torch(self, exc: RuntimeError) -> bool:
        if type(exc).__module__.partition(".")[0] == "torch":
            return True
        last = exc.__traceback__
        if last is None:
            return True
        while last.tb_next is not None:
            last = last.tb_next
        name = str(last.tb_frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] in {"torch", "multiworld"}:
            return not name.startswith(_NOT_DISTRIBUTED)
        # A process group's C++ method that user code called itself has no frame. A `raise` is no such call.
        from multiworld._c10d import faults  # noqa: PLC0415  (torch is loaded by now)

        raised = last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE
        return type(exc) is RuntimeError and not raised and faults.classify(exc) is not None

    # -- a forked child -----------------------------------------------------------------------------------------

    def forked(self) -> None:
        """In a forked child: this is the parent's. Nothing of it may be touched, or the parent's world would end."""
        _inherited.append(
            (self.pg, self.direct, self.group, self.store, self.rendezvous, self.attachment, self._watched)
        )
        self._lock, self._released = threading.Lock(), threading.Event()
        self._released.set()
        self._life, self._forked, self._retired, self._early = State.CLOSED, True, False, None
        self.group = self.store = self.rendezvous = self.attachment = None
        self._watched = set()
        self.pg = self.direct = _Refusal(self.error)
        if self.c10d is not None:
            self.c10d.break_(self.error)
