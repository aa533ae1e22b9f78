"""Messages of the fork server, and the options that exclude --preload; real forks are in the contract tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import types

import pytest
from torch.distributed.elastic.multiprocessing import LogsDest

from multiworld.run.configuration import check_preload, configure
from multiworld.run.errors import ArgumentsError
from multiworld.run.options import parse
from multiworld.run.workers.contexts import ForkedContext
from multiworld.run.workers.fork_client import ForkedProcess
from multiworld.run.workers.fork_server import changed, preload, receive, send


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def sent_at_once(channel, message, files=None):
    thread = threading.Thread(target=send, args=(channel, message, files), daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("size", [0, 1, 100_000, 3_000_000])
def test_messages_come_as_they_were_sent(ends, size):
    ours, theirs = ends
    message = {"argv": ["a.py", "\udc80", "ü"], "env": {"LARGE": "x" * size}, "files": []}
    thread = sent_at_once(ours, message)
    assert receive(theirs) == (message, [])
    thread.join(10)


def test_descriptors_come_with_their_message(ends):
    """Also where the next message is there already: it has others."""
    ours, theirs = ends
    pipes = [os.pipe() for _ in range(2)]
    for number, (read, write) in enumerate(pipes):
        send(ours, {"number": number}, [read, write])
    for number, (_, write) in enumerate(pipes):
        message, (came, also) = receive(theirs)
        assert message == {"number": number}
        os.write(write, b"%d" % number)
        assert os.read(came, 9) == b"%d" % number
        for each in (came, also):
            os.close(each)
    for each in (end for pipe in pipes for end in pipe):
        os.close(each)


@pytest.mark.parametrize("data", [b"", b"\0\0", b"\0\0\0\7", b"\0\0\0\7{}"])
def test_an_end_in_the_middle_of_a_message_is_an_end(ends, data):
    ours, theirs = ends
    ours.sendall(data)
    ours.close()
    assert receive(theirs) is None


def test_what_cannot_be_preloaded_is_said(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "lacks_one.py").write_text("import not_there_at_all\n")
    there = [threading.main_thread()]
    monkeypatch.setattr(threading, "enumerate", lambda: there)
    assert preload(["json"]) == ""
    said = preload(["json", "lacks_one"])
    assert said.startswith("lacks_one cannot be imported:\nTraceback")
    assert said.endswith("No module named 'not_there_at_all'")
    there.append(threading.Thread(name="tick"))
    assert preload(["json"]) == "json starts threads when it is imported (tick); a fork lacks them"


@pytest.mark.parametrize(("lost", "said"), [(False, ""), (True, "json uses CUDA when it is imported")])
def test_cuda_that_a_fork_would_not_have_is_said(monkeypatch, lost, said):
    """Where torch asked the driver anything, a process that is forked then has no CUDA, and only that one knows."""
    parent = os.getpid()

    def in_bad_fork():
        return lost and os.getpid() != parent

    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread()])
    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(_is_in_bad_fork=in_bad_fork))
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert preload(["json"]).startswith(said)
    assert bool(preload(["json"])) == lost


def test_what_imports_set_in_the_environment_is_kept():
    before = {"SAME": "1", "CHANGED": "1", "REMOVED": "1", "OURS": "1"}
    after = {"SAME": "1", "CHANGED": "2", "OURS": "2", "NEW": "2", "TAKEN": "2"}
    env = {**before, "OURS": "3", "TAKEN": "3", "RANK": "0"}
    told = {"SAME": "1", "CHANGED": "2", "NEW": "2", "OURS": "3", "TAKEN": "3", "RANK": "0"}
    assert changed(before, env, after) == told
    assert changed(before, env, dict(before)) == env


def test_names_of_modules():
    assert parse(["s.py"]).preload == ()
    assert parse(["--preload", "torch, a.b ,", "s.py"]).preload == ("torch", "a.b")
    with pytest.raises(ArgumentsError, match=r"--preload a b"):
        parse(["--preload", "a b", "s.py"])
    with pytest.raises(ArgumentsError, match=r"--preload -x"):
        parse(["--preload=-x", "s.py"])


@pytest.mark.parametrize(
    ("options", "other"),
    [
        (["--restart", "group", "s.py"], "--restart group"),
        (["--no-python", "s.sh"], "--no-python"),
        (["--run-path", "s.py"], "--run-path"),
        (["--nproc-per-node", "2", "."], r"\., which is no file"),
    ],
)
def test_what_excludes_it(options, other):
    asked = parse(["--preload", "json", *options])
    config, _, arguments = configure(asked)
    with pytest.raises(ArgumentsError, match=f"{other}.* with --preload json"):
        check_preload(asked, config, arguments)
    plain = parse(options)
    config, _, arguments = configure(plain)
    check_preload(plain, config, arguments)


@pytest.mark.parametrize("program", [["s.py", "a"], ["-m", "json.tool"]])
def test_what_it_works_with(program):
    asked = parse(["--preload", "json", *program])
    config, entrypoint, arguments = configure(asked)
    check_preload(asked, config, arguments)
    assert (entrypoint, arguments) == (sys.executable, ["-u", *program])


def test_a_fork_whose_output_cannot_be_read_leaves_nothing_open():
    """A thread is missing: the worker has not begun, and is started again later."""
    read, go = os.pipe()
    worker = subprocess.Popen(["sleep", "600"], start_new_session=True)

    def start():
        raise RuntimeError("can't start new thread")

    dest = LogsDest(stdouts={0: ""}, stderrs={0: ""}, error_files={0: os.devnull})
    context = ForkedContext(
        "default", sys.executable, ("-u", "script.py"), {}, dest,
        forks=types.SimpleNamespace(fork=lambda *_: ForkedProcess(worker.pid, go)), local_rank=0, prefixes=None,
        numa_options=None, tails=[types.SimpleNamespace(start=start, stop=lambda: None)],
    )  # fmt: skip
    with os.fdopen(read, "rb", buffering=0) as end:
        os.set_blocking(read, False)
        with pytest.raises(RuntimeError, match="thread"):
            context.start()
        assert end.read() is None, "the worker waits"
        context.close()
        assert end.read() == b""
    worker.wait(60)
