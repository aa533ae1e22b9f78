"""The table, with real processes that are really killed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from multiworld._net import descriptor_table
from multiworld._net.descriptor_table import IsolatedTable

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="Linux has tables of descriptors for a thread"
)

ROOT = Path(__file__).parents[2]
PATIENCE = 30.0  # seconds; nothing here takes that long when all is well, on a machine that runs
CLOSING = b"bye"

BEGIN = """
import json, os, signal, socket, sys, time
from multiworld._net.descriptor_table import IsolatedTable

port, more = int(sys.argv[1]), json.loads(sys.argv[2])
table = IsolatedTable.start()
assert table.opened(30)

def connect(name):
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(name)
    return connection

kept = connect(b"k")
assert table.keep(1, kept, b"bye")
kept.close()
assert any(table.settle() for _ in range(300))
"""


def test_the_programs_default_timeout_does_not_end_it():
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.05)
    try:
        found = IsolatedTable.start()
        assert found is not None
        if not found.opened(PATIENCE):
            pytest.skip("this system gives a thread no table of its own")
        ours, theirs = socket.socketpair()
        assert found.keep(1, theirs, CLOSING)
        theirs.close()
        # It is there as long as nothing is said on the line: longer than that timeout.
        assert select.select([ours], [], [], 0.3)[0] == []
        until(found.settle)
        assert found.close(PATIENCE)
        assert ours.recv(10) == CLOSING
        ours.close()
    finally:
        socket.setdefaulttimeout(before)


@pytest.fixture
def table():
    found = IsolatedTable.start()
    assert found is not None
    if not found.opened(PATIENCE):
        found.close(PATIENCE)
        pytest.skip("this system gives a thread no table of its own")
    yield found
    found.close(PATIENCE)


@pytest.fixture
def program():
    """Start a program with a kept connection, and others by name; gives its process and this end of each."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        server.settimeout(PATIENCE)

        def start(source, names, **more):
            process = subprocess.Popen(
                [sys.executable, "-c", BEGIN + source, str(server.getsockname()[1]), json.dumps(more)],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.stdout.close)
            stack.callback(process.wait, PATIENCE)
            stack.callback(process.kill)
            ends = {}
            for _ in names:
                connection, _ = server.accept()
                stack.callback(connection.close)
                connection.settimeout(PATIENCE)
                ends[connection.recv(1).decode()] = connection
            assert ends.keys() == set(names)
            return process, ends

        yield start


def files(task="self"):
    """What this process, or one thread of it, has open."""
    found = {}
    for each in Path(f"/proc/{task}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            found[each.name] = str(each.readlink())
    return found


def tasks():
    return [each.name for each in Path("/proc/self/task").iterdir()]


def nothing_more(before):
    """Whether descriptors and threads are those of `before`; a thread may have been ending then."""
    then_files, then_tasks = before
    return files() == then_files and set(tasks()) <= set(then_tasks)


def until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.002)


def order(ends):
    """Return the names in the order in which they end."""
    found = []
    left = dict(ends)
    while left:
        ready, _, _ = select.select(list(left.values()), [], [], PATIENCE)
        assert ready
        for name in [name for name, each in left.items() if each in ready]:
            found.append(name)
            with contextlib.suppress(ConnectionResetError):
                assert left[name].recv(1) == b"", "somebody who is killed says nothing"
            del left[name]
        time.sleep(0.001)
    return found


def test_what_is_kept_ends_before_the_memory_is_freed(program):
    """Once, of several: which thread goes last, and frees the memory, is the kernel's to choose."""
    source = """
plain = connect(b"p")
memory = bytearray(more["megabytes"] << 20)
memory[::4096] = b"x" * len(memory[::4096])
connect(b"r").sendall(b"!")
time.sleep(1000)
"""
    for _ in range(15):
        process, ends = program(source, "kpr", megabytes=300)
        assert ends["r"].recv(1) == b"!"
        process.kill()
        assert ends["k"].recv(1) == b""
        # In one table the two would end within microseconds.
        early = select.select([ends["p"]], [], [], 0.001)[0] == []
        assert ends["p"].recv(1) == b""
        if early:
            return
    pytest.fail("the plain connection was never the later one")


def test_the_program_may_end_in_any_way(program):
    for way in (
        "os._exit(3)",
        "os.kill(os.getpid(), signal.SIGSEGV)",
        "os.execv('/bin/sleep', ['sleep', '1000'])",
        "sys.exit()",
    ):
        _, ends = program(f"connect(b'p').recv(1); {way}", "kp")
        ends.pop("p").sendall(b"!")
        assert order(ends) == ["k"]


def test_a_stopped_program_keeps_what_it_kept(program):
    process, ends = program("time.sleep(1000)", "k")
    process.send_signal(signal.SIGSTOP)
    assert select.select([ends["k"]], [], [], 0.5)[0] == []


def test_a_child_that_lives_on_has_no_copy(program):
    source = """
pid = os.fork()
if pid == 0:
    table.abandon()
    time.sleep(1000)
print(pid, flush=True)
time.sleep(1000)
"""
    process, ends = program(source, "k")
    child = int(process.stdout.readline())
    try:
        process.kill()
        process.wait(PATIENCE)
        assert order(ends) == ["k"]
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_pipe_that_the_program_closes_is_closed(program):
    process, _ = program("os.close(1); time.sleep(1000)", "k")
    assert select.select([process.stdout], [], [], PATIENCE)[0]
    assert process.stdout.read() == ""
    assert process.poll() is None


