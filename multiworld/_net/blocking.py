"""`BlockingCall`: a call that may block for ever, on a thread of its own, waited for with a deadline."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BlockingCall"]

T = TypeVar("T")


class BlockingCall(Generic[T]):
    """A function, called in a daemon thread, which is left behind if the function does not return in time.

    Args:
        function: to call.
        name: of the thread.

    Attributes:
        done: set when the function has returned or raised.

    Raises:
        RuntimeError: no thread can be started.
    """

    def __init__(self, function: Callable[[], T], *, name: str) -> None:
        self.done = threading.Event()
        self._function = function
        self._results: list[T] = []
        self._errors: list[BaseException] = []
        threading.Thread(target=self._call, name=name, daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Wait for at most `seconds`; return whether the function has returned or raised."""
        return self.done.wait(max(0.0, seconds))

    def result(self) -> T:
        """Return the function's result, or raise its exception; once, and only when it is done."""
        if self._errors:
            raise self._errors.pop()  # popped: its traceback refers to this frame, and so to this object
        return self._results.pop()

    def _call(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as error:  # noqa: BLE001  (`result` raises it)
            self._errors.append(error)
        finally:
            self.done.set()
