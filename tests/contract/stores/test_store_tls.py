"""Stores in secure mode: TLS on every connection, what is refused, and members in processes of their own."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from kits import forkedkit
from kits.contract.worldkit import free_port
from kits.meetkit import until
from kits.storekit import local_server
from kits.tlskit import Files, authority

from multiworld._net.stores import store as stores
from multiworld._net.stores import tls_server
from multiworld._net.stores.etcd_address import EtcdAddress
from multiworld._net.stores.secure import check_etcd
from multiworld._net.stores.servers import serve
from multiworld._net.stores.store import open_store
from multiworld._net.stores.tcp_client import NotAStoreError, TcpClient
from multiworld._net.stores.tls_server import TlsStoreServer
from multiworld._net.stores.torchstore import TcpStore
from multiworld._net.tls import credentials as credentials_module
from multiworld.errors import InvalidJoinError, StoreBindError, StoreUnreachableError

ROOT = Path(__file__).parents[3]
PATIENCE = 30.0


def soon(seconds=PATIENCE):
    return time.monotonic() + seconds


@pytest.fixture(scope="module")
def ours():
    return authority("job")


@pytest.fixture
def files(tmp_path, ours):
    return Files(tmp_path / "tls", ours)


@pytest.fixture
def secure(files, monkeypatch):
    for name, value in files.environment.items():
        monkeypatch.setenv(name, value)
    return files


@pytest.fixture
def server(files):
    served = TlsStoreServer(socket.AF_INET, ("127.0.0.1", 0), credentials=files.credentials)
    yield served
    served.close()


@pytest.fixture
def address():
    return f"tcp://127.0.0.1:{free_port()}"


@contextlib.contextmanager
def program(text, *arguments, **environment):
    """A process that runs `text`, whose output is read; killed at the end."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    process = forkedkit.program(
        text, *arguments, stdin=subprocess.PIPE, stderr=None, env={"PYTHONPATH": path, **environment}
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE)
        process.stdin.close()
        process.stdout.close()


SERVES = """
import sys, time
from multiworld._net.stores.store import open_store
handle = open_store(sys.argv[1], world="w", serve=True, deadline=time.monotonic() + 60)
print("up", handle.serves, flush=True)
sys.stdin.read()
"""


class Relay:
    """Carries bytes between a client and a server, keeps them, and can hold back what the server says."""

    def __init__(self, port):
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self.seen = bytearray()
        self.left: int | None = None  # bytes of the server's that still pass; None: all
        self._turn = threading.Condition()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._socks = [self._listener]
        self._threads[0].start()

    def _accept(self):
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self._port))
        self._socks += [near, far]
        for args in ((near, far, False), (far, near, True)):
            self._threads.append(threading.Thread(target=self._carry, args=args, daemon=True))
            self._threads[-1].start()

    def _carry(self, source, to, back):
        with contextlib.suppress(OSError):
            while chunk := source.recv(65536):
                self.seen += chunk
                while back and chunk:
                    with self._turn:
                        self._turn.wait_for(lambda: self.left is None or self.left > 0, PATIENCE)
                        some = chunk if self.left is None else chunk[: self.left]
                        if self.left is not None:
                            self.left -= len(some)
                    to.sendall(some)
                    chunk = chunk[len(some) :]
                if chunk:
                    to.sendall(chunk)

    def let_pass(self, count):
        with self._turn:
            self.left = count
            self._turn.notify_all()

    def close(self):
        self.let_pass(None)
        for each in self._socks:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for each in self._threads:
            each.join(PATIENCE)


@pytest.fixture
def relay(server):
    carries = Relay(server.port)
    yield carries
    carries.close()


def member(files, address):
    return TcpClient.connect_as(files.credentials, socket.AF_INET, address, deadline=soon())


# -- the connection -------------------------------------------------------------------------------------------------


def test_nothing_that_can_be_read_is_on_the_wire(relay, files):
    client = member(files, relay.address)
    client.set("a-key-of-a-world", b"a-value-of-a-world", deadline=soon())
    assert client.get("a-key-of-a-world", deadline=soon()) == b"a-value-of-a-world"
    client.close()
    for text in (b"a-key-of", b"a-value-of", b"m8d", struct.pack("=I", 0x3C85F7CE)):
        assert text not in relay.seen
    assert relay.seen[0] == 22


