"""The control socket: what is said on it, and clients of every kind of badness, who harm nobody else."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pwd
import random
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld._net.launcher_connection import MAX_LINE, ControlClient, Lines, ProtocolError, encode
from multiworld.run.control import server as control
from multiworld.run.control import sockets as folders
from multiworld.run.control.client import LauncherSilentError, look, own_snapshot, question, snapshots
from multiworld.run.control.looks import Look
from multiworld.run.control.pending import pending_operations
from multiworld.run.control.server import ControlServer
from multiworld.run.errors import RunError
from multiworld.run.events import EventBus
from multiworld.run.worldsfile.parse import parse

PATIENCE = 60.0
PLAN = """
[roles]
hub = 1
worker = 2
[worlds."w{i}"]
for = "worker"
members = ["worker:{i}", "hub:0"]
[worlds.own]
members = ["worker:*"]
backend = "gloo"
store = "tcp://127.0.0.1:29500"
timeout = 3
hang_timeout = 2
device = "cuda:{local_rank}"
after = ["w0"]
"""


class Served:
    """A server, and what it was told."""

    def __init__(self, plan=PLAN):
        self.folder = tempfile.mkdtemp(prefix="m8d-test-")
        self.seen = []
        self.snapshot = lambda: {"version": 1}
        self.store = "tcp://127.0.0.1:1"
        bus = EventBus()
        bus.subscribe(self.seen.append)
        self.server = ControlServer(
            f"{self.folder}/run/{folders.SOCKET}",
            parse(plan, "x.toml") if plan else None,
            bus,
            lambda **more: self.snapshot(**more),  # noqa: PLW0108  (tests put another one there)
            store=lambda: self.store,
        )

    def close(self):
        self.server.close()
        assert list(Path(self.folder).iterdir()) == []
        Path(self.folder).rmdir()

    def states(self):
        return [(each.rank, each.world, each.state, each.generation) for each in list(self.seen)]


@pytest.fixture
def served():
    with contextlib.closing(Served()) as made:
        made.server.start()
        yield made


class Peer:
    """Somebody at the socket who writes what it likes."""

    def __init__(self, served):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(served.server.path)
        self.lines = Lines()
        self.heard = []

    def say(self, *messages):
        for message in messages:
            self.sock.sendall(json.dumps(message).encode() + b"\n")

    def hear(self):
        while not self.heard:
            octets = self.sock.recv(1 << 16)
            assert octets, "cut off"
            self.heard += self.lines.feed(octets)
        return self.heard.pop(0)

    def is_cut_off(self):
        try:
            while self.sock.recv(1 << 16):
                continue
        except ConnectionError:
            return True
        return True

    def close(self):
        self.sock.close()


@pytest.fixture
def peer(served):
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(contextlib.closing(Peer(served)))


def until(condition, what):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come in {PATIENCE} s"
        time.sleep(0.01)


def no_thread():
    return [each.name for each in threading.enumerate() if "control" in each.name] == []


# -- pure -------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
MESSAGES = st.lists(st.dictionaries(st.text(), JSON, max_size=4), max_size=5)


@given(MESSAGES, st.lists(st.integers(1, 50), max_size=30))
def test_messages_come_through_in_any_pieces(messages, sizes):
    octets, lines, heard = b"".join(map(encode, messages)), Lines(), []
    for size in [*sizes, len(octets)]:
        heard += lines.feed(octets[:size])
        octets = octets[size:]
    assert heard == messages


@given(st.binary())
def test_rubbish_is_refused_and_does_nothing_else(octets):
    with contextlib.suppress(ProtocolError):
        for message in Lines().feed(octets + b"\n"):
            assert isinstance(message, dict)


@pytest.mark.parametrize(
    "octets", [b"\n", b"[]\n", b"3\n", b"{}{}\n", b"\xff\n", b"[" * 9999 + b"\n", b"x" * MAX_LINE]
)
def test_what_is_no_message(octets):
    with pytest.raises(ProtocolError, match="A line is one JSON object"):
        Lines().feed(octets)


def test_the_longest_line():
    most = MAX_LINE - len(encode({"a": ""}))
    line = encode({"a": "x" * most})
    assert len(line) == MAX_LINE
    assert Lines().feed(line) == [{"a": "x" * most}]
    with pytest.raises(ProtocolError, match="a message of 1048577 bytes"):
        encode({"a": "x" * (most + 1)})
    with pytest.raises(ProtocolError):
        Lines().feed(b'{"a":"' + b"x" * (most + 1) + b'"}\n')


# -- the server -------------------------------------------------------------------------------------------------


def test_a_worker_hears_of_its_worlds(served, peer):
    worker = peer()
    worker.say({"hello": "worker", "rank": 1, "pid": 4711, "attempt": 0, "unknown": [1]})
    said = worker.hear()
    assert said["store"] == "tcp://127.0.0.1:1"
    assert said["worlds"] == [
        {
            "name": "w0", "rank": 0, "world_size": 2, "backend": "gloo", "store": "tcp://127.0.0.1:1",
            "launcher": True, "timeout": None, "hang_timeout": None, "device": None, "after": [],
            "members": [["worker", 0], ["hub", 0]],
        },
        {
            "name": "own", "rank": 0, "world_size": 2, "backend": "gloo", "store": "tcp://127.0.0.1:29500",
            "launcher": False, "timeout": 3.0, "hang_timeout": 2.0, "device": "cuda:{local_rank}",
            "after": ["w0"], "members": [["worker", 0], ["worker", 1]],
        },
    ]  # fmt: skip
    served.store = "tcp://127.0.0.1:2"
    worker.say({"ask": "worlds", "id": 7})
    answers = [worker.hear()]
    if "id" not in answers[0]:  # the news of the move was quicker
        answers.append(worker.hear())
    assert (answers[-1]["id"], answers[-1]["worlds"][0]["store"]) == (7, "tcp://127.0.0.1:2")


def test_a_store_that_moves_is_told_to_everybody(served, peer):
    workers = [peer() for _ in range(3)]
    for rank, worker in enumerate(workers):
        worker.say({"hello": "worker", "rank": rank, "attempt": 0})
        worker.hear()
    served.store = "tcp://127.0.0.1:2"
    assert [worker.hear() for worker in workers] == [{"store": "tcp://127.0.0.1:2"}] * 3


def test_reports_become_happenings(served, peer):
    old, new = peer(), peer()
    old.say({"hello": "worker", "rank": 2, "pid": 1, "attempt": 0})
    old.hear()
    old.say(
        {"world": "w1", "state": "joining"},
        {"world": "w1", "state": "active", "generation": 3, "detail": "", "more": 1},
        {"nothing": "known"},
    )
    until(lambda: len(served.seen) == 2, "the reports")
    new.say({"hello": "worker", "rank": 2, "pid": 2, "attempt": 1})
    new.hear()
    old.say({"world": "w1", "state": "broken", "generation": 3})  # it is not this rank's any more
    old.say({"hello": "status"})
    old.hear()
    new.say({"world": "w1", "state": "broken", "generation": 4, "detail": "gone", "cause": "left"})
    until(lambda: len(served.seen) == 3, "the report")
    assert served.states() == [(2, "w1", "joining", 0), (2, "w1", "active", 3), (2, "w1", "broken", 4)]
    assert abs(served.seen[0].at - time.time()) < 3600
    assert (served.seen[2].detail, served.seen[2].cause) == ("gone", "left")
    assert served.seen[0].cause == ""


def test_a_worker_is_heard_once_its_own_program_that_came_first_has_ended(served, peer):
    """What a worker starts has its environment, and connects too where it imports multiworld."""
    helper, former, worker = peer(), peer(), peer()
    for each, attempt in ((helper, 1), (former, 0), (worker, 1)):
        each.say({"hello": "worker", "rank": 2, "attempt": attempt})
        each.hear()
    worker.say({"world": "w1", "state": "joining"}, {"hello": "status"})
    worker.hear()
    assert served.seen == []
    helper.close()
    until(lambda: len(served.server._clients) == 2, "the news of its end")
    worker.say({"world": "w1", "state": "active", "generation": 1})
    until(lambda: served.seen, "the report")
    assert served.states() == [(2, "w1", "active", 1)]


@pytest.mark.parametrize("rank", [3, 10**6])
def test_a_rank_that_the_file_does_not_have(served, peer, rank):
    worker = peer()
    worker.say({"hello": "worker", "rank": rank, "attempt": 0})
    assert worker.hear()["error"] == f"x.toml has ranks 0 to 2, not {rank}"


def test_status(served, peer, monkeypatch):
    monkeypatch.setattr(control, "_LONGEST", MAX_LINE)
    asking = peer()
    for number in range(3):
        served.snapshot = lambda number=number: {"number": number}
        asking.say({"hello": "status"})
        assert asking.hear() == {"snapshot": {"number": number}}
    for snapshot, error in (
        (lambda: 1 / 0, "no snapshot: division by zero"),
        (lambda: {"x": "x" * MAX_LINE}, "a message of"),
        (lambda: {"x": object()}, "not JSON serializable"),
    ):
        served.snapshot = snapshot
        asking.say({"hello": "status"})
        assert error in asking.hear()["error"]


def test_calls_that_have_raised_are_told(served, peer):
    worker = peer()
    worker.say({"hello": "worker", "rank": 1})
    worker.hear()
    before = time.time()
    worker.say(
        {"world": "w0", "generation": 2, "raised": before}, {"world": "w0", "generation": 2, "raised": 9e12}
    )
    until(lambda: len(served.seen) == 2, "the reports")
    assert [(each.rank, each.world, each.generation) for each in served.seen] == [(1, "w0", 2)] * 2
    assert served.seen[0].at == before
    assert before <= served.seen[1].at <= time.time()
    for wrong in ({"raised": "x"}, {"raised": True}, {"raised": None}, {"raised": 1.0, "generation": "x"}):
        other = peer()
        other.say({"hello": "worker", "rank": 2})
        other.hear()
        other.say({"world": "w0", "generation": 1, **wrong})
        assert other.is_cut_off()


RUBBISH = [
    b"\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b'{"hello": "worker"}\n',
    b'{"hello": "worker", "rank": -1}\n',
    b'{"hello": "worker", "rank": true}\n',
    b'{"hello": "worker", "rank": 0, "attempt": "x"}\n',
    b'{"hello": "worker", "rank": 1e9}\n',
    b'{"hello": ["worker"]}\n',
    b'{"ask": "worlds"}\n',
    b'{"world": "w0", "state": "active"}\n',
    b'{"hello": "worker", "rank": 1}\n{"world": "w0", "state": "dancing"}\n',
    b'{"hello": "worker", "rank": 1}\n{"world": 1, "state": "active"}\n',
    b'{"hello": "worker", "rank": 1}\n{"world": "w0", "state": "active", "generation": -1}\n',
    b'{"hello": "worker", "rank": 1}\n{"world": "w0", "state": "active", "detail": {}}\n',
    b'{"hello": "worker", "rank": 1}\n{"world": "w0", "state": "broken", "cause": 1}\n',
    b'{"hello": "worker", "rank": 1}\n{"world": "w0", "state": []}\n',
    b'{"hello": "worker", "rank": 1}\n{"world": "w0", "generation": 1, "raised": NaN}\n',
    b'{"hello": "worker", "rank": 1}\n{"world": "w0", "generation": 1, "raised": -Infinity}\n',
    b'{"hello": "worker", "rank": 1}\n{"world": "w0", "generation": 1, "raised": 1%s}\n' % (b"0" * 400),
    bytes(2 << 20),
    random.Random(1).randbytes(1 << 20),  # noqa: S311  (nothing secret)
]


@pytest.mark.parametrize("octets", RUBBISH, ids=lambda octets: repr(octets[:60]))
def test_rubbish_is_cut_off_and_harms_nobody(served, peer, octets):
    good, bad = peer(), peer()
    good.say({"hello": "worker", "rank": 1, "attempt": 0})
    good.hear()
    with contextlib.suppress(ConnectionError):  # it is cut off while it writes
        bad.sock.sendall(octets)
    assert bad.is_cut_off()
    good.say({"ask": "worlds", "id": 1})
    assert good.hear()["id"] == 1
    assert served.seen == []


def test_a_worker_that_ends_with_lines_unread_is_no_warning(served, peer, caplog):
    """The kernel resets its connection then."""
    worker = peer()
    worker.say({"hello": "worker", "rank": 1, "attempt": 0})
    assert worker.sock.recv(1, socket.MSG_PEEK), "the answer"
    worker.close()
    until(lambda: not served.server._clients, "the end of the connection")
    assert [each.getMessage() for each in caplog.records if each.levelname == "WARNING"] == []


def test_an_error_in_the_server_cuts_off_only_who_caused_it(served, peer):
    good, bad = peer(), peer()
    served.server._command = lambda *_: 1 / 0
    bad.say({"hello": "command", "command": {"workers": 1}})
    assert bad.is_cut_off()
    good.say({"hello": "status"})
    assert "snapshot" in good.hear()


def test_half_a_message_and_many_clients_harm_nobody(served, peer):
    silent = [peer() for _ in range(50)]
    for each in silent[::2]:
        each.sock.sendall(b'{"hello": "wor')
    good = peer()
    good.say({"hello": "status"})
    assert "snapshot" in good.hear()
    for each in silent:
        each.close()
    good.say({"hello": "status"})
    assert "snapshot" in good.hear()
    until(lambda: len(served.server._clients) == 1, "the end of the others")


def test_who_does_not_read_is_cut_off_and_delays_nobody(served, peer):
    served.snapshot = lambda: {"x": "x" * 500_000}
    deaf, good = peer(), peer()
    for each in (deaf, good):
        each.say({"hello": "status"})
    assert "snapshot" in good.hear()
    deaf.sock.settimeout(0.05)
    with contextlib.suppress(ConnectionError):
        for _ in range(200):
            with contextlib.suppress(TimeoutError):
                deaf.say({"hello": "status"})
            if len(served.server._clients) == 1:
                break
    deaf.sock.settimeout(PATIENCE)
    good.say({"hello": "status"})
    assert "snapshot" in good.hear()
    assert deaf.is_cut_off()


def test_a_listener_or_a_store_that_fails(served, peer):
    def fail(*_):
        raise RuntimeError("on purpose")

    worker = peer()
    worker.say({"hello": "worker", "rank": 1, "attempt": 0})
    worker.hear()
    served.server._store = fail
    served.server._bus.subscribe(fail)
    worker.say({"world": "w0", "state": "active", "generation": 1}, {"ask": "worlds", "id": 1})
    assert worker.hear()["store"] == "tcp://127.0.0.1:1"  # what was known last
    assert served.states() == [(1, "w0", "active", 1)]


BECOME_NOBODY = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
"""  # in the program, its imports over: that user may not be able to read this Python

