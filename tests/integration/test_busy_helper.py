"""The program that says what its process does, and the questions to it, with real sockets and processes."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kits.meetkit import until

from multiworld._core.liveness.evidence import Activity, question
from multiworld._core.membership.roster import Endpoint
from multiworld._net.liveness import evidence as evidence_module
from multiworld._net.liveness.evidence import Asker, Helper
from multiworld._net.liveness.evidence_program import Looker

PATIENCE = 30.0
TOKEN = b"0123456789abcdef"


def sample(state=b"S", wanted=0, ticks=0, slept=-1):
    return {b"7": (state, wanted, ticks, slept)}


class TestCompare:
    @pytest.mark.parametrize(
        ("before", "after", "expected"),
        [
            (None, sample(), (b"?", 0)),
            (sample(), None, (b"?", 0)),
            (sample(), {}, (b"?", 0)),
            (sample(), sample(b"T"), (b"T", 0)),
            (sample(), sample(b"t"), (b"T", 0)),
            (sample(), sample(wanted=3_000_000), (b"R", 30)),
            (sample(), sample(wanted=400_000_000), (b"R", 1000)),
            (sample(), sample(), (b"S", 0)),
            # It waited for a core all the time, and has slept not once.
            (sample(b"R", 0, 0, 4), sample(b"R", 0, 0, 4), (b"R", 1000)),
            (sample(b"R", 0, 0, 4), sample(b"R", 0, 0, 9), (b"S", 0)),
            (sample(b"R", 0, 0, 4), sample(b"D"), (b"R", 1000)),
            (sample(b"D"), sample(b"D"), (b"R", 1000)),
            # Without the scheduler's own figures, the ticks.
            (sample(b"R", -1, 5, 1), sample(b"S", -1, 9), (b"R", 1000)),
            (sample(b"S", -1, 5), sample(b"S", -1, 6), (b"S", 0)),
            # A thread that is new was not seen before.
            ({b"8": (b"S", 0, 0, -1)}, sample(wanted=90_000_000), (b"S", 0)),
        ],
    )
    def test_of_two_looks(self, before, after, expected):
        assert Looker.compare(before, after, 0.1) == expected

    def test_one_stopped_thread_among_others_is_no_stopped_process(self):
        after = {**sample(b"T"), b"8": (b"S", 0, 0, -1)}
        assert Looker.compare(sample(), after, 0.1) == (b"S", 0)

    def test_a_process_that_is_gone_is_not_seen(self):
        assert Looker(1 << 22).threads() is None

    def test_a_kernel_without_figures_of_its_scheduler(self, tmp_path):
        folder = tmp_path / "9" / "task" / "9"
        folder.mkdir(parents=True)
        (folder / "stat").write_text("9 (a) b) R" + " 0" * 10 + " 3 4 0 0\n")
        assert Looker(9, str(tmp_path)).threads() == {b"9": (b"R", -1, 7, -1)}
        (folder / "status").write_text(
            "Name:\tx\nvoluntary_ctxt_switches:\t12\nnonvoluntary_ctxt_switches:\t3\n"
        )
        (tmp_path / "9" / "task" / "10").mkdir()  # one that ends while it is looked at
        assert Looker(9, str(tmp_path)).threads() == {b"9": (b"R", -1, 7, 12)}


@pytest.fixture(name="helper")
def _helper(monkeypatch):
    monkeypatch.setattr(evidence_module, "_ENDING", PATIENCE)
    made = Helper()
    yield made
    made.close()


def test_a_helper_that_was_killed_is_started_again(helper):
    assert helper.start()
    killed = helper._pid
    assert helper.start()
    assert helper._pid == killed
    os.kill(killed, signal.SIGKILL)
    os.waitid(os.P_PID, killed, os.WEXITED | os.WNOWAIT)
    assert helper.start()
    assert helper._pid != killed
    deadline = time.monotonic() + PATIENCE
    while not Path(f"/proc/{helper._pid}/cmdline").read_bytes():  # it is not begun, or over
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(name="asker")
def _asker():
    with selectors.DefaultSelector() as selector:
        made = Asker(selector)
        yield made
        made.close()


def free(family=socket.AF_INET, host="127.0.0.1"):
    with socket.socket(family) as sock:
        sock.bind((host, 0))
        return Endpoint(host, sock.getsockname()[1])


def said(asker, endpoint, token=TOKEN, timeout=PATIENCE):
    deadline, again = time.monotonic() + timeout, 0.0
    while time.monotonic() < deadline:
        if time.monotonic() >= again:
            asker.ask("p", endpoint, token)
            again = time.monotonic() + 1.0
        if found := asker.read():
            assert found[0].process == "p"
            return found[0].evidence.activity
        time.sleep(0.005)
    return None


def children():
    return subprocess.run(
        ["ps", "-ww", "-o", "stat=,args=", "--ppid", str(os.getpid())],
        capture_output=True,
        text=True,
        check=False,
    ).stdout


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_it_answers_where_the_watchdog_listens(helper, asker, family, host):
    endpoint = free(family, host)
    helper.listen(endpoint)
    helper.vouch(TOKEN)
    assert said(asker, endpoint, timeout=0.3) is None
    assert helper.start()
    assert helper.start()
    assert said(asker, endpoint) in {Activity.SLEEPS, Activity.RUNS}  # this thread looks all the time


def test_it_is_told_of_more_worlds_than_its_queue_has_room_for(helper, asker):
    endpoint, tokens = free(), [os.urandom(16) for _ in range(2000)]
    helper.listen(endpoint)
    for token in tokens[:-1]:
        helper.vouch(token)
    assert helper.start()
    os.kill(helper.pid, signal.SIGSTOP)
    helper.vouch(tokens[-1])
    for token in tokens[:-1]:
        helper.forget(token)
    assert helper.behind
    os.kill(helper.pid, signal.SIGCONT)
    until(lambda: helper.start() and not helper.behind)
    assert said(asker, endpoint, tokens[-1]) in {Activity.SLEEPS, Activity.RUNS}
    assert said(asker, endpoint, tokens[-2], timeout=0.3) is None


def test_it_sees_that_its_process_computes_sleeps_and_is_stopped(asker):
    """In a process of its own, which says where it listens."""
    code = (
        "import sys, time\n"
        "from multiworld._net.liveness.evidence import Helper\n"
        "from multiworld._core.membership.roster import Endpoint\n"
        "h = Helper(); h.listen(Endpoint('127.0.0.1', int(sys.argv[1]))); h.vouch(b'0123456789abcdef'); h.start()\n"
        "while True:\n"
        "    if sys.stdin.readline() == 'compute\\n': sum(range(10**10))\n"
    )
    endpoint = free()
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(endpoint.port)], stdin=subprocess.PIPE, text=True, env={**os.environ}
    )
    try:
        assert said(asker, endpoint) is Activity.SLEEPS
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        asker.read()
        assert said(asker, endpoint) is Activity.STOPPED
        process.send_signal(signal.SIGCONT)
        process.stdin.write("compute\n")
        process.stdin.flush()
        time.sleep(0.5)
        asker.read()
        assert said(asker, endpoint) is Activity.RUNS
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
    asker.read()
    time.sleep(0.5)
    asker.read()
    assert said(asker, endpoint, timeout=0.5) is None, "it has ended with its process"


def test_strangers_get_no_answer_and_do_no_harm(helper, asker):
    endpoint = free()
    helper.listen(endpoint)
    helper.vouch(TOKEN)
    helper.start()
    assert said(asker, endpoint) is not None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.settimeout(0.3)
        asked = question(TOKEN, b"n" * 16)
        for data in (
            b"",
            b"x" * 1400,
            asked[:-1],
            asked + b"x",
            asked[:-1] + b"x",
            question(b"y" * 16, b"n" * 16),
        ):
            stranger.sendto(data, (endpoint.host, endpoint.port))
        for _ in range(2000):
            stranger.sendto(b"m8dq" + os.urandom(40), (endpoint.host, endpoint.port))
        with pytest.raises(TimeoutError):
            stranger.recv(64)
    assert said(asker, endpoint) is not None
    assert said(asker, endpoint, token=b"y" * 16, timeout=0.5) is None


def test_what_is_taken_back_is_not_answered_any_more(helper, asker):
    first, second = free(), free()
    helper.vouch(TOKEN)
    helper.vouch(TOKEN)
    helper.listen(first)
    helper.start()
    helper.listen(second)
    assert said(asker, first) is not None
    assert said(asker, second) is not None
    helper.unlisten(first)
    helper.unlisten(first)
    time.sleep(0.2)
    asker.read()
    assert said(asker, first, timeout=0.5) is None
    helper.forget(TOKEN)
    assert said(asker, second) is not None
    helper.forget(TOKEN)
    helper.forget(TOKEN)
    time.sleep(0.3)
    asker.read()
    assert said(asker, second, timeout=0.5) is None


def test_it_ends_when_it_is_closed_and_leaves_no_zombie(helper):
    helper.vouch(TOKEN)
    helper.start()
    until(lambda: "evidence_program" in children())  # it was forked, and is about to be it
    pid = helper.pid
    assert os.getsid(pid) == pid, "no signal of a terminal reaches it"
    assert Path(f"/proc/{pid}/environ").read_bytes().count(b"=") <= 1
    helper.close()
    assert helper.pid == 0
    assert not Path(f"/proc/{pid}").exists(), "it runs, or was not reaped"
    helper.close()


def test_one_that_was_killed_is_reaped_and_can_be_started_again(helper, asker):
    endpoint = free()
    helper.listen(endpoint)
    helper.vouch(TOKEN)
    helper.start()
    os.kill(helper.pid, signal.SIGKILL)
    helper.forget(TOKEN)
    helper.listen(free())
    helper.close()
    assert "defunct" not in children()
    helper.listen(endpoint)
    helper.vouch(TOKEN)
    assert helper.start()
    assert said(asker, endpoint) is not None


def test_where_it_cannot_be_started_nothing_is_known(helper, monkeypatch):
    def refuse(*_, **__):
        raise OSError(12, "no memory")

    def unable(*_, **__):
        raise NotImplementedError

    for fail in (refuse, unable):
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_spawn", fail)
            assert not helper.start()
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", refuse)
        assert not helper.start()
    with monkeypatch.context() as patch:
        patch.setattr(evidence_module, "_PROGRAM", Path("/nowhere"))
        assert not helper.start()
    for executable in (None, "", "/usr/bin/blender"):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", executable)
            assert not helper.start()
    helper.vouch(TOKEN)
    helper.forget(TOKEN)


def test_a_port_that_is_taken_is_not_answered_at(helper):
    endpoint = free()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind((endpoint.host, endpoint.port))
        helper.listen(endpoint)
        helper.unlisten(endpoint)
    helper.listen(Endpoint("no address", 1))


def test_no_way_to_an_endpoint_is_no_answer(asker):
    asker.ask("p", Endpoint("no address", 1), TOKEN)
    for _ in range(2000):
        asker.ask("p", Endpoint("127.0.0.1", 9), TOKEN)
    assert len(asker._asked) <= 1024
    assert asker.read() == []


def test_what_another_part_of_the_program_has_waited_for_is_no_error(helper):
    helper.start()
    os.kill(helper.pid, signal.SIGKILL)
    os.waitpid(helper.pid, 0)
    helper.close()
    assert evidence_module._ended == []
