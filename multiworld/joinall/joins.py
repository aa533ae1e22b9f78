"""Several worlds joined at once: one thread each, in the order that they ask for; all of them or none."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from multiworld._core.reraise import as_new
from multiworld._join.join import no_thread
from multiworld.errors import JoinAbandonedError, MultiworldError
from multiworld.events import State
from multiworld.joinall.checks import check_names, check_state
from multiworld.joinall.launcher_client import LauncherClient
from multiworld.joinall.one_world import ASKING, WorldJoiner
from multiworld.launched.reports import reports
from multiworld.world import worlds

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Mapping, Sequence

    from multiworld._join.arguments import JoinPlan, StateLike
    from multiworld.world import World

__all__ = ["UNDO_BUDGET", "JoinAllRequest", "Joins", "close"]

ANSWER = 10.0
"""Seconds that the launcher has to answer; its process may be busy starting workers."""
UNDO_BUDGET = 5.0
"""Seconds that giving up may take."""
_LOOK_EVERY = 0.5


class JoinAllRequest:
    """Options of one call of `join_all`; `stop` is set when the call was cancelled."""

    def __init__(
        self,
        rejoin: bool,
        timeout: float | dt.timedelta | None,
        state: Mapping[str, StateLike] | None,
        gpu: int | None,
        stop: threading.Event,
    ) -> None:
        self.rejoin = rejoin
        self.timeout = timeout
        self.state = state or {}
        self.gpu = gpu
        self.stop = stop
        self.ended = False  # `Joins.join` has returned, or raised
        self.holds: list[PendingJoin] = []


class PendingJoin:
    """One world being joined, by one thread; any number of calls may wait for it.

    Attributes:
        done: set when the thread has ended.
        gone: set when it was undone.
        world: what it brought.
        fresh: whether it joined that.
        error: why it failed.
        calls: that want it, and have neither failed nor been given it. The last that fails undoes it.
        kept: whether a call was given it: from then on it is the program's.
        over: whether it is being undone; it takes no more calls.
        previous: of this name, being undone.
    """

    def __init__(self, previous: PendingJoin | None) -> None:
        self.done = threading.Event()
        self.gone = threading.Event()
        self.world: World | None = None
        self.fresh = False
        self.error: Exception | None = None
        self.calls: set[JoinAllRequest] = set()
        self.kept = False
        self.over = False
        self.previous = previous


@dataclass(frozen=True)
class _Call:
    """One call of `join_all`.

    Attributes:
        request: its options.
        plans: by name of the world.
        after: by name, the worlds to join before it.
        pending: by name, what it waits for.
        own: the joins that it began.
        news: set when one of these has ended.
    """

    request: JoinAllRequest
    plans: dict[str, JoinPlan]
    after: dict[str, tuple[str, ...]]
    pending: dict[str, PendingJoin] = field(default_factory=dict)
    own: set[PendingJoin] = field(default_factory=set)
    news: threading.Event = field(default_factory=threading.Event)


class Joins:
    """The worlds that the launcher assigned to this process, and those being joined.

    Args:
        launcher: its client; None: this process's launcher.
    """

    def __init__(self, launcher: LauncherClient | None = None) -> None:
        self.launcher = LauncherClient(reports()) if launcher is None else launcher
        self._one = WorldJoiner(self.launcher)
        self._lock = threading.Lock()
        self._pending: dict[str, PendingJoin] = {}
        self._made: dict[str, PendingJoin] = {}  # it has come about, and no call was given it yet
        self._connects = True  # for `retiring`: once

    def join(self, names: Sequence[str], request: JoinAllRequest) -> dict[str, World]:
        """Return the worlds of `names`, active; `keep` or `undo` ends the call."""
        assigned = self.launcher.ask(ANSWER)
        self._connects = False
        wanted = tuple(dict.fromkeys(names)) or tuple(assigned)
        check_names(wanted, request.state, assigned)
        given = request.timeout, request.gpu
        plans = {
            name: self.launcher.following(assigned[name].plan(*given, request.state.get(name)))
            for name in wanted
        }
        stateful = [name for name in wanted if plans[name].state is not None]
        there = worlds()
        for name in stateful:
            world = there.get(name)
            # One that broke is joined again with the state that is given, if it has had one.
            if world is not None and (world.state is State.ACTIVE or world._plan.state is None):  # noqa: SLF001  (joins make worlds)
                check_state(world, plans[name])
        call = _Call(request, plans, {name: assigned[name].after for name in wanted})
        try:
            self._begin(call, wanted)
            self._await(call)
            for name in stateful:  # another call may have joined it meanwhile
                if (joined := call.pending[name].world) is not None:
                    check_state(joined, plans[name])
        except BaseException:
            self.undo(request)
            raise
        pending_joins = call.pending.items()
        return {name: pending.world for name, pending in pending_joins if pending.world is not None}

    def keep(self, request: JoinAllRequest) -> None:
        """The program has the worlds of a call: no other call undoes them."""
        with self._lock:
            for pending in request.holds:
                pending.kept = True
                pending.calls.clear()
                self._forget(self._made, pending)
            request.holds = []

    def undo(self, request: JoinAllRequest) -> None:
        """Give up what a call wants, and close what was joined for it and for no other call."""
        request.stop.set()
        deadline = time.monotonic() + UNDO_BUDGET
        with self._lock:
            holds, request.holds = request.holds, []
            for pending in holds:
                pending.calls.discard(request)
            over = [pending for pending in holds if not (pending.calls or pending.kept or pending.over)]
            for pending in over:
                pending.over = True
        for pending in over:
            pending.done.wait(max(0.0, deadline - time.monotonic()))
        close([pending.world for pending in over if pending.world is not None and pending.fresh])
        with self._lock:
            for pending in over:
                self._forget(self._pending, pending)  # its thread never began, or has not ended yet
                self._forget(self._made, pending)
                pending.gone.set()

    def _forget(self, of: dict[str, PendingJoin], pending: PendingJoin) -> None:
        for name in [name for name, each in of.items() if each is pending]:
            del of[name]

    def retiring(self) -> bool:
        """See `multiworld.retiring`."""
        if self._connects:
            self._connects = False
            with contextlib.suppress(MultiworldError):  # there is no launcher, or it does not answer
                self.launcher.ask(ASKING)
        return self.launcher.retirement.begun

    def _begin(self, call: _Call, names: Sequence[str]) -> None:
        """Join these worlds, or share the joins of other calls that have begun."""
        mine: list[str] = []
        with self._lock:
            for name in names:
                pending, made = self._pending.get(name), self._made.get(name)
                if pending is None or pending.over:
                    previous = pending or (made if made is not None and made.over else None)
                    pending = self._pending[name] = PendingJoin(previous)
                    call.own.add(pending)
                    mine.append(name)
                call.pending[name] = pending
                for each in (pending, made):
                    if each is not None and not each.over:
                        each.calls.add(call.request)
                        call.request.holds.append(each)
        for name in mine:
            before = [call.pending[each] for each in call.after[name] if each in call.pending]
            thread = threading.Thread(
                target=self._join_one,
                args=(call.plans[name], call.pending[name], before, call.request, call.news),
                daemon=True,
                name=f"m8d-join-{name}",
            )
            try:
                thread.start()
            except RuntimeError as error:  # the other calls that share this join do not wait for it either
                call.pending[name].error = no_thread(name, error)
                self._ended(call.pending[name], call.news)

    def _await(self, call: _Call) -> None:
        """Wait until all joins have ended; their timeouts, and those of the joins before them, bound it."""
        left = set(call.pending)
        while left:
            for name in tuple(left):
                pending = call.pending[name]
                if not pending.done.is_set():
                    continue
                if pending.error is None:
                    left.remove(name)
                elif isinstance(pending.error, JoinAbandonedError) and pending not in call.own:
                    self._begin(call, (name,))  # by the other call; this one goes on
                else:
                    raise _anew(pending.error)  # several calls may wait for it
            if call.request.stop.is_set():
                raise JoinAbandonedError(next(iter(call.pending)), "join_all was cancelled")
            if left:
                call.news.wait(_LOOK_EVERY)  # joins of other calls do not set it
                call.news.clear()

    # -- one world

    def _join_one(
        self,
        plan: JoinPlan,
        pending: PendingJoin,
        before: list[PendingJoin],
        request: JoinAllRequest,
        news: threading.Event,
    ) -> None:
        def stopped() -> bool:
            """Whether no call wants it any more."""
            with self._lock:
                return not pending.kept and all(each.stop.is_set() for each in pending.calls)

        try:
            if pending.previous is not None:
                pending.previous.gone.wait(UNDO_BUDGET)
            for each in before:
                while not each.done.wait(_LOOK_EVERY) and not stopped():
                    continue
                if each.error is not None or stopped():
                    raise JoinAbandonedError(  # noqa: TRY301  (recorded below, as every error is)
                        plan.name, f"world {plan.name!r} comes after one that could not be joined"
                    )
            pending.world, pending.fresh = self._one.bring(plan, request.rejoin, stopped)
            with self._lock:
                late = pending.over and pending.fresh
                if pending.fresh and not pending.over:
                    self._made[plan.name] = pending
            if late:
                pending.world.close(UNDO_BUDGET)
        except Exception as exc:  # noqa: BLE001  (raised by join_all)
            pending.error = _anew(exc)  # without its frames, which have `pending`
        finally:
            self._ended(pending, news)

    def _ended(self, pending: PendingJoin, news: threading.Event) -> None:
        with self._lock:
            self._forget(self._pending, pending)
        pending.done.set()
        news.set()


def _anew(error: Exception) -> Exception:
    """Return a new one, without frames; an error of the program's own as it is, with its traceback."""
    return as_new(error) if isinstance(error, MultiworldError) else error


def close(worlds: list[World]) -> None:
    """Close them, all together in `UNDO_BUDGET` seconds."""
    deadline = time.monotonic() + UNDO_BUDGET
    for world in worlds:
        world.close(max(0.1, deadline - time.monotonic()))