STRANGER = """
with socket.socket(socket.AF_UNIX) as sock:
    sock.settimeout(60)
    sock.connect(sys.argv[1])
    try:
        sock.sendall(b'{"hello": "status"}\\n')
        print(sock.recv(4096))
    except ConnectionError as error:
        print(type(error).__name__)
"""

AMBUSH = """
with socket.socket(socket.AF_UNIX) as sock:
    sock.bind(sys.argv[1])
    sock.listen(8)
    print("listens", flush=True)
    sys.stdin.read()
"""


def of_nobody(program, path):
    """A process of another user, at a socket that its path does not keep from it."""
    if os.getuid() != 0:
        pytest.skip("only root starts processes of another user")
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", BECOME_NOBODY + program, path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_other_users_are_turned_away(served, peer):
    path = Path(served.server.path)
    for each, mode in ((path.parent.parent, 0o711), (path.parent, 0o711), (path, 0o666)):
        each.chmod(mode)
    with of_nobody(STRANGER, str(path)) as stranger:
        said, _ = stranger.communicate(timeout=PATIENCE)
    assert said.strip() in {"b''", "ConnectionResetError", "BrokenPipeError"}
    own = peer()
    own.say({"hello": "status"})
    assert "snapshot" in own.hear()


def test_another_users_listener_is_no_launcher():
    with tempfile.TemporaryDirectory(prefix="m8d-test-") as folder:
        Path(folder).chmod(0o777)
        path = Path(folder, folders.SOCKET)
        with of_nobody(AMBUSH, str(path)) as other:
            try:
                assert other.stdout.readline() == "listens\n"
                with pytest.raises(LauncherSilentError, match=r"process [0-9]+ of user [0-9]+"):
                    question(path, {"hello": "status"}, PATIENCE)
                with pytest.raises(PermissionError, match=f"process {other.pid} of user"):
                    ControlClient(str(path), deadline=time.monotonic() + PATIENCE)
            finally:
                other.stdin.close()


