"""Raise exceptions without reference cycles: one in place of another, and one that is kept."""

from __future__ import annotations

import sys
from typing import NoReturn, TypeVar

__all__ = ["as_new", "no_tensor", "not_a_tensor", "raise_instead", "raised_by_the_program"]

E = TypeVar("E", bound=BaseException)


def as_new(error: E) -> E:
    """Return a copy of an exception and of its causes, without frames.

    What is kept is not raised, and what was raised is not kept: an exception that was raised holds the frames
    that it went through and those of their callers, and with them tensors, buffers, sockets. Where such a
    frame holds what keeps the exception, all of it lives until the garbage is collected. One that is raised
    in two threads has the frames of both.
    """
    found = _copied(error)
    last: BaseException = found
    seen, cause = {id(error)}, error.__cause__
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        copied = _copied(cause)
        BaseException.__setattr__(last, "__cause__", copied)
        last, cause = copied, cause.__cause__
    return found


def _copied(error: E) -> E:
    """Return a copy without frames, cause and context; where there can be none the exception itself."""
    try:
        made = type(error).__new__(type(error), *error.args)  # without __init__: it may take other arguments
        BaseException.__setattr__(made, "args", error.args)
        for name in ("errno", "strerror", "filename", "filename2") if isinstance(error, OSError) else ():
            if getattr(made, name) != getattr(error, name):
                setattr(made, name, getattr(error, name))
        made.__dict__.update(error.__dict__)
        if "__notes__" in error.__dict__:
            made.__dict__["__notes__"] = list(error.__dict__["__notes__"])
    except Exception:  # noqa: BLE001  (whatever a class of the user's own does)
        return error.with_traceback(None)
    return made


def raise_instead(error: BaseException, instead: BaseException | None) -> NoReturn:
    """Raise `instead`, with `error` as its cause; `error` itself where `instead` is None or the same.

    Call it in the handler of `error` and create `instead` in the argument: a variable for it, in the caller
    or here, would make frame and exception refer to each other and keep torch's work and gloo's device alive
    until the next GC cycle.
    """
    try:
        if instead is None or instead is error:
            raise error
        raise instead from error
    finally:
        del error, instead


def raised_by_the_program(error: BaseException) -> bool:
    """Whether an exception that came out of a waiting call came by way of code of the program's own.

    That is a signal's handler: it runs where the call waits. What an operation meets with is raised by this
    package, by torch or by the standard library; a copy (`as_new`) has no frames. torch's own handler, of
    data loaders whose worker was killed, is in ``torch.utils``.

    Args:
        error: caught by a function of this package, so that its frames are those of the call.
    """
    frame = error.__traceback__
    if frame is None or frame.tb_next is None:
        return False  # of the call itself: read and write end so each time
    while frame is not None:
        name = str(frame.tb_frame.f_globals.get("__name__", ""))
        package = name.partition(".")[0]
        if name.startswith("torch.utils.") or not (
            package in {"multiworld", "torch"} or package in sys.stdlib_module_names
        ):
            return True
        frame = frame.tb_next
    return False


def not_a_tensor(error: Exception) -> TypeError | None:
    """Return a TypeError if `error` shows that an operation was given no tensor; None otherwise."""
    if not isinstance(error, AttributeError) or error.name != "device":
        return None
    return no_tensor(error.obj)


def no_tensor(given: object) -> TypeError:
    """Return what an operation raises that was given this instead of a tensor."""
    return TypeError(f"{given!r:.80} is a {type(given).__name__}, and an operation takes a torch.Tensor")
