"""Leads what logging's handlers write elsewhere: to the live view, or to a thread that writes."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import TextIO

    from multiworld.logs.writer import LineWriter

__all__ = ["WriterStream", "handlers_to"]


class WriterStream(io.TextIOBase):
    """A stream whose text a `LineWriter` writes: no caller waits until it is written.

    Args:
        writer: of `stream`.
        stream: to which a forked child writes itself: the writer's thread is the parent's.
    """

    def __init__(self, writer: LineWriter, stream: TextIO) -> None:
        super().__init__()
        self._writer, self._stream = writer, stream
        self._pid = os.getpid()

    def write(self, text: str, /) -> int:
        """Have `text` written."""
        if os.getpid() != self._pid:
            self._stream.write(text)
            self._stream.flush()
        else:
            with contextlib.suppress(RuntimeError):  # no thread is left: the next text is written with it
                self._writer.put(text)
        return len(text)

    def fileno(self) -> int:
        """Return the descriptor that is written to."""
        return self._stream.fileno()

    def writable(self) -> bool:
        """Whether it can be written to."""
        return True


@contextlib.contextmanager
def handlers_to(fd: int, stream: Any, later: Iterable[logging.Handler] = ()) -> Iterator[None]:
    """Lead logging's handlers that write to `fd` to `stream`: they hold the stream that was there before.

    Args:
        fd: descriptor.
        stream: to write to instead.
        later: handlers that no logger has yet.
    """
    known = [logging.getLogger(), *logging.root.manager.loggerDict.values()]
    loggers = [each for each in known if isinstance(each, logging.Logger)]
    theirs = {each for logger in loggers for each in logger.handlers}.union(later)
    writing = {each for each in theirs if _fileno(getattr(each, "stream", None)) == fd}
    turned = [(each, each.setStream(stream)) for each in writing if isinstance(each, logging.StreamHandler)]
    # Those of torch 2.15 are of another kind, and look for standard error at each line.
    others = {each: _like(each, stream) for each in writing if not isinstance(each, logging.StreamHandler)}
    for logger in loggers:
        _replace(logger, others)
    try:
        yield
    finally:
        for logger in loggers:
            _replace(logger, {other: each for each, other in others.items()})
        for each, before in turned:
            if before is not None:
                each.setStream(before)


def _like(handler: logging.Handler, stream: Any) -> logging.Handler:
    made = logging.StreamHandler(stream)
    made.setLevel(handler.level)
    made.setFormatter(handler.formatter)
    made.filters = [*handler.filters]
    return made


def _replace(logger: logging.Logger, others: dict[logging.Handler, logging.Handler]) -> None:
    logger.handlers[:] = [others.get(each, each) for each in logger.handlers]


def _fileno(stream: Any) -> int | None:
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return None