@pytest.mark.parametrize("passed", [0, 1, 5, 9, 30])
def test_a_late_answer_is_discarded_though_a_part_of_its_record_came_in_time(relay, files, passed):
    client = member(files, relay.address)
    client.set("a", b"x" * 100, deadline=soon())
    client.ping(deadline=soon())
    relay.let_pass(passed)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            client.get("a", deadline=soon(0.15))
    relay.let_pass(None)
    assert client.add("n", 7, deadline=soon()) == 7
    assert client.get("a", deadline=soon()) == b"x" * 100
    client.close()


def test_close_ends_a_call_in_another_thread(relay, files):
    client = member(files, relay.address)
    relay.let_pass(0)
    raised = []

    def call():
        try:
            client.get("a", deadline=soon())
        except OSError as error:
            raised.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    until(lambda: client._owed)
    began = time.monotonic()
    client.close()
    caller.join(PATIENCE)
    assert time.monotonic() - began < PATIENCE / 2
    assert isinstance(raised[0], ConnectionError)
    with pytest.raises(ConnectionError, match="closed here"):
        client.get("a", deadline=soon())


def test_a_server_that_does_not_read_keeps_no_call_beyond_its_deadline(relay, files):
    client = member(files, relay.address)
    relay.let_pass(0)
    began = time.monotonic()
    with pytest.raises((TimeoutError, ConnectionError)):
        while True:  # until the server does not read any more, as its replies are not read
            client.set("a", b"x" * 8_000_000, deadline=began + 1.0)
            client.get("a", deadline=began + 1.0)
    assert time.monotonic() - began < PATIENCE / 2
    client.close()


def resident(pid="self"):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def test_what_a_member_does_not_read_is_not_kept_for_it(server, files):
    """1 GB of replies are asked for at once; all come when they are read, and others are answered meanwhile."""
    other = member(files, ("127.0.0.1", server.port))
    value = os.urandom(1 << 20)
    other.set("big", value, deadline=soon())
    key, nothing = b"/big", b"?"
    query = b"\2" + b"".join(struct.pack("=Q", len(each)) + each for each in (key, nothing, nothing))
    context = files.credentials.context(server=False)
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    before = resident()
    with context.wrap_socket(sock) as tls:
        tls.sendall(struct.pack("=BI", 0, 0x3C85F7CE))
        for number in range(200):
            tls.sendall(query * 5)
            assert other.add("n", 1, deadline=soon()) == number + 1
        assert resident() - before < 100_000_000
        tls.settimeout(PATIENCE)
        left = 1000 * (8 + len(value))
        while left:
            left -= len(tls.recv(1 << 20))
    other.close()


def test_members_come_while_the_files_are_replaced(files, ours, monkeypatch):
    monkeypatch.setattr(
        tls_server, "_PATIENCE", PATIENCE
    )  # both ends are in this process, which may stand still
    monkeypatch.setattr(credentials_module, "LOOK_EVERY", 0.01)
    own = files.credentials
    served = TlsStoreServer(socket.AF_INET, ("127.0.0.1", 0), credentials=own)
    stays = TcpClient.connect_as(own, socket.AF_INET, ("127.0.0.1", served.port), deadline=soon())
    errors, over, done = [], threading.Event(), []

    def come():
        each = TcpClient.connect_as(own, socket.AF_INET, ("127.0.0.1", served.port), deadline=soon())
        each.add("n", 1, deadline=soon())
        each.close()
        done.append(1)

    def keep_coming():
        try:
            while not over.is_set():
                come()
        except OSError as error:
            errors.append(error)

    comers = [threading.Thread(target=keep_coming) for _ in range(3)]
    for each in comers:
        each.start()
    try:
        for number in range(20):
            files.replace(ours, name=f"name {number}")
            count = len(done)
            until(lambda count=count: len(done) > count + 3 or errors)
        until(lambda: own.identity.subject == "name 19")
    finally:
        over.set()
        for each in comers:
            each.join(PATIENCE)
    assert errors == []
    assert int(stays.get("n", deadline=soon())) == len(done)
    stays.close()
    served.close()