def test_no_descriptor_is_left_for_a_while(served, peer, monkeypatch):
    first = peer()
    first.say({"hello": "status"})
    first.hear()
    full = threading.Event()

    class Listener:
        """Has no descriptor for two callers."""

        def __init__(self, inner):
            self.inner, self.left = inner, 2

        def accept(self):
            if self.left:
                self.left -= 1
                full.set()
                raise OSError(24, "Too many open files")
            return self.inner.accept()

        def __getattr__(self, name):
            return getattr(self.inner, name)

    listener = served.server._listener
    served.server._selector.unregister(listener)
    served.server._listener = Listener(listener)
    served.server._selector.register(served.server._listener, 1)
    second = peer()
    first.say({"hello": "status"})
    assert "snapshot" in first.hear()
    second.say({"hello": "status"})
    assert "snapshot" in second.hear()
    assert full.is_set()


def test_where_no_more_can_be_watched_clients_wait(served, peer, monkeypatch):
    """The kernel watches so many descriptors for each user, and needs memory for each."""
    monkeypatch.setattr(control, "_FULL", 0.1)
    refused, register = [1, 2], served.server._selector.register

    def full(*args):
        if len(refused) == (2 if len(args) == 3 else 1):  # first the client, then the listener
            refused.pop()
            raise OSError(errno.ENOSPC, "No space left on device")
        return register(*args)

    monkeypatch.setattr(served.server._selector, "register", full)
    assert peer().is_cut_off()
    second = peer()
    second.say({"hello": "status"})
    assert "snapshot" in second.hear()
    assert refused == []


