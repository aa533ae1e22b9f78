"""Which errors of a stream end a log, and which cost it lines only."""

from __future__ import annotations

import errno
import io
import threading

import pytest

from multiworld.logs.writer import Backlog, LineWriter

PATIENCE = 120.0


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


class Parted(Backlog[str]):
    """One whose first thread, once it has idled, does nothing more until `goes_on`."""

    def __init__(self):
        super().__init__("test", idle=0.01)
        self.idled, self.goes_on = threading.Event(), threading.Event()
        self.handles, self.handled = threading.Event(), threading.Event()
        self.threads = []

    def _loop(self):
        super()._loop()
        if not self.idled.is_set():
            self.idled.set()
            self.goes_on.wait(PATIENCE)

    def _handle(self, thing):
        self.threads.append(threading.current_thread())
        if thing == "slow":
            self.handles.set()
            self.handled.wait(PATIENCE)
        return True


def test_a_thread_that_has_idled_says_nothing_of_the_one_that_followed():
    backlog = Parted()
    backlog.put("first")
    assert backlog.idled.wait(PATIENCE)
    backlog.put("slow")
    assert backlog.handles.wait(PATIENCE)
    first, second = backlog.threads
    backlog.goes_on.set()
    first.join(PATIENCE)
    flushing = threading.Thread(target=backlog.flush, args=(PATIENCE,))
    flushing.start()
    flushing.join(0.1)
    assert flushing.is_alive(), "the second thread is at work"
    backlog.put("last")
    backlog.handled.set()
    flushing.join(PATIENCE)
    backlog.close(PATIENCE)
    assert backlog.threads == [first, second, second]
    assert not second.is_alive()