def test_a_forked_child_keeps_neither_the_port_nor_a_connection(files):
    text = """
import os, sys, time
from multiworld._net.stores.store import open_store
handle = open_store(sys.argv[1], world="w", serve=True, deadline=time.monotonic() + 60)
print("up", flush=True)
sys.stdin.readline()
child = os.fork()
if child == 0:
    handle.close()
    del handle
    print("forked", flush=True)
    sys.stdin.read()
else:
    time.sleep(600)
"""
    port = free_port()
    with program(text, f"tcp://127.0.0.1:{port}", **files.environment) as process:
        assert process.stdout.readline() == "up\n"
        client = member(files, ("127.0.0.1", port))
        process.stdin.write("fork\n")
        process.stdin.flush()
        assert process.stdout.readline() == "forked\n"
        assert client.add("n", 1, deadline=soon()) == 1
        process.kill()
        process.wait(PATIENCE)
        with pytest.raises(ConnectionError):
            client.add("n", 1, deadline=soon())
        client.close()
        TlsStoreServer(socket.AF_INET, ("127.0.0.1", port), credentials=files.credentials).close()


def test_the_port_is_free_after_the_last_reference(files):
    served = TlsStoreServer(socket.AF_INET, ("127.0.0.1", 0), credentials=files.credentials)
    port = served.port
    del served
    again = TlsStoreServer(socket.AF_INET, ("127.0.0.1", port), credentials=files.credentials)
    with pytest.raises(OSError, match="in use"):
        TlsStoreServer(socket.AF_INET, ("127.0.0.1", port), credentials=files.credentials)
    again.close()
    again.close()


# -- one with TLS and one without -----------------------------------------------------------------------------------


def test_a_store_without_tls_is_refused_in_secure_mode(secure, monkeypatch):
    """torch's server says nothing to the greeting, as one that stands still; torch 2.4's resets the connection."""
    monkeypatch.setattr(stores, "_SILENT", 0.2)
    monkeypatch.setattr(stores, "_FOREIGN", 0.2)
    monkeypatch.setattr(stores, "ATTEMPT", 0.5)
    plain = local_server()
    for serves, kind in ((True, StoreBindError), (False, StoreUnreachableError)):
        with pytest.raises(kind, match="does not speak TLS") as caught:
            open_store(f"tcp://127.0.0.1:{plain.port}", world="w", serve=serves, deadline=soon(1.5))
        assert "M8D_TLS_CERT" in caught.value.next_step
    two = f"tcp://127.0.0.1:{plain.port},127.0.0.1:{free_port()}"
    with pytest.raises(StoreUnreachableError, match="does not speak TLS"):
        open_store(two, world="w", serve=False, deadline=soon(1.0))


def test_a_store_with_tls_is_refused_without(address, files, monkeypatch):
    monkeypatch.setattr(stores, "_FOREIGN", 0.2)
    monkeypatch.setattr(stores, "ATTEMPT", PATIENCE)
    with program(SERVES, address, **files.environment) as process:
        assert process.stdout.readline() == "up True\n"
        for serves, kind in ((True, StoreBindError), (False, StoreUnreachableError)):
            with pytest.raises(kind, match="speaks TLS, and this process is not") as caught:
                open_store(address, world="w", serve=serves, deadline=soon(1.5))
            assert "M8D_TLS_CERT" in caught.value.next_step


