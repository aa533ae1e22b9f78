"""The selected world of this thread or asyncio task: the top of `multiworld._c10d.routing.stack`.

Autograd's device threads and its pool for deep re-entrant graphs are C++ threads that know nothing of context
variables; they do inherit torch's own thread-local state, so `propagating` carries the selection there.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch

from multiworld._c10d.routing import stack
from multiworld.errors import RouterError

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Iterator

    from multiworld._c10d.routing.state import WorldState

__all__ = [
    "Tracing", "current", "enter", "leave", "leave_instead", "propagating", "selected", "top", "unasked",
]  # fmt: skip

top: Callable[[], tuple[WorldState | None, ...]] = stack.top
"""The stack itself, for code where every call counts: ``top()[-1]``."""

_put: Callable[[tuple[WorldState | None, ...]], object] = stack.put

_KEY = "multiworld"


class _Used:
    """Features that this process has used, so that look-ups skip the others."""

    carried = False  # a backward pass carried a selection: look-ups ask torch's thread-local state
    traced = False  # something was compiled: look-ups ask whether this thread compiles


_here = threading.local()
# Private, without types, and in every version since 2.0.
_has: Any = torch._C._is_key_in_tls  # type: ignore[attr-defined, unused-ignore]
_get: Any = torch._C._get_obj_in_tls  # type: ignore[attr-defined, unused-ignore]
_stash: Any = torch._C._stash_obj_in_tls  # type: ignore[attr-defined, unused-ignore]


def current() -> WorldState | None:
    """Return the state of the world selected here; None means torch's own default state."""
    state = top()[-1]
    if state is None:
        if _Used.traced and (trace := getattr(_here, "trace", None)) is not None:
            answer: WorldState | None = trace.answer()
            return answer
        if _Used.carried and _has(_KEY):
            carried: WorldState | None = _get(_KEY)
            return carried
    return state


def unasked() -> WorldState | None:
    """As `current`, for what the compiler asks for its own sake: no compiled code depends on the answer."""
    trace: Tracing | None = getattr(_here, "trace", None) if _Used.traced else None
    return current() if trace is None or top()[-1] is not None else trace.state


def enter(state: WorldState | None) -> None:
    """Select `state` in this thread or task, until the `leave` that belongs to it.

    Args:
        state: a world's, or None for torch's own default state inside a world's block.
    """
    _put((*top(), state))


def leave() -> Any:
    """Select again what was selected before the last `enter` in this thread or task.

    Returns:
        The state that was entered.

    Raises:
        RouterError: nothing was entered here.
    """
    entered = top()
    depth = len(entered)
    if depth == 2:
        _put(stack.EMPTY)
    elif depth > 1:
        _put(entered[:-1])
    else:
        raise RouterError(
            "A world was left that is not entered in this thread or task",
            rule="Each leave belongs to an enter in the same thread and the same asyncio task",
            next_step="Use `with world:` and do not carry the block across threads or tasks",
        )
    return entered[-1]


def leave_instead(left: WorldState | None, name: str) -> WorldState | None:
    """Leave the block of the world `name` that was entered last, where `leave` has left another one.

    Args:
        left: what `leave` returned: the block of another world is open, and stays so.
        name: of the world whose block ends.

    Returns:
        The state that was entered; None where no block of this world is open here.
    """
    entered = (*top(), left)
    places = [place for place, state in enumerate(entered) if state is not None and state.name == name]
    if not places:
        _put(entered)
        return None
    _put((*entered[: places[-1]], *entered[places[-1] + 1 :]))
    return entered[places[-1]]


@contextlib.contextmanager
def selected(state: WorldState | None) -> Iterator[None]:
    """Select `state` for a block; re-entrant. None is torch's own, also in a backward pass of a world."""
    before = top()
    try:
        enter(state)
        if state is None and unasked() is not None:
            with _nothing_else():
                yield
        else:
            yield
    finally:
        _put(before)


@contextlib.contextmanager
def _nothing_else() -> Iterator[None]:
    trace, _here.trace = getattr(_here, "trace", None), None
    try:
        with propagating(None):
            yield
    finally:
        _here.trace = trace


@contextlib.contextmanager
def propagating(state: WorldState | None) -> Iterator[None]:
    """Let the C++ threads that run work for this block see `state` as selected.

    Only torch's own thread-local state is inherited by them. It is set back before the block's thread can do
    anything else, so that it never speaks for another asyncio task of the thread.
    """
    stash = _stasher()
    before = _get(_KEY) if _has(_KEY) else None
    _Used.carried = True
    stash(_KEY, state)
    try:
        yield
    finally:
        stash(_KEY, before)


# Modules whose functions ask on behalf of their callers.
_PASSED_ON = ("multiworld.", "torch.distributed.distributed_c10d", "torch.distributed.c10d_logger")
# Parts of torch's compiler that ask for a log's line, or for a cache's sake: no code depends on the answer.
_FOR_THEMSELVES = (
    "torch._logging",
    "torch._inductor.codecache",
    "torch._inductor.remote_cache",
    "torch._functorch._aot_autograd.autograd_cache",
    "torch._dynamo.pgo",
)


class Tracing:
    """For a block in which torch's compiler traces: note whether it asks which world is selected.

    What is selected stays so. The block's stack ends with None, so that every look-up comes to `current`.
    """

    def __init__(self) -> None:
        self.state: WorldState | None = None
        self.asked_for = False
        self._before: Tracing | None = None

    def __enter__(self) -> None:
        self.state = current()
        self._before = getattr(_here, "trace", None)
        _put((*top(), None))
        _here.trace = self
        _Used.traced = True

    def __exit__(self, *_exc: object) -> None:
        _here.trace = self._before
        leave()

    def answer(self) -> WorldState | None:
        """Answer a look-up from within the block, and note it."""
        if not self.asked_for:
            frame: types.FrameType | None = sys._getframe(2)
            name = ""
            while frame is not None and (name := frame.f_globals.get("__name__", "")).startswith(_PASSED_ON):
                frame = frame.f_back
            self.asked_for = not name.startswith(_FOR_THEMSELVES)
        return self.state

    @staticmethod
    def asked() -> bool:
        """Whether the trace that this thread is in has asked."""
        trace = getattr(_here, "trace", None)
        return trace is not None and trace.asked_for


@functools.cache
def _stasher() -> Callable[[str, object], None]:
    """Return torch's function, or one that gives it the reference it takes.

    Up to 2.6 it keeps the object without counting the reference, and gives it back when the object is
    replaced: the count sinks with every use until the object is freed under its users. The build is asked, on
    an object of ours.
    """
    increase = ctypes.pythonapi.Py_IncRef
    increase.argtypes = [ctypes.py_object]
    increase.restype = None
    probe = object()
    increase(probe)
    count = sys.getrefcount(probe)
    _stash("multiworld_probe", probe)
    if sys.getrefcount(probe) > count:
        # Counted: the reference given beforehand is one too many. It stays: an object's worth of memory,
        # once.
        return _stash  # type: ignore[no-any-return]

    def put(key: str, value: object) -> None:
        increase(value)
        _stash(key, value)

    return put