def test_permissions_and_the_end(served):
    path = Path(served.server.path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert served.server.env() == {"M8D_CONTROL": str(path)}
    peer = Peer(served)
    served.server.close()
    served.server.close()
    assert peer.is_cut_off()
    peer.close()
    assert not path.parent.exists()
    until(no_thread, "the end of its thread")


def test_who_says_nothing_is_cut_off_in_time(served, monkeypatch):
    monkeypatch.setattr(control, "_HELLO", 1.0)
    with contextlib.closing(Peer(served)) as silent, contextlib.closing(Peer(served)) as worker:
        worker.say({"hello": "worker", "rank": 0, "attempt": 0})
        worker.hear()
        assert silent.sock.recv(1) == b"", "hung up on"
        worker.say({"ask": "worlds", "id": 7})
        assert worker.hear()["id"] == 7


def test_the_oldest_of_too_many_silent_ones_makes_room(served, monkeypatch):
    monkeypatch.setattr(control, "_MOST_SILENT", 3)
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(contextlib.closing(Peer(served)))
        worker.say({"hello": "worker", "rank": 0, "attempt": 0})
        worker.hear()
        silent = [stack.enter_context(contextlib.closing(Peer(served))) for _ in range(4)]
        assert silent[0].sock.recv(1) == b""
        worker.say({"ask": "worlds", "id": 7})
        assert worker.hear()["id"] == 7


def test_a_path_that_cannot_be():
    with tempfile.TemporaryDirectory() as folder:
        for path in (f"{folder}/{'x' * 108}/s", f"{folder}/no/no/s"):
            server = ControlServer(path, None, EventBus(), dict, store=str)
            with pytest.raises(RunError, match="at most 107 bytes"):
                server.start()
            server.close()
        assert list(Path(folder).iterdir()) == []


def test_a_server_that_never_began_ends():
    Served().close()


def test_without_a_plan():
    with contextlib.closing(Served(plan=None)) as served:
        served.server.start()
        with contextlib.closing(Peer(served)) as peer:
            peer.say({"hello": "worker", "rank": 0, "attempt": 0})
            assert peer.hear()["error"] == "this run has no worlds file"


# -- a worker's end of it ---------------------------------------------------------------------------------------


def soon():
    return time.monotonic() + PATIENCE


def test_the_client(served):
    client = ControlClient(served.server.path, deadline=soon())
    said = client.hello({"hello": "worker", "rank": 0, "attempt": 0}, deadline=soon())
    assert [world["name"] for world in said["worlds"]] == ["w0", "w1"]
    assert client.store == "tcp://127.0.0.1:1"
    assert client.ask("worlds", deadline=soon())["worlds"] == said["worlds"]
    for number in range(300):
        client.report({"world": "w0", "state": "active", "generation": number})
    until(lambda: len(served.seen) == 300, "the reports")
    assert [each.generation for each in served.seen] == list(range(300))
    served.store = "tcp://127.0.0.1:9"
    until(lambda: client.store == "tcp://127.0.0.1:9", "the news")
    client.report({"world": "x" * MAX_LINE, "state": "active"})  # too long: it is let go
    client.report({"world": object()})
    served.server.close()
    until(lambda: not client.alive, "the end")
    client.report({"world": "w0", "state": "closed"})
    assert client.ask("worlds", deadline=soon()) is None
    client.close()
    client.close()
    until(no_thread, "the end of both threads")


def test_a_launcher_that_does_not_answer():
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{folder}/s")
        silent.listen()
        client = ControlClient(f"{folder}/s", deadline=soon())
        began = time.monotonic()
        assert client.hello({"hello": "worker"}, deadline=began + 0.1) is None
        for _ in range(30_000):  # more than are kept, and than the kernel takes
            client.report({"world": "w0", "state": "active", "detail": "x" * 100})
        assert client.ask("worlds", deadline=time.monotonic() + 0.1) is None
        assert client.alive
        assert len(client._reports) <= 10_000
        client.close()
        assert not client.alive
        with pytest.raises(FileNotFoundError):
            ControlClient(f"{folder}/nothing", deadline=soon())


def test_a_launcher_that_talks_rubbish():
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/s")
        listener.listen()
        client = ControlClient(f"{folder}/s", deadline=soon())
        sock, _ = listener.accept()
        with sock:
            sock.sendall(b"rubbish\n")
            assert client.hello({"hello": "worker"}, deadline=soon()) is None
            until(lambda: not client.alive, "the end")


# -- folders ----------------------------------------------------------------------------------------------------


@pytest.fixture
def short():
    """A folder with a short name, for sockets."""
    with tempfile.TemporaryDirectory(prefix="m8d", dir="/tmp") as folder:
        yield Path(folder)


def test_the_folder_of_a_launcher(short, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    path = Path(folders.choose("a run/with: odd characters, and a long name"))
    assert path == short / "m8d-run" / f"a-run-with--odd-char{folders._host()}{os.getpid()}" / "control.sock"
    assert stat.S_IMODE((short / "m8d-run").stat().st_mode) == 0o700
    assert not path.parent.exists()
    server = ControlServer(str(path), None, EventBus(), dict, store=str)
    server.start()
    assert [each for each in folders.sockets() if each.is_relative_to(short)] == [path]
    other = Path(folders.choose("a run/with: odd characters, and a long name"))
    assert other.parent != path.parent
    assert other.parent.parent == path.parent.parent
    assert path.exists()
    server.close()
    assert [each for each in folders.sockets() if each.is_relative_to(short)] == []
    assert Path(folders.choose("")).parent.name == f"run{folders._host()}{os.getpid()}"


def test_what_dead_launchers_left_is_swept(short, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    root = Path(folders.choose("x")).parent.parent
    host = folders._host()
    dead, alive, old, young, foreign = (
        root / name.replace("-", host) for name in ("dead-1", "alive-2", "old-3", "young-4", "more-5")
    )
    for folder in (dead, alive, old, young, foreign):
        folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(dead / folders.SOCKET))
        ended.listen()
    (foreign / "of-somebody").touch()
    for folder in (old, foreign):
        os.utime(folder, (0, 0))
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(alive / folders.SOCKET))
        living.listen()
        folders.choose("x")
    names = sorted(each.name.replace(host, "-") for each in root.iterdir())
    assert names == ["alive-2", "more-5", "young-4"]


def test_launchers_of_other_hosts_are_not_swept(short, monkeypatch):
    """Hosts share a folder for temporary files; a socket of another kernel refuses, as a dead launcher's."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    boot, found = short / "boot_id", []
    monkeypatch.setattr(folders, "_BOOT", boot)
    for host in ("3f0c9a5e-5d57-4a3d-8c5b-1b1f6a8f2d11\n", "a1b2c3d4-5d57-4a3d-8c5b-1b1f6a8f2d11\n", None):
        boot.unlink(missing_ok=True)
        if host is not None:
            boot.write_text(host)
        found.append(Path(folders.choose("x")))
        found[-1].parent.mkdir(mode=0o700)
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(str(found[-1]))
    assert all(each.exists() for each in found)
    folders.choose("x")
    assert [each.exists() for each in found] == [True, True, False]


def test_a_folder_that_others_can_enter_is_not_used(short, monkeypatch):
    runtime, tmp = short / "run", short / "tmp"
    for folder in (runtime, tmp, runtime / "m8d-run"):
        folder.mkdir()
    (runtime / "m8d-run").chmod(0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("TMPDIR", str(tmp))
    assert Path(folders.choose("x")).is_relative_to(tmp)
    (tmp / f"m8d-run-{os.getuid()}").rmdir()
    (tmp / f"m8d-run-{os.getuid()}").symlink_to(runtime)
    monkeypatch.setattr(folders, "roots", lambda: [runtime / "m8d-run", tmp / f"m8d-run-{os.getuid()}"])
    with pytest.raises(RunError, match="no folder for the control socket"):
        folders.choose("x")
    assert folders.sockets() == []


@pytest.mark.parametrize(
    ("runtime", "lingers", "first"),
    [
        (f"/run/user/{os.getuid()}", False, False),
        (f"/run/user/{os.getuid()}/", False, False),
        (f"/run/user/{os.getuid()}", True, True),
        ("/run/m8d", False, True),
    ],
)
def test_a_folder_that_goes_with_the_session_is_the_last_choice(short, monkeypatch, runtime, lingers, first):
    """A launcher under nohup outlives it; m8d-run status looks there all the same."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    monkeypatch.setenv("TMPDIR", str(short))
    monkeypatch.setattr(folders, "_LINGER", short)
    if lingers:
        (short / pwd.getpwuid(os.getuid()).pw_name).touch()
    found = folders.roots()
    assert found.index(Path(runtime) / "m8d-run") == (0 if first else len(found) - 1)
    assert found.index(short / f"m8d-run-{os.getuid()}") == (1 if first else 0)


def test_where_no_file_can_be_written(short, monkeypatch):
    """On a full disk runs are found all the same, and a launcher that starts says what is wrong."""

    def full():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(folders.tempfile, "gettempdir", full)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(short))
    path = Path(folders.choose("x"))
    path.parent.mkdir(mode=0o700)
    path.touch()
    assert path in folders.sockets()
    monkeypatch.setattr(folders, "_own", lambda root: False)
    with pytest.raises(RunError, match=f"no folder for the control socket: tried {short}"):
        folders.choose("x")