def test_what_only_listens_is_silent_in_secure_mode_too(secure, monkeypatch):
    monkeypatch.setattr(stores, "_SILENT", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as other:
        where = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(StoreBindError, match="does not answer over TLS"):
            open_store(where, world="w", serve=True, deadline=soon())


def test_a_stranger_that_serves_is_refused(address, secure, tmp_path):
    theirs = Files(tmp_path / "theirs", authority("job"))
    with program(SERVES, address, **theirs.environment) as process:
        assert process.stdout.readline() == "up True\n"
        with pytest.raises(StoreUnreachableError, match="the certificate of the store there is refused"):
            open_store(address, world="w", serve=False, deadline=soon(1.0))


# -- what is a store in secure mode ---------------------------------------------------------------------------------


def test_the_mode_is_that_of_the_moment_of_opening(address, secure, monkeypatch):
    handle = open_store(address, world="w", serve=True, deadline=soon())
    for name in secure.environment:
        monkeypatch.delenv(name)
    with pytest.raises(NotAStoreError, match="speaks TLS"):
        TcpClient.connect(socket.AF_INET, ("127.0.0.1", int(address.rpartition(":")[2])), deadline=soon())
    fresh = handle.fresh()
    assert isinstance(fresh, TcpStore)
    fresh.set("a", "b")
    assert handle.store.get("a") == b"b"
    del fresh
    handle.close()


def test_clients_for_c_have_connections_of_their_own_and_are_used_again(address, secure):
    handle = open_store(address, world="w", serve=True, deadline=soon())
    first = handle.fresh()
    assert first._client is not handle.store._client
    under = dist.PrefixStore("p", first)
    under.set("a", "b")
    assert (under.get("a"), under.add("n", 2)) == (b"b", 2)
    assert handle.store.get("p/a") == b"b"
    with pytest.raises(dist.DistStoreError):
        dist.PrefixStore("q", under).wait(["never"], dt.timedelta(milliseconds=50))
    del under
    handle.idle()
    assert handle.fresh() is first
    client = first._client
    del first
    handle.close()
    del handle
    with pytest.raises(ConnectionError, match="closed here"):
        client.ping(deadline=soon())


def test_a_hold_is_spare_while_no_other_process_is_connected(address, secure):
    handle = open_store(address, world="w", serve=True, deadline=soon())
    fresh = handle.fresh()
    until(handle.spare)
    with program(SERVES, address) as process:
        assert process.stdout.readline() == "up False\n"
        assert not handle.spare()
    until(handle.spare)
    del fresh
    handle.close()


def test_a_file_is_the_users_own(secure, tmp_path):
    path = tmp_path / "store"
    handle = open_store(f"file://{path}", world="w", serve=True, deadline=soon())
    handle.store.set("a", "b")
    assert path.stat().st_mode & 0o777 == 0o600
    handle.close()
    again = open_store(f"file://{path}", world="w", serve=True, deadline=soon())
    assert again.store.get("a") == b"b"
    again.close()
    for mode in (0o640, 0o604, 0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(InvalidJoinError, match=f"mode {mode:04o}") as caught:
            open_store(f"file://{path}", world="w", serve=True, deadline=soon())
        assert "chmod 600" in caught.value.next_step
    path.chmod(0o600)
    tmp_path.chmod(0o777)
    with pytest.raises(InvalidJoinError, match="folder"):
        open_store(f"file://{path}", world="w", serve=True, deadline=soon())
    tmp_path.chmod(0o1777)
    open_store(f"file://{path}", world="w", serve=True, deadline=soon()).close()


def test_a_file_of_another_user_is_refused(secure, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    path = tmp_path / "store"
    path.touch(mode=0o600)
    os.chown(path, 12345, 12345)
    with pytest.raises(InvalidJoinError, match="user 12345"):
        open_store(f"file://{path}", world="w", serve=True, deadline=soon())


def test_objects_but_those_of_one_process_are_refused(secure, tmp_path):
    hashed = dist.HashStore()
    for each in (hashed, dist.PrefixStore("a", dist.PrefixStore("b", hashed))):
        handle = open_store(each, world="w", serve=True, deadline=soon())
        assert handle.store is each
        handle.close()
    tcp = local_server()
    for each in (tcp, dist.PrefixStore("a", tcp), dist.FileStore(str(tmp_path / "f"), -1)):
        with pytest.raises(InvalidJoinError, match="Store") as caught:
            open_store(each, world="w", serve=True, deadline=soon())
        assert "tcp://" in caught.value.next_step


def test_an_etcd_cluster_knows_its_clients(secure):
    plain = check_etcd(EtcdAddress.parse("etcd://h:1/p"), "w")
    assert (plain.ca, plain.cert, plain.key) == tuple(
        secure.environment[f"M8D_TLS_{each}"] for each in ("CA", "CERT", "KEY")
    )
    for options in ("?ca=/a&cert=/c&key=/k", "?cert=/c&key=/k"):
        given = EtcdAddress.parse(f"etcd://h:1/p{options}")
        assert check_etcd(given, "w") == given
    user = EtcdAddress.parse("etcd://u:p@h:1/p?ca=/a")
    assert check_etcd(user, "w") == user
    with pytest.raises(InvalidJoinError, match="certificate, or by user"):
        open_store("etcd://h:1/p?ca=/a", world="w", serve=False, deadline=soon(1))


# -- processes ------------------------------------------------------------------------------------------------------


def test_a_list_moves_to_the_next_server(secure):
    port = free_port(further=1)
    where = f"tcp://127.0.0.1:{port},127.0.0.1:{port + 1}"
    with program(SERVES, where) as process:
        assert process.stdout.readline() == "up True\n"
        handle = open_store(where, world="w", serve=True, deadline=soon())
        assert not handle.serves
        handle.store.set("a", "b")
        epoch = handle.store.epoch
        process.kill()
        process.wait(PATIENCE)
        until(lambda: handle.serves)
        handle.store.set("a", "c")
        assert handle.store.get("a") == b"c"
        assert handle.store.epoch > epoch
        own = next(each for each in (port, port + 1) if handle._shared.client.remote[1] == each)
        with socket.create_connection(("127.0.0.1", own), timeout=PATIENCE) as stranger:
            stranger.sendall(struct.pack("=BI", 0, 0x3C85F7CE))
            assert stranger.recv(100)[:1] == b"\x15"
        handle.close()


def test_what_other_packages_serve_is_by_the_settings(files, monkeypatch):
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        served = serve(socket.AF_INET, ("127.0.0.1", port))
    plain = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    assert plain.add("n", 1) == 1
    del plain
    served.close()
    for name, value in files.environment.items():
        monkeypatch.setenv(name, value)
    served = serve(socket.AF_INET, ("127.0.0.1", 0))
    assert isinstance(served, TlsStoreServer)
    TcpClient.connect(socket.AF_INET, ("127.0.0.1", served.port), deadline=soon()).close()
    served.close()


MEETS = """
import os, socket, sys, time
from kits.meetkit import ask
from multiworld._core.membership.roster import Endpoint
from multiworld._net.stores.rendezvous import Rendezvous
from multiworld._net.stores.store import open_store
where, rank = sys.argv[1], int(sys.argv[2])
handle = open_store(where, world="w", serve=rank == 0, deadline=time.monotonic() + 60)
listener = socket.create_server(("127.0.0.1", 0))
here = Endpoint("127.0.0.1", listener.getsockname()[1])
last = 0
for turn in range(3):
    one = Rendezvous(
        handle.store,
        ask(rank, 3, endpoint=here, pid=os.getpid(), last_generation=last),
        deadline=time.monotonic() + 60,
    )
    roster = one.agree()
    one.commit()
    last = roster.generation
    print(roster.generation, len(roster.members), roster.token.hex(), flush=True)
    sys.stdin.readline()
    one.over()
sys.stdin.readline()
handle.close()
"""


@pytest.mark.parametrize("addresses", [1, 2])
def test_three_processes_meet_and_meet_again(secure, addresses):
    port = free_port(further=1)
    where = f"tcp://127.0.0.1:{port}" + f",127.0.0.1:{port + 1}" * (addresses - 1)
    with contextlib.ExitStack() as stack:
        members = [stack.enter_context(program(MEETS, where, str(rank))) for rank in range(3)]
        for turn in range(1, 4):
            told = {each.stdout.readline() for each in members}
            assert len(told) == 1
            generation, size, token = told.pop().split()
            assert (int(generation) >= turn, size, len(token) >= 32) == (True, "3", True)
            for each in members:
                each.stdin.write("go on\n")
                each.stdin.flush()
        for each in members:
            each.stdin.write("end\n")
            each.stdin.flush()
        assert [each.wait(PATIENCE) for each in members] == [0, 0, 0]
