"""What a thread has written, and whether it is one message of gloo's."""

from __future__ import annotations

import gc
import os
import threading

import pytest

pytest.importorskip("torch")

from multiworld._c10d.gloo import write_accounting

ANNOUNCED, MESSAGE = b"a" * 48, b"b" * 48
PATIENCE = 30.0

pytestmark = pytest.mark.skipif(
    write_accounting.here().count() is None, reason="this system does not say what a thread writes"
)


@pytest.fixture
def sink():
    fd = os.open(os.devnull, os.O_WRONLY)
    yield fd
    os.close(fd)


def test_an_announcement_and_a_message_are_one_message(sink):
    mine = write_accounting.here()
    since = mine.count()
    os.write(sink, ANNOUNCED)
    assert not mine.message(4, since), "it waits for its receiver"
    os.write(sink, MESSAGE + b"1234")
    assert mine.message(4, since)
    assert not mine.message(8, since), "a part of it"
    os.write(sink, b"")
    assert not mine.message(4, since)


def test_an_announcement_that_is_as_long_as_a_message_is_none(sink):
    mine = write_accounting.here()
    since = mine.count()
    os.write(sink, ANNOUNCED + MESSAGE + b"1234")
    assert not mine.message(4, since)


def test_what_other_threads_write_does_not_count(sink):
    mine = write_accounting.here()
    since = mine.count()
    thread = threading.Thread(target=lambda: [os.write(sink, ANNOUNCED), os.write(sink, MESSAGE + b"1234")])
    thread.start()
    thread.join(PATIENCE)
    assert mine.count() == since


def test_each_thread_has_its_own_as_long_as_it_lives():
    mine, files, others = write_accounting.here(), [], []

    def other():
        found = write_accounting.here()
        assert found is write_accounting.here()
        others.append(found is mine)
        files.append(found._file)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(PATIENCE)
    del thread
    gc.collect()
    assert others == [False]
    assert write_accounting.here() is mine
    with pytest.raises(OSError):
        os.fstat(files[0])


def test_a_system_that_does_not_say_is_asked_once(monkeypatch):
    asked = []

    def refuse(*args, **kwargs):
        asked.append(args)
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    nothing = write_accounting.WriteCount()
    assert nothing.count() is None
    assert not nothing.message(4, None)
    assert not nothing.message(4, (0, 0))
    assert len(asked) == 1


def test_a_system_that_says_something_else_is_no_proof(monkeypatch):
    mine = write_accounting.WriteCount()
    monkeypatch.setattr(os, "pread", lambda *args: b"nothing")
    assert mine.count() is None
    monkeypatch.undo()
    assert mine.count() is None


def test_a_forked_process_asks_for_its_own(sink):
    mine = write_accounting.here()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            found = write_accounting.here()
            since = found.count()
            os.write(sink, ANNOUNCED)
            os.write(sink, MESSAGE + b"1234")
            os.write(write, b"1" if found is not mine and found.message(4, since) else b"0")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    assert os.read(read, 1) == b"1"
    os.close(read)
    assert write_accounting.here() is mine