def test_a_path_that_is_too_long_for_a_socket(short, monkeypatch):
    deep = short / ("x" * 90)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    monkeypatch.setenv("TMPDIR", str(short))
    assert Path(folders.choose("x")).is_relative_to(short / f"m8d-run-{os.getuid()}")


# -- a look at the workers' worlds --------------------------------------------------------------------------------


def worker_that_answers(served, rank, answer=None, attempt=0):
    """A worker; it answers a look with `answer(question)`, or never."""

    def looked(asked):
        if answer is not None:
            client.report({"look": asked["look"], **answer(asked)})

    client = ControlClient(served.server.path, deadline=time.monotonic() + PATIENCE, looked=looked)
    client.hello({"hello": "worker", "rank": rank, "attempt": attempt}, deadline=time.monotonic() + PATIENCE)
    return client


def says(waited=0.0, name="w0"):
    def answer(asked):
        waits = {each: {"pending": [{"text": f"asked of {each}"}]} for each in asked["worlds"]}
        return {"status": {"worlds": [{"name": name, "waits": waited}]}, "waits": waits}

    return answer


SILENCE = 4.0  # seconds, after which a worker counts as silent where a test has one


@pytest.fixture
def workers(served, monkeypatch):
    monkeypatch.setattr(control, "_LOOKING", PATIENCE)  # a busy machine does not make a worker silent
    with contextlib.ExitStack() as stack:
        yield lambda *args, **more: stack.enter_context(
            contextlib.closing(worker_that_answers(served, *args, **more))
        )


