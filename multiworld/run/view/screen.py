"""``m8d-run --ui``: the live view, redrawn in place on a terminal, below the workers' output.

A thread checks four times a second for changes, and draws only then. The workers' output comes through
torch's own tailing of their log files, which writes to ``sys.stdout`` and ``sys.stderr``: while the view is
up, those that are terminals lead to it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import threading
from collections import deque
from typing import TYPE_CHECKING

from multiworld.run.errors import RunError
from multiworld.run.view.handler_streams import handlers_to
from multiworld.run.view.layout import layout

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import IO

    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live
    from rich.segment import Segment

    from multiworld.run.view.layout import Line
    from multiworld.run.view.state import RunState
    from multiworld.run.view.waiting import Waiting

__all__ = ["NO_TERMINAL", "Screen", "coloured", "open_screen"]

_log = logging.getLogger(__name__)

NO_TERMINAL = (
    "--ui has no terminal to draw on (neither standard error nor standard output is one): logging instead"
)
"""Note in the log where `open_screen` returned None."""

TICK = 0.25
"""Seconds between checks for changes."""

_AGES = 1.0
"""Seconds after which the layout is made again without an event, since ages change."""

_MOST_OUTPUT = 1_000_000
"""Characters of workers' output shown per tick; older ones are left out (the log files have them)."""

_LONGEST_LINE = 10_000
"""Characters of a line that is not ended yet, after which it is shown as one."""

_STOP_TIMEOUT = 2.0
_NOT_COLOUR = re.compile(
    r"\x1b\[[0-9;:<=>?]*[ -/]*[@-ln-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[^\[\]]"
    r"|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]"
)


def coloured(lines: Iterable[Line], width: int) -> str:
    """Return laid-out lines with this terminal's colours.

    Raises:
        RunError: rich is not installed.
    """
    console = _rich_console()(width=width, highlight=False)
    with console.capture() as text:
        console.print(_Frame(tuple(lines)), soft_wrap=True, end="")
    return text.get().rstrip("\n")


def open_screen(state: RunState) -> Screen | None:
    """Return the live view on standard error, else on standard output; None if neither is a terminal.

    Raises:
        RunError: rich is not installed.
    """
    consoles = _rich_console()
    for fd in (2, 1):
        if os.isatty(fd):
            console = consoles(file=consoles(stderr=fd == 2).file)
            if console.is_terminal and not console.is_dumb_terminal:
                return Screen(state, console=console)
    return None


