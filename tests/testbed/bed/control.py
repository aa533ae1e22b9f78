"""The double's controls, in a rank: knobs, counters, and faults as context managers. Imports no torch."""

from __future__ import annotations

import ctypes
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bed.errors import BedError
from bed.knobs import COUNTERS, written

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Bed", "Counting", "library_info"]

_LONG_LIST = 1 << 16


def library_info(library: ctypes.CDLL | None = None) -> dict[str, Any] | None:
    """Return what the preloaded library says of itself, or None if none is preloaded."""
    loaded = library or ctypes.CDLL(None)
    try:
        ask = loaded.m8d_bed_info
    except AttributeError:
        return None
    out = ctypes.create_string_buffer(_LONG_LIST)
    ask(out, _LONG_LIST)
    return json.loads(out.value)


class Counting:
    """How far each counter went since `Bed.counting` was entered: ``.launches``, ``.aborts``, ..."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        self._before = {name: bed.count(name) for name in COUNTERS}
        self._after: dict[str, int] | None = None

    def freeze(self) -> None:
        """Keep the differences as they are now."""
        self._after = {name: self._bed.count(name) for name in COUNTERS}

    def __getattr__(self, name: str) -> int:
        if name not in COUNTERS:
            raise AttributeError(name)
        now = self._bed.count(name) if self._after is None else self._after[name]
        return now - self._before[name]


class Bed:
    """The double preloaded into this process.

    A fault is a context manager and puts its knobs back as they were; inside it the fault is on for every thread
    of this process, and only for this process.
    """

    def __init__(self, library: ctypes.CDLL, info: dict[str, Any]) -> None:
        self._library = library
        self.info = info
        library.m8d_bed_set.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        library.m8d_bed_get.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int]
        library.m8d_bed_count.argtypes = [ctypes.c_char_p]
        library.m8d_bed_count.restype = ctypes.c_long
        library.m8d_bed_stubs.argtypes = [ctypes.c_char_p, ctypes.c_int]

    @classmethod
    def here(cls) -> Bed:
        """Return the controls of this process's double.

        Raises:
            BedError: it is not preloaded.
        """
        library = ctypes.CDLL(None)
        info = library_info(library)
        if info is None:
            raise BedError(
                "the test bed's library is not in this process",
                rule="it is preloaded (LD_PRELOAD) before Python starts",
                next_step="Start the rank with a Launcher that was given the library",
            )
        return cls(library, info)

    def set(self, knob: str, value: object) -> None:
        """Set a knob of this process, at once; None, False or "" is off.

        Raises:
            BedError: no such knob, or no such value.
        """
        if self._library.m8d_bed_set(knob.encode(), written(knob, value).encode()):
            raise BedError(
                f"the library has no knob {knob}",
                rule=f"it has {', '.join(self.info['knobs'])}",
                next_step="Build the library from the same sources as this package",
            )

    def get(self, knob: str) -> str:
        """Return a knob's value.

        Raises:
            BedError: no such knob.
        """
        out = ctypes.create_string_buffer(_LONG_LIST)
        if self._library.m8d_bed_get(knob.encode(), out, _LONG_LIST) < 0:
            raise BedError(f"the library has no knob {knob}", rule=f"it has {', '.join(self.info['knobs'])}")
        return out.value.decode()

    def count(self, counter: str) -> int:
        """Return a counter; ``group_depth`` is that of the calling thread.

        Raises:
            BedError: no such counter.
        """
        value = self._library.m8d_bed_count(counter.encode())
        if value < 0:
            raise BedError(
                f"the library has no counter {counter}", rule=f"it has {', '.join(self.info['counters'])}"
            )
        return value

    def stubs(self) -> list[str]:
        """Return the names of the stubs that were hit in this process."""
        out = ctypes.create_string_buffer(_LONG_LIST)
        self._library.m8d_bed_stubs(out, _LONG_LIST)
        return out.value.decode().split()

    def abandon_group(self) -> int:
        """Close the NCCL groups this thread left open (so that a test can go on); return how many there were."""
        return self._library.m8d_bed_nccl_abandon_group()

    @contextmanager
    def knobs(self, **values: object) -> Iterator[Bed]:
        """Set knobs, and put them back on leaving. The others below are made of this."""
        before = {name: self.get(name) for name in values}
        try:
            for name, value in values.items():
                self.set(name, value)
            yield self
        finally:
            for name, value in reversed(before.items()):  # what narrows a fault goes last, as it came first
                self.set(name, value)

    @contextmanager
    def counting(self) -> Iterator[Counting]:
        """Count what happens inside: ``with bed.counting() as seen: ...; seen.launches``."""
        seen = Counting(self)
        try:
            yield seen
        finally:
            seen.freeze()

    def abort_hangs(self, seconds: float, *, phase: str = "before"):
        """Let ncclCommAbort hang, ``before`` or ``after`` it ends what is pending."""
        return self.knobs(ABORT_HANG_PHASE=phase, ABORT_HANG_MS=_ms(seconds))

    def abort_fails(self, result: int = 3):
        """Let ncclCommAbort return a code (3: ncclInternalError)."""
        return self.knobs(ABORT_RESULT=result)

    def enqueue_fails(self, result: int = 6, *, kind: str = "", after: int = 0):
        """Let every enqueue return a code (6: ncclRemoteError): only of a kind, only after so many good ones."""
        return self.knobs(ENQUEUE_FAIL_KIND=kind, ENQUEUE_FAIL_FROM=after + 1, ENQUEUE_RESULT=result)

    def group_end_fails(self, result: int = 6):
        """Let ncclGroupEnd return a code (6: ncclRemoteError)."""
        return self.knobs(GROUPEND_RESULT=result)

    def init_fails(self, result: int = 2):
        """Let every attempt to make a communicator return a code (2: ncclSystemError)."""
        return self.knobs(INIT_RESULT=result)

    def init_hangs(self, seconds: float):
        """Let every attempt to make a communicator take that long."""
        return self.knobs(INIT_HANG_MS=_ms(seconds))

    def operations_hang(self, *, after: int = 0):
        """Let every operation hang until it is aborted, after so many good ones."""
        return self.knobs(HANG_FROM_OP=after + 1)

    def async_error(self, result: int = 6):
        """Let every communicator report an asynchronous error (6: ncclRemoteError)."""
        return self.knobs(ASYNC_ERROR=result)

    def peer_death_unseen(self):
        """Notice no peer's death."""
        return self.knobs(NO_DETECT=1)

    def detection_delayed(self, seconds: float):
        """Notice a peer's death that much later."""
        return self.knobs(DETECT_DELAY_MS=_ms(seconds))


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
