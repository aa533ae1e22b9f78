"""Blocking call on a thread of its own, whose outcome a task awaits."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, TypeVar

from multiworld.uninterrupted import stream_of_caller
from multiworld.work import seen

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["start"]

T = TypeVar("T")


def start(run: Callable[[], T], name: str, over: Callable[[T | None, bool], object]) -> asyncio.Future[T]:
    """Run `run` on a daemon thread, in the caller's CUDA stream; return what has its outcome, in its loop.

    Who awaits that, shielded, deletes its reference at the end: it has the error, which has the frame.

    Args:
        run: blocks.
        name: of the thread.
        over: called in the thread at its end: with what `run` returned, None where it raised, and whether
            the loop was there to be told.

    Raises:
        RuntimeError: the process gets no other thread.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()
    stream = stream_of_caller()  # it may send a state that the caller's kernels are computing
    result.add_done_callback(seen)  # its awaiter may be cancelled, and then cancelled again

    def work(result: asyncio.Future[T]) -> None:
        value: T | None = None
        error: BaseException | None = None
        told = True
        try:
            with stream():
                value = run()
        except BaseException as exc:  # noqa: BLE001  (it is raised where the outcome is awaited)
            error = exc
        try:
            loop.call_soon_threadsafe(_settle, result, value, error)
        except RuntimeError:  # the loop was closed meanwhile: no task waits
            told = False
        finally:
            del error, result  # it has this frame
        over(value, told)

    threading.Thread(target=work, args=(result,), daemon=True, name=name).start()
    return result


def _settle(result: asyncio.Future[T], value: T | None, error: BaseException | None) -> None:
    if result.done():
        return
    if error is not None:
        result.set_exception(error)
    elif value is not None:
        result.set_result(value)
