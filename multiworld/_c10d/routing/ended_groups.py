"""Process groups before they are made and after their world's end: questions, and errors of operations.

Error handlers ask for rank, size and backend after a breakage, and in a block whose world was closed
meanwhile. Stock torch answers until the default group is destroyed, even with broken connections; so do
worlds. A group that is made when it is needed is not made for a question.

A program may keep a group longer than its world. Its operations raise what they do in a world that is over.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import inspect
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed.distributed_c10d as c10d

from multiworld.errors import MultiworldError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = [
    "QUESTIONS", "Departed", "as_torch_says", "ended", "ended_by_name", "facts", "facts_before", "refuse",
    "remember", "said_as_torch_does",
]  # fmt: skip

QUESTIONS = frozenset(
    inspect.unwrap(getattr(c10d, name)).__code__
    for name in (
        "is_initialized",
        "get_rank",
        "get_world_size",
        "_get_group_size",
        "get_backend",
        "get_backend_config",
        "get_group_rank",
        "get_global_rank",
        "get_process_group_ranks",
        "_get_group_tag",
    )
    if hasattr(c10d, name)
)
"""The code of functions that communicate nothing: they may have the default group of a world that is over."""

_ends: weakref.WeakKeyDictionary[Any, Exception] = weakref.WeakKeyDictionary()
"""By process group of a world that is gone, as long as a program keeps it: what its operations raise."""

_here = threading.local()
_lock = threading.Lock()
_PREFIXES = 256
_by_prefix: dict[str, Exception] = {}
"""By what the names of a world's groups began with, of the last worlds that are gone: the same error."""


def remember(groups: Iterable[Any], prefix: str, make_error: Callable[[], Exception]) -> None:
    """Remember what operations on these groups raise from now on.

    Args:
        groups: of a world that is over.
        prefix: what their names begin with.
        make_error: makes the error of a call in that world. It is not told to the block that this runs in.
    """
    error = contextvars.copy_context().run(make_error)
    for group in groups:
        _ends[group] = error
    with _lock:
        _by_prefix.pop(prefix, None)
        _by_prefix[prefix] = error  # as the latest
        if len(_by_prefix) > _PREFIXES:
            del _by_prefix[next(iter(_by_prefix))]


@contextlib.contextmanager
def as_torch_says() -> Iterator[None]:
    """In this block a name that torch does not find is told in torch's words, which its caller expects."""
    before, _here.as_torch_says = said_as_torch_does(), True
    try:
        yield
    finally:
        _here.as_torch_says = before


def said_as_torch_does() -> bool:
    """Whether this thread is in a block of `as_torch_says`."""
    return getattr(_here, "as_torch_says", False)


def refuse(group: Any) -> None:
    """Raise, if the world of this group is gone: what has ended in C++ says nothing of the world."""
    known = _ends.get(group)
    if known is not None:
        raise copy.copy(known)


def is_ended(group: Any) -> bool:
    """Whether the world of this group is gone."""
    return group in _ends


def ended(error: BaseException, group: Any) -> BaseException | None:
    """Return what to raise instead of an operation's `error`, where the world of its `group` is gone."""
    return _instead(error, _ends.get(group))


def ended_by_name(error: BaseException, name: str) -> BaseException | None:
    """As `ended`, of a group whose name torch does not find any more."""
    with _lock:
        # A name of a world may have colons: that of `a` begins as that of `a:1` does.
        prefix = max((each for each in _by_prefix if name.startswith(each)), key=len, default="")
        known = _by_prefix.get(prefix)
    return _instead(error, known)


def _instead(error: BaseException, known: Exception | None) -> BaseException | None:
    if (
        known is None
        or isinstance(error, MultiworldError)
        or not isinstance(error, RuntimeError | ValueError)
    ):
        return None
    return copy.copy(known)


class Departed:
    """Stands for the default group of a world that was closed, or not made yet: it can do nothing.

    Args:
        rank: of this process in it.
        size: of it.
        name: of its backend.
        group_name: in torch's registry.
    """

    def __init__(self, rank: int, size: int, name: str, group_name: str) -> None:
        self._rank, self._size, self._name = rank, size, name
        self.group_name = group_name

    @classmethod
    def of(cls, group: Any, group_name: str) -> Departed:
        """Return what stands for a process group that goes."""
        return cls(int(group.rank()), int(group.size()), str(group.name()), group_name)

    def rank(self) -> int:
        """As of the process group."""
        return self._rank

    def size(self) -> int:
        """As of the process group."""
        return self._size

    def name(self) -> str:
        """As of the process group."""
        return self._name

    def _has_hooks(self) -> bool:
        return False

    def shutdown(self) -> None:
        """There is nothing to shut down any more."""


def facts(entries: dict[Any, Any], names: dict[Any, Any]) -> dict[str, Any]:
    """Return what a map by process group says, by the groups' names, without anything of the groups.

    Args:
        entries: the map.
        names: the groups' names.
    """
    found = {}
    for group, value in list(entries.items()):
        name = dict.get(names, group)
        if name is not None:
            # Of (backend, store), the backend: the store goes with the world.
            found[str(name)] = (value[0], None) if isinstance(value, tuple) else value
    return found


def facts_before(backend: str, size: int, group_name: str) -> dict[str, Any]:
    """Return what torch's maps by process group will say of a default group that is not made yet.

    Args:
        backend: of the group.
        size: of the group.
        group_name: by which its stand-in is known.
    """
    return {
        "_pg_map": (backend, None),
        "_pg_names": group_name,
        "_pg_group_ranks": {rank: rank for rank in range(size)},
        "_pg_backend_config": str(c10d.BackendConfig(c10d.Backend(backend))),
        "_pg_to_tag": f"ptd:{group_name}",
    }


def _forked() -> None:
    global _lock  # noqa: PLW0603  (a thread of the parent may have held it)
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)
