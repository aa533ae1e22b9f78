"""Sends and receives of a world's process groups, posted by torch's functions: which of them the lane takes.

``dist.send``, ``isend``, batches and pipelines all call `send`, `recv` or `recv_anysource` of a ProcessGroup
in the end; `multiworld._c10d.routing.error_hooks` asks here first. Each process group has a channel of its
own, a number made of the name that all its members know it by.
"""

from __future__ import annotations

import hashlib
import weakref
from operator import index
from typing import TYPE_CHECKING, NamedTuple, SupportsIndex

import torch

from multiworld._c10d.lane.messages import MAX_TAG
from multiworld._core.lane.operations import SizesDifferError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor
    from torch._C._distributed_c10d import ProcessGroup, Work

    from multiworld._c10d.lane.messages import Messages
    from multiworld._c10d.routing.state import WorldState

__all__ = ["Channel", "Channels", "number_in", "number_of", "ranks_of"]

_CPU = torch.device("cpu")
_NAMES = {
    "send": ("tensors", "dstRank", "tag"),
    "recv": ("tensors", "srcRank", "tag"),
    "recv_anysource": ("tensors", "tag"),
}
"""The methods, and torch's names of their parameters."""


class Channel(NamedTuple):
    """A process group's place in the lane.

    Attributes:
        number: 0 for the world's default group.
        ranks: of its members in the world, by their ranks in the group.
        own: rank of this process in the group.
        rank_of: its members' ranks in the group, by those in the world.
        timeout: seconds, of its operations; 0: the world's.
    """

    number: int
    ranks: tuple[int, ...]
    own: int
    rank_of: Mapping[int, int]
    timeout: float


class Channels:
    """Those of one world.

    Args:
        messages: of the world.
        state: of the world; it owns this.

    Attributes:
        coalescing: is empty but where torch collects calls of collectives, to carry them out later.
    """

    def __init__(self, messages: Messages, state: WorldState) -> None:
        self._messages = messages
        self._state = weakref.ref(state)
        self.coalescing: Mapping[ProcessGroup, object] = state.pg_coalesce_state
        # Weak: a group that its users have destroyed must go.
        self._known: weakref.WeakKeyDictionary[ProcessGroup, Channel | None] = weakref.WeakKeyDictionary()

    def posted(
        self,
        name: str,
        group: ProcessGroup,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        function: Callable[..., Work],
    ) -> Work | None:
        """Post a send or a receive over the lane; None where it is torch's to post, or to refuse.

        Args:
            name: of the ProcessGroup's method.
            group: the ProcessGroup.
            args: of the method.
            kwargs: of the method.
            function: the method itself, torch's own.

        Raises:
            BrokenWorldException, WorldClosedError: the world is over.
        """
        if kwargs:
            names = _NAMES[name]
            args = (*args, *(kwargs[each] for each in names[len(args) :] if each in kwargs))
        channel = self._known.get(group) or self.of(group)
        if channel is None or len(args) != len(_NAMES[name]):
            return None
        given, tag = args[0], _whole(args[-1])
        if not isinstance(given, list | tuple) or len(given) != 1 or not 0 <= tag <= MAX_TAG:
            return None
        (tensor,) = given
        if not self._messages.takes(tensor):
            return self._unwrapped(name, group, tensor, args, function)
        if name == "recv_anysource":
            work = self._messages.post_receive(tensor, None, tag, channel.number, channel.rank_of.__getitem__)
        else:
            peer = _whole(args[1])
            if not 0 <= peer < len(channel.ranks) or peer == channel.own:
                return None
            post = self._messages.post_send if name == "send" else self._messages.post_receive
            work = post(tensor, channel.ranks[peer], tag, channel.number, channel.rank_of.__getitem__)
        work.limit = channel.timeout
        error = work.operation.error
        if error is not None and not isinstance(error, SizesDifferError):  # that is for `wait` to raise
            work.wait()  # raises
        return work

    def _unwrapped(
        self,
        name: str,
        group: ProcessGroup,
        tensor: object,
        args: tuple[object, ...],
        function: Callable[..., Work],
    ) -> Work | None:
        from multiworld._c10d.lane import wrapped  # noqa: PLC0415  (hardly a program sends such tensors)

        if not wrapped.is_wrapper(tensor):
            return None

        def post(inside: Tensor) -> Work | None:
            return self.posted(name, group, ([inside], *args[1:]), {}, function)

        return wrapped.posted(lambda: function(group, *args), self._messages.takes, post)

    def ended(self, name: str) -> None:
        """Forget what no receive has taken of a group, which this process has destroyed."""
        number = number_of(name)
        self._messages.endpoint.drop(number)
        self._messages.log.drop(number)

    def of(self, group: ProcessGroup) -> Channel | None:
        """Return a process group's channel; None where its CPU tensors are another backend's than gloo's."""
        state = self._state()
        if state is None:
            return None
        if group not in self._known:  # another thread may have been first
            self._known[group] = made = _channel(group, state)
            if made is not None:
                self._messages.log.group(made.number, made.ranks)
        return self._known[group]


def _channel(group: ProcessGroup, state: WorldState) -> Channel | None:
    """Return the channel of a group; None where its CPU tensors are another backend's than gloo's."""
    if _CPU in group._device_types and not _is_gloo(str(dict.get(state.pg_backend_config, group, ""))):
        return None
    ranks = ranks_of(group, state)
    if not ranks:
        return None
    rank_of = {rank: inside for inside, rank in enumerate(ranks)}
    number = number_in(group, state)
    timeout = _timeout_of(group) if number else 0.0
    return Channel(number, ranks, int(group.rank()), rank_of, timeout)


def _timeout_of(group: ProcessGroup) -> float:
    """Return the seconds of a group's operations, which are the world's where `new_group` was given none."""
    try:
        timeout = group._get_backend(_CPU).options._timeout
    except (AttributeError, RuntimeError):  # its messages go over the lane alone
        return 0.0
    return float(timeout.total_seconds())


def ranks_of(group: ProcessGroup, state: WorldState) -> tuple[int, ...]:
    """Return a group's members as ranks of the world, by their ranks in it; none of an unknown group."""
    by_world = dict.get(state.pg_group_ranks, group) or {}
    return tuple(sorted(map(int, by_world), key=by_world.__getitem__))


def number_in(group: ProcessGroup, state: WorldState) -> int:
    """Return the number that all members know a group by; 0 for the world's default group."""
    return 0 if group is state.group else number_of(str(dict.get(state.pg_names, group, "")))


def _whole(number: object) -> int:
    """Return what torch takes `number` for: numpy's integers are some, too; -1 for what is none."""
    if type(number) is int:
        return number
    try:
        return index(number) if isinstance(number, SupportsIndex) else -1
    except TypeError:
        return -1


def _is_gloo(config: str) -> bool:
    return any(part.strip().lower() in {"gloo", "cpu:gloo"} for part in config.split(","))


def number_of(name: str) -> int:
    """Return the number of a group's channel: 56 bits of a digest of its name, never 0."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big") or 1