def test_it_takes_no_signal():
    """A handler of Python's writes to a descriptor, which is another one in the isolated table."""
    source = """
import signal, os
from multiworld._net.descriptor_table import IsolatedTable
signal.signal(signal.SIGUSR1, lambda *_: None)
table = IsolatedTable.start()
assert table.opened(30)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
os.kill(os.getpid(), signal.SIGUSR1)
assert any(table.settle() for _ in range(300))
assert signal.SIGUSR1 in signal.sigpending()
"""
    subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=PATIENCE,
    )


# -- in this process


def kept(table, number):
    near, far = socket.socketpair()
    far.settimeout(PATIENCE)
    assert table.keep(number, near, CLOSING)
    near.close()
    return far


def test_what_is_dropped_says_so_and_the_rest_stays(table):
    ends = {number: kept(table, number) for number in (1, 2, 3)}
    table.drop(2)
    table.drop(99)
    until(table.settle)
    assert ends[2].recv(64) == CLOSING
    assert ends[2].recv(64) == b""
    for number in (1, 3):
        ends[number].setblocking(False)
        with pytest.raises(BlockingIOError):
            ends[number].recv(1)
    for end in ends.values():
        end.close()
    table.drop(1)  # the other end is closed
    until(table.settle)


def test_the_end_of_the_table_says_so_and_leaves_nothing():
    before = files(), tasks()
    table = IsolatedTable.start()
    assert table.opened(PATIENCE)
    ends = [kept(table, number) for number in range(50)]
    until(table.settle)
    for end in ends:
        end.setblocking(False)
        with pytest.raises(BlockingIOError):
            end.recv(1)
    assert table.close(PATIENCE)
    for end in ends:
        assert end.recv(64) == CLOSING
        assert end.recv(64) == b""
        end.close()
    until(lambda: nothing_more(before))
    assert not table.keep(1, ends[0], CLOSING)
    table.drop(1)
    assert not table.settle()


def test_its_table_has_nothing_of_the_process(table):
    ends = [kept(table, number) for number in range(4)]
    until(table.settle)
    tables = [sorted(files(f"self/task/{task}").values()) for task in tasks()]
    [found] = [each for each in tables if "/dev/null" in each and len(each) == 8]
    assert found[:3] == ["/dev/null"] * 3
    assert all(each.startswith("socket:") for each in found[3:])
    for end in ends:
        end.close()


def test_more_than_the_line_holds_at_a_time(table):
    for end in [kept(table, number) for number in range(20)]:
        end.close()
    for number in range(3000):
        table.drop(number)
    until(table.settle)


def test_it_can_be_closed_before_it_was_asked_whether_it_opened():
    before = files(), tasks()
    table = IsolatedTable.start()
    assert table.close(PATIENCE)
    until(lambda: nothing_more(before))


def test_a_thread_that_a_busy_machine_lets_begin_late_has_its_table(monkeypatch, table):
    run = descriptor_table._run

    def late(*args):
        time.sleep(0.5)
        run(*args)

    monkeypatch.setattr(descriptor_table, "_run", late)
    another = IsolatedTable.start()
    opened = another.opened(PATIENCE)
    assert another.close(PATIENCE)
    assert opened


def test_a_childs_copy_can_be_closed_before_it_was_asked_too():
    table = IsolatedTable.start()
    until(lambda: table._control.recv(1, socket.MSG_PEEK))
    table.abandon()


def test_older_kernels_ways(monkeypatch):
    monkeypatch.setattr(descriptor_table, "_CLOSE_RANGE", 9999)  # no such call
    table = IsolatedTable.start()
    opened = table.opened(PATIENCE)
    if opened:
        end = kept(table, 1)
        table.drop(1)
        until(table.settle)
        assert end.recv(64) == CLOSING
        end.close()
    assert table.close(PATIENCE)
    if not opened:
        pytest.skip("unshare(2) is refused here")


@pytest.mark.parametrize("refused", ["both calls", "the null device"])
def test_where_it_is_refused_there_is_none_and_nothing_is_left(monkeypatch, refused):
    before = files(), tasks()
    if refused == "both calls":
        monkeypatch.setattr(descriptor_table, "_CLOSE_RANGE", 9999)
        monkeypatch.setattr(descriptor_table, "_CLONE_FILES", 0xFFFF)  # no such flags
    else:
        monkeypatch.setattr(os, "devnull", "/nowhere")
    table = IsolatedTable.start()
    assert not table.opened()
    assert table.close(PATIENCE)
    until(lambda: nothing_more(before))


def no_thread(*_):
    raise RuntimeError("can't start new thread")


def no_descriptor(*_):
    raise OSError("too many open files")


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("_thread.start_new_thread", no_thread),
        ("socket.socketpair", no_descriptor),
        ("fcntl.fcntl", no_descriptor),
        ("sys.platform", "other"),
    ],
)
def test_where_it_cannot_start_there_is_none_and_nothing_is_left(monkeypatch, name, replacement):
    before = files()
    with monkeypatch.context() as patch:
        patch.setattr(f"multiworld._net.descriptor_table.{name}", replacement)
        assert IsolatedTable.start() is None
    assert files() == before