class Screen:
    """The live view.

    Args:
        state: of the run.
        console: rich's, to draw on; None: standard output.

    Raises:
        RunError: rich is not installed.
    """

    def __init__(self, state: RunState, *, console: Console | None = None) -> None:
        consoles = _rich_console()
        self._state = state
        self._console: Console = consoles(file=consoles().file) if console is None else console
        self._above = _Above()
        self._redirected = contextlib.ExitStack()
        self._enough = threading.Event()
        self._thread: threading.Thread | None = None
        self._seen: tuple[object, ...] = ()
        self._shown: object = None
        self._age = 0.0
        self._waiting: Waiting | None = None

    def show_waiting(self, waiting: Waiting | None) -> None:
        """Show the operations that wait from now on; None: no more."""
        self._waiting = waiting

    def start(self) -> None:
        """Draw, and go on in a thread. It redirects workers' output: call it before they are started."""
        self._redirect()
        self._thread = threading.Thread(target=self._run, name="m8d-run-screen", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Draw a last time and restore the terminal, within 2 seconds; harmless twice.

        The redirected streams write to the terminal again afterwards.
        """
        self._enough.set()
        if self._thread is not None:
            self._thread.join(_STOP_TIMEOUT)
        self._redirected.close()
        self._above.end()

    def _run(self) -> None:
        from rich.live import Live  # noqa: PLC0415  (an extra: imported where it is needed)

        live = Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        try:
            with live:
                self._tick(live)
                while not self._enough.wait(TICK):
                    self._tick(live)
                self._above.end()
                self._age = _AGES
                self._tick(live)
        except (OSError, ValueError) as error:
            _log.warning("the live view has ended: the terminal cannot be written to: %s", error)
        finally:
            self._above.end()  # after an error too, so that workers' output goes to the terminal

    def _tick(self, live: Live) -> None:
        text = self._above.take()
        frame = self._frame()
        if not text and frame is None:
            return
        with self._console:  # one write for both: nothing flickers
            if text:
                self._console.print(_Raw(text), soft_wrap=True)
            if frame is not None:
                live.update(frame, refresh=True)

    def _frame(self) -> _Frame | None:
        """Return a new frame, or None if it would be the same as the last."""
        size = self._console.size
        operations = {} if self._waiting is None else self._waiting.operations
        seen = (self._state.changes, size, operations)
        self._age += TICK
        if seen == self._seen and self._age < _AGES:
            return None
        self._seen, self._age = seen, 0.0
        snapshot = {**self._state.snapshot(), "pending": operations}
        lines = layout(snapshot, size.width, size.height - 1)
        if (lines, size) == self._shown:
            return None
        self._shown = (lines, size)
        return _Frame(lines)

    def _redirect(self) -> None:
        for fd, redirect in ((1, contextlib.redirect_stdout), (2, contextlib.redirect_stderr)):
            if os.isatty(fd):
                stream = _Stream(self._above, fd, self._real(fd))
                self._redirected.enter_context(redirect(stream))
                self._redirected.enter_context(handlers_to(fd, stream))

    def _real(self, fd: int) -> IO[str]:
        return _rich_console()(stderr=fd == 2).file


class _Above:
    """Lines to be shown above the frame, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._text: deque[str] = deque()
        self._begun: dict[int, str] = {}
        self._size = 0
        self._left_out = 0
        self._ended = False

    def put(self, text: str) -> bool:
        """Take `text`; return False where the view has ended."""
        with self._lock:
            if self._ended:
                return False
            who = threading.get_ident()
            whole, end, rest = (self._begun.pop(who, "") + text).rpartition("\n")
            if len(rest) > _LONGEST_LINE:  # a worker that prints dots, say, and no line end for hours
                whole, end, rest = whole + end + rest, "\n", ""
            if rest:
                self._begun[who] = rest
            if end:
                self._text.append(whole + end)
                self._size += len(whole) + 1
            while self._size > _MOST_OUTPUT and len(self._text) > 1:
                first = self._text.popleft()
                self._size -= len(first)
                self._left_out += first.count("\n")
            return True

    def take(self) -> str:
        """Return the lines since the last call, or ""."""
        with self._lock:
            text, left_out = "".join(self._text), self._left_out
            self._size = self._left_out = 0
            self._text.clear()
        if left_out:
            text = f"({left_out} lines of output left out here: the log files have them)\n{text}"
        return text

    def end(self) -> None:
        """Take no more text; an unfinished line is ended."""
        with self._lock:
            self._ended = True
            self._text.extend(f"{each}\n" for each in self._begun.values())
            self._begun.clear()


class _Stream(io.TextIOBase):
    """Stands in for standard output or error while the view is up; afterwards it leads to the real one."""

    def __init__(self, above: _Above, fd: int, real: IO[str]) -> None:
        super().__init__()
        self._above, self._fd, self._real = above, fd, real

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return str(getattr(self._real, "encoding", "utf-8"))

    def write(self, text: str, /) -> int:
        if not self._above.put(text):
            self._real.write(text)
            self._real.flush()
        return len(text)

    def flush(self) -> None:
        # The view's thread writes: where the terminal is paused, only that one waits.
        pass

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return True

    def writable(self) -> bool:
        return True


class _Raw:
    """Workers' lines, which rich writes with their colours and without other control sequences."""

    def __init__(self, text: str) -> None:
        self._text = _NOT_COLOUR.sub("", text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment  # noqa: PLC0415  (an extra: imported where it is needed)

        text = self._text
        if "\x1b" in text:
            text = f"{text}\x1b[0m" if console.color_system else re.sub(r"\x1b(\[[0-9;:]*m)?", "", text)
        yield Segment(text)


class _Frame:
    """The laid-out lines as rich segments; kept, since they are drawn again after each output above them."""

    def __init__(self, lines: tuple[Line, ...]) -> None:
        self._lines = lines
        self._segments: list[Segment] = []

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment  # noqa: PLC0415  (an extra: imported where it is needed)

        if not self._segments:
            for line in self._lines:
                self._segments += [Segment(text, console.get_style(style or "none")) for text, style in line]
                self._segments.append(Segment.line())
        yield from self._segments


def _rich_console() -> type[Console]:
    try:
        from rich.console import Console  # noqa: PLC0415  (an extra: imported where it is needed)
    except ImportError as error:
        raise RunError(
            "--ui needs rich, which is not installed",
            rule="The live view is an extra of multiworld",
            next_step="Install it with pip install 'm8d[ui]', or leave --ui away",
        ) from error
    return Console
