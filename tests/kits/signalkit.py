"""A signal at each instruction of some code, as Ctrl-C may come: its handler raises `Interrupted`."""

from __future__ import annotations

import _thread
import dis
import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import CodeType, FrameType

# Of `await`, where the frame that is awaited hears of the signal.
_AWAITS = {
    dis.opmap.get(name)
    for name in ("SEND", "YIELD_FROM", "YIELD_VALUE", "RESUME", "JUMP_BACKWARD_NO_INTERRUPT")
}


class Interrupted(BaseException):
    """What the handler raises."""


class _Signal(int):
    # Read as an attribute: this thread hears of a signal only after it has left the tracing function.
    sent = property(_thread.interrupt_main)


class At:
    """Have a signal come in this thread before instruction number `at` of some files.

    Args:
        at: from 1 on.
        files: by ``__file__`` of their modules.
        more: code objects of other files.

    Attributes:
        left: how many instructions were missing when it ended; above 0, no signal came.
    """

    def __init__(self, at: int, files: Collection[str], *more: CodeType) -> None:
        self.left = at
        self._files, self._more = files, more

    def __enter__(self) -> None:
        self._before, self._handler = sys.gettrace(), signal.signal(signal.SIGINT, self._handle)
        self._signal = _Signal(signal.SIGINT)
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        signal.signal(signal.SIGINT, self._handler)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in self._files and frame.f_code not in self._more:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_code.co_code[frame.f_lasti] not in _AWAITS:
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)  # the next call of this function would be the first to hear of it
                self._signal.sent  # noqa: B018  (see there)
        return self._trace

    def _handle(self, _: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename in self._files:
                raise Interrupted
            frame = frame.f_back  # else it is over, and an event loop would be interrupted