def test_a_look_is_answered_by_all_workers(served, workers):
    for rank in (0, 2, 5):
        workers(rank, says(name=f"w{rank}"), attempt=rank)
    told = look(Path(served.server.path), {"2": ["a", "b"]}, PATIENCE)
    assert sorted((each["rank"], each["attempt"]) for each in told) == [(0, 0), (2, 2), (5, 5)]
    assert {each["rank"]: each["waits"] for each in told} == {
        0: {}, 5: {}, 2: {name: {"pending": [{"text": f"asked of {name}"}]} for name in "ab"},
    }  # fmt: skip
    assert {each["status"]["worlds"][0]["name"] for each in told} == {"w0", "w2", "w5"}


def test_without_workers_it_is_answered_at_once(served, monkeypatch):
    monkeypatch.setattr(control, "_LOOKING", PATIENCE)
    began = time.monotonic()
    assert look(Path(served.server.path), {}, PATIENCE) == []
    assert time.monotonic() - began < PATIENCE / 2
    assert pending_operations(Path(served.server.path), PATIENCE) == {}


def test_a_worker_that_is_silent_is_waited_for_only_so_long(served, workers, monkeypatch):
    monkeypatch.setattr(control, "_LOOKING", SILENCE)
    workers(0, says())
    workers(1)  # stopped, or of an earlier version
    began = time.monotonic()
    assert [each["rank"] for each in look(Path(served.server.path), {}, PATIENCE)] == [0]
    assert SILENCE <= time.monotonic() - began < SILENCE + 20


