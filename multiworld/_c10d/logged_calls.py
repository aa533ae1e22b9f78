"""Collectives and messages that torch carries, in the log of their world's operations.

A call is pending while a thread is inside of it or waits for its work. One that was posted, and that no
thread waits for, does not count: whether such a work is over cannot be asked without locks of torch's. Calls
that torch makes in C++ (DDP's reducer) are not in the log.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING

from torch import Tensor

from multiworld._c10d.lane.p2p_dispatch import number_in, ranks_of
from multiworld._core.operations.log import ENDED, GROUP, NUMBER, went_well

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch._C._distributed_c10d import ProcessGroup, Work

    from multiworld._c10d.routing.state import WorldState
    from multiworld._core.operations.log import Entry, LoggedGroup, OperationLog

__all__ = ["LoggedCalls", "size_of", "waited", "waiting"]

_KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "recv_anysource": "recv",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather_coalesced": "all_gather_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
"""Methods of a ProcessGroup -> names in torch.distributed, where these differ."""

_OF_INPUT = frozenset({
    "allgather", "_allgather_base", "all_gather_single", "gather",
    "allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single_coalesced",
})  # fmt: skip
"""Methods whose second argument has one size on all members."""

_ANY_SIZE = frozenset({"alltoall", "alltoall_base", "all_to_all_single", "barrier"})

_waits: weakref.WeakKeyDictionary[Work, _Call] = weakref.WeakKeyDictionary()
"""By torch's work."""

_any: dict[weakref.ref[Work], _Call] = vars(_waits)["data"]
"""What the mapping keeps them in: to look whether there are any costs nothing."""


class _Call:
    """One call that torch carries, as the log asks for it.

    Attributes:
        done: whether no thread waits for it.
        state: of its world, if that is still there.
    """

    __slots__ = ("_entry", "done", "state")

    def __init__(self, entry: Entry, state: Callable[[], WorldState | None]) -> None:
        self._entry = entry
        self.done = True
        self.state = state

    def __call__(self) -> _Call:
        """Return itself, as a weak reference returns what is there."""
        return self

    @property
    def has_caller(self) -> bool:
        """Whether a thread waits for it."""
        return not self.done

    def ended(self, *, well: bool) -> None:
        """A thread has waited for it."""
        if self._entry[ENDED] is not self:
            return
        self._entry[ENDED] = time.monotonic()
        if well:
            went_well(self._entry)


def waiting(work: Work) -> WorldState | None:
    """A thread begins to wait for a work of torch's; returns of which world it is, where that is known."""
    if _any and (call := _waits.get(work)) is not None:
        call.done = False
        return call.state()
    return None


def waited(work: Work, *, well: bool) -> None:
    """A thread has waited for it; `well`: without an error."""
    # One that has failed fails again: its world stays known.
    if _any and (call := _waits.pop(work, None) if well else _waits.get(work)) is not None:
        call.ended(well=well)


class LoggedCalls:
    """Those of one world.

    Args:
        log: of the world's operations.
        state: of the world; it owns this.
    """

    def __init__(self, log: OperationLog, state: WorldState) -> None:
        self._log = log
        self._state = weakref.ref(state)
        # Weak: a group that its users have destroyed must go.
        self._known: weakref.WeakKeyDictionary[ProcessGroup, LoggedGroup] = weakref.WeakKeyDictionary()

    def run(
        self,
        name: str,
        group: ProcessGroup,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        function: Callable[..., Work | None],
    ) -> Work | None:
        """Call a method of a ProcessGroup and return its work.

        Args:
            name: of the method.
            group: the ProcessGroup.
            args: of the method.
            kwargs: of the method.
            function: the method itself, torch's own.
        """
        entry = self._entry(name, group, args)
        self._log.append(entry)
        try:
            work = function(group, *args, **kwargs) if kwargs else function(group, *args)
        except BaseException:
            entry[ENDED] = time.monotonic()
            if entry[NUMBER] is not None:  # nothing was begun: the next call has this number on the others
                entry[GROUP].take_back(entry[NUMBER])
                entry[NUMBER] = None
            # An exception that is kept has this frame, and must not keep the group or its world.
            del group, args, kwargs, function
            raise
        if work is None:
            entry[ENDED] = time.monotonic()
            went_well(entry)
        else:
            entry[ENDED] = _waits[work] = _Call(entry, self._state)
        return work

    def _entry(self, name: str, group: ProcessGroup, args: tuple[object, ...]) -> Entry:
        found = self._known.get(group)
        if found is None:
            found = self._known[group] = self._group(group)
        kind, now = _KINDS.get(name, name), time.monotonic()
        if kind in {"send", "recv"}:
            peer = None if name == "recv_anysource" or len(args) < 2 else _rank(found, args[1])
            tag = args[-1] if len(args) > 1 and type(args[-1]) is int else 0
            return [found, kind, None, size_of(args[:1]), peer, tag, now, None]
        root = next((each.rootRank for each in args if hasattr(each, "rootRank")), None)
        size = 0 if name in _ANY_SIZE else size_of(args[1:2] if name in _OF_INPUT else args[:1])
        return [found, kind, found.following(), size, _rank(found, root), None, now, None]

    def _group(self, group: ProcessGroup) -> LoggedGroup:
        state = self._state()
        ranks = () if state is None else ranks_of(group, state)
        if state is None or not ranks:
            return self._log.world
        return self._log.group(number_in(group, state), ranks)


def size_of(given: object) -> int:
    """Return the bytes of the first tensor in lists of lists; 0 where there is none."""
    while isinstance(given, list | tuple):
        if not given:
            return 0
        given = given[0]
    # A sparse tensor has no nbytes.
    return given.numel() * given.element_size() if isinstance(given, Tensor) else 0


def _rank(group: LoggedGroup, inside: object) -> int | None:
    """Return the rank in the world of one in the group; None where it is none."""
    return group.ranks[inside] if isinstance(inside, int) and 0 <= inside < len(group.ranks) else None
