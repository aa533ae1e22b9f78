"""Which errors of a stream end a log, and which cost it lines only."""

from __future__ import annotations

import errno
import io

import pytest

from multiworld.logs.writer import LineWriter

PATIENCE = 60.0


class Stream(io.StringIO):
    """One of which these writes, counted from 1 on, raise an error."""

    def __init__(self, error, failing):
        super().__init__()
        self.error, self.failing, self.writes = error, failing, 0

    def write(self, text):
        self.writes += 1
        if self.writes in self.failing:
            raise self.error
        return super().write(text)


def written(stream, *lines):
    writer = LineWriter(stream, lambda number: f"{number} lost", name="test")
    for line in lines:
        writer.put(line + "\n")
        writer.flush(PATIENCE)
    writer.close(PATIENCE)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        BlockingIOError(errno.EAGAIN, "it is full"),
        UnicodeEncodeError("latin-1", "Ω", 0, 1, "ordinal not in range(256)"),
    ],
)
def test_lines_that_cannot_be_written_are_counted_and_the_log_goes_on(error):
    stream = Stream(error, {2, 3, 4})  # a line, the next one, and what says that one was lost
    written(stream, "a", "b", "c", "d", "e")
    assert stream.getvalue() == "a\nd\n2 lost\ne\n"


@pytest.mark.parametrize(
    "error",
    [
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
        OSError(errno.EBADF, "Bad file descriptor"),
        OSError(errno.EIO, "the terminal is gone"),
    ],
)
def test_a_stream_that_is_gone_ends_the_log(error):
    stream = Stream(error, {2})
    written(stream, "a", "b", "c")
    assert stream.getvalue() == "a\n"
    assert stream.writes == 2


def test_a_closed_stream_ends_the_log():
    stream = Stream(None, ())
    stream.close()
    written(stream, "a", "b")
    assert stream.writes == 1


def test_a_character_that_the_encoding_lacks_costs_its_line(tmp_path):
    path = tmp_path / "log"
    with path.open("w", encoding="latin-1") as stream:
        written(stream, "world=a", "world=Ω", "world=b")
    assert path.read_text(encoding="latin-1") == "world=a\nworld=b\n1 lost\n"