def test_a_late_answer_and_one_to_no_question_harm_nobody(served, workers, monkeypatch):
    monkeypatch.setattr(control, "_LOOKING", SILENCE)
    late = workers(0)
    assert look(Path(served.server.path), {}, PATIENCE) == []
    for number in (1, 77, "x", None, True):
        late.report({"look": number, "status": {}, "waits": {}})
    workers(1, says())
    assert [each["rank"] for each in look(Path(served.server.path), {}, PATIENCE)] == [1]
    assert late.alive


def test_one_who_asks_and_goes_leaves_nothing(served, workers, peer):
    workers(0)
    for _ in range(3):
        one = peer()
        one.say({"hello": "look", "pending": {}})
        one.close()
    until(lambda: served.server._looks == {}, "the end of the looks")
    assert question(Path(served.server.path), {"hello": "status"}, PATIENCE) == {"snapshot": {"version": 1}}


def test_answers_of_many_workers_are_not_held_back_by_their_size(served, workers):
    big = {"status": {"worlds": [], "more": "x" * 900_000}, "waits": {}}
    for rank in range(8):
        workers(rank, lambda _: big)
    assert len(look(Path(served.server.path), {}, PATIENCE)) == 8


def test_a_launcher_that_has_ended_or_hangs(tmp_path):
    assert look(tmp_path / "none.sock", {}, 1.0) is None
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        with pytest.raises(LauncherSilentError, match=r"no answer within 0\.2 s"):
            look(tmp_path / "s", {}, 0.2)


def test_members_of_worlds_in_which_something_waits_are_asked(served, workers):
    workers(0, says(9.0, "w0"))
    workers(1, says(9.0, "w0"))
    workers(2, says(0.0, "w1"))
    assert pending_operations(Path(served.server.path), PATIENCE) == {"w0": [{"text": "asked of w0"}]}


def test_snapshots_of_all_nodes(served):
    served.server._others = lambda timeout: [{"node": "beta"}, {"node": "gamma", "x": "y" * 100_000}]
    told = snapshots(Path(served.server.path), PATIENCE)
    assert told == [{"version": 1}, {"node": "beta"}, {"node": "gamma", "x": "y" * 100_000}]


def test_a_snapshot_has_the_events_after_the_one_that_is_named(served):
    served.snapshot = lambda **more: more
    path = Path(served.server.path)
    assert own_snapshot(path, PATIENCE, 7) == {"after": 7}
    assert own_snapshot(path, PATIENCE) == {}
    assert question(path, {"hello": "status", "after": "7"}, PATIENCE) == {"snapshot": {}}


def test_a_large_run_has_a_snapshot(served):
    served.snapshot = lambda: {"worlds": "x" * 3 * MAX_LINE}
    (told,) = snapshots(Path(served.server.path), PATIENCE)
    assert len(told["worlds"]) == 3 * MAX_LINE
    assert (
        len(question(Path(served.server.path), {"hello": "status"}, PATIENCE)["snapshot"]["worlds"])
        > MAX_LINE
    )


def test_a_snapshot_of_this_node_where_the_others_cannot_be_asked(served):
    def broken(timeout):
        raise RuntimeError("no thread")

    served.server._others = broken
    assert snapshots(Path(served.server.path), PATIENCE) == [{"version": 1}]
    served.snapshot = lambda: 1 / 0
    with pytest.raises(LauncherSilentError, match="division by zero"):
        snapshots(Path(served.server.path), PATIENCE)


def test_who_is_waited_for():
    one = Look(frozenset({3, 1}), 5.0)
    assert (one.complete, one.silent) == (False, [1, 3])
    assert one.answered(1)
    assert not one.answered(1)
    assert not one.answered(7)
    assert one.silent == [3]
    assert one.answered(3)
    assert (one.complete, one.silent, one.deadline) == (True, [], 5.0)
