"""How long the members of an etcd cluster have to answer."""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from multiworld._net.stores import etcd_client
from multiworld._net.stores.etcd_address import EtcdAddress
from multiworld.errors import StoreUnreachableError

pytest.importorskip("urllib3")


class Cluster(etcd_client.EtcdClient):
    """Members that take as long as is said, in turn: None for ever. Time passes with their answers alone."""

    def __init__(self, monkeypatch, *takes):
        super().__init__(EtcdAddress.parse("etcd://h1:1,h2:1,h3:1/p", world="w"))
        self.takes, self.asked, self.now = list(takes), [], 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=lambda _: None)
        monkeypatch.setattr(etcd_client, "time", clock)

    def _post(self, at, path, body, headers, seconds):
        self.asked.append((at, seconds))
        takes = self.takes.pop(0)
        self.now += seconds if takes is None else min(takes, seconds)
        if takes is None or takes > seconds:
            raise self._late
        return 0, {}


@pytest.fixture
def cluster(monkeypatch):
    return lambda *takes: Cluster(monkeypatch, *takes)


def test_a_call_that_was_lost_with_the_leader_is_made_again_soon(cluster):
    etcd = cluster(None, None, 0.01)
    etcd.call("/kv/txn", {}, deadline=60.0)
    assert etcd.asked == [(0, 0.3), (1, 0.3), (2, 0.3)]


def test_a_cluster_that_is_slow_is_waited_for_and_by_the_next_calls_from_the_beginning(cluster):
    etcd = cluster(*[0.8] * 6, 0.8, 0.01, 0.01)
    etcd.call("/kv/range", {}, deadline=3.0)
    assert [seconds for _, seconds in etcd.asked] == pytest.approx([0.3] * 4 + [0.6, 1.2])
    for learned in (2.4, 2.4, 1.2):
        etcd.call("/kv/range", {}, deadline=60.0)
        assert etcd.asked[-1][1] == pytest.approx(learned)


def test_what_a_call_that_failed_has_learned_is_not_forgotten(cluster):
    etcd = cluster(*[1.1] * 10)
    with pytest.raises(TimeoutError):
        etcd.call("/kv/range", {}, deadline=1.8)
    etcd.call("/kv/range", {}, deadline=5.0)
    assert etcd.asked[-1][1] == pytest.approx(1.2)


def test_no_member_has_more_than_what_is_left(cluster):
    etcd = cluster(None, None, None, None)
    with pytest.raises(TimeoutError, match="does not answer"):
        etcd.call("/kv/range", {}, deadline=1.0)
    assert [seconds for _, seconds in etcd.asked] == pytest.approx([0.3, 0.3, 0.3, 0.1])


def test_a_call_that_is_given_up_ends(cluster):
    etcd = cluster(None, None, None, None)
    with pytest.raises(TimeoutError, match="given up"):
        etcd.call("/kv/range", {}, deadline=60.0, cancelled=lambda: len(etcd.asked) == 2)
    assert len(etcd.asked) == 2


class Tokens(etcd_client.EtcdClient):
    """A member whose users change, at which a token is no longer good then: `refusal` is what it says."""

    def __init__(self, refusal):
        super().__init__(EtcdAddress.parse("etcd://u:p@h1:1/p", world="w"))
        self.refusal, self.drawn, self.asked = refusal, 0, 0

    def _post(self, at, path, body, headers, seconds):
        if path == "/auth/authenticate":
            self.drawn += 1
            return 0, {"token": str(self.drawn)}
        self.asked += 1
        return (0, {}) if int(headers["Authorization"]) > 1 else self.refusal


@pytest.mark.parametrize(
    "refusal",
    [
        (16, {"error": "etcdserver: invalid auth token", "code": 16}),
        (3, {"error": "etcdserver: revision of auth store is old", "code": 3}),
    ],
)
def test_a_token_that_is_no_longer_good_is_drawn_anew(refusal):
    etcd = Tokens(refusal)
    etcd.call("/kv/range", {}, deadline=time.monotonic() + 30.0)
    assert (etcd.drawn, etcd.asked) == (2, 2)


def test_an_invalid_call_is_refused_at_once():
    etcd = Tokens((3, {"error": "etcdserver: key is not provided", "code": 3}))
    with pytest.raises(PermissionError, match="key is not provided"):
        etcd.call("/kv/range", {}, deadline=time.monotonic() + 30.0)
    assert (etcd.drawn, etcd.asked) == (1, 1)


def test_a_call_that_waits_for_another_ones_lease_ends_when_it_is_given_up():
    etcd_store = pytest.importorskip("multiworld._net.stores.etcd_store", exc_type=ImportError)
    lease = etcd_store.Lease(None)
    with lease._lock, pytest.raises(TimeoutError):
        lease.id(time.monotonic() + 1e6, cancelled=lambda: True)


class Told:
    """A client that keeps what it is told of a call."""

    def call(self, path, body, *, deadline, cancelled):
        self.left, self.given_up = deadline - time.monotonic(), cancelled()
        return {"ID": "1", "kvs": []}

    @property
    def address(self):
        return SimpleNamespace(prefix="p/")


def test_what_a_join_reports_once_it_was_cancelled_has_three_seconds():
    """What it was calling then ends."""
    etcd_store = pytest.importorskip("multiworld._net.stores.etcd_store", exc_type=ImportError)
    etcd, cancelled = Told(), threading.Event()
    store = etcd_store.EtcdStore(
        etcd, lease=etcd_store.Lease(etcd), deadline=time.monotonic() + 1000.0, cancelled=cancelled.is_set
    )
    store._lease._id = "1"
    for call in (lambda: store.set("a", "b"), lambda: store.delete_key("a")):
        cancelled.clear()
        call()
        assert (etcd.left > 500.0, etcd.given_up) == (True, False)
        cancelled.set()
        call()
        assert (etcd.left <= 3.0, etcd.given_up) == (True, False)


def test_two_threads_whose_login_has_expired_log_in_again(monkeypatch):
    """Each call meets the expired token before the other one has drawn a new one."""
    etcd = etcd_client.EtcdClient(EtcdAddress.parse("etcd://me:secret@h1:1/p", world="w"))
    etcd._token, both, drawn = "old", threading.Barrier(2), itertools.count(1)

    def post(_at, path, _body, headers, _seconds):
        if path == "/auth/authenticate":
            return 0, {"token": f"new{next(drawn)}"}
        if headers["Authorization"] == "old":
            both.wait(10)
            return 16, {"error": "invalid auth token"}
        return 0, {"by": headers["Authorization"]}

    monkeypatch.setattr(etcd, "_post", post)
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(etcd.call, "/kv/range", {}, deadline=time.monotonic() + 10) for _ in range(2)]
        assert {each.result()["by"][:3] for each in calls} == {"new"}


def test_a_login_that_is_refused_is_told(monkeypatch):
    etcd = etcd_client.EtcdClient(EtcdAddress.parse("etcd://me:wrong@h1:1/p", world="w"))
    monkeypatch.setattr(etcd, "_post", lambda *_: (3, {"error": "invalid user ID or password"}))
    with pytest.raises(PermissionError, match="invalid user ID or password"):
        etcd.call("/kv/range", {}, deadline=time.monotonic() + 10)


class Greeted:
    """A member of a cluster that answers one call on a connection, and keeps whom certificates name.

    Attributes:
        failed: a handshake with it has failed.
    """

    def __init__(self, files, latest=ssl.TLSVersion.MAXIMUM_SUPPORTED):
        self.names, self._listener = [], socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._context = files.credentials.context(server=True)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._context.maximum_version = latest
        self.failed = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        while True:
            connection, _ = self._listener.accept()
            with contextlib.closing(connection), contextlib.suppress(OSError):
                connection.settimeout(20)
                if not connection.recv(1, socket.MSG_PEEK):
                    return
                try:
                    tls = self._context.wrap_socket(connection, server_side=True)
                except OSError:
                    self.failed.set()
                    raise
                with tls:
                    self.names.append(tls.getpeercert()["subject"][0][0][1])
                    asked = b""
                    while not asked.endswith(b"{}") and (more := tls.recv(65536)):
                        asked += more
                    tls.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")

    def close(self):
        socket.create_connection(self._listener.getsockname()).close()
        self._thread.join(30)
        self._listener.close()


def test_files_that_have_changed_are_read_again_and_wrong_ones_are_not_used(tmp_path, caplog):
    tlskit = pytest.importorskip("kits.tlskit", exc_type=ImportError)
    ours = tlskit.authority()
    files = tlskit.Files(tmp_path / "member", ours, name="old")
    server = Greeted(tlskit.Files(tmp_path / "server", ours, host="127.0.0.1", addresses=("127.0.0.1",)))
    etcd = etcd_client.EtcdClient(
        EtcdAddress((server.address,), "p/", ca=str(files.ca), cert=str(files.cert), key=str(files.key))
    )

    def call():
        etcd._look_at = 0.0  # the next look is due
        etcd._patience = 20.0
        assert etcd.call("/kv/range", {}, deadline=time.monotonic() + 30.0) == {}

    with contextlib.closing(server), contextlib.closing(etcd):
        pool = etcd._pool
        call()
        files.cert.write_bytes(ours.issue("h", "of another key").certificate)
        call()
        assert server.names == ["old", "old"]
        assert etcd._pool is pool
        assert "are not used" in caplog.text
        files.replace(ours, name="new")
        call()
        assert server.names == ["old", "old", "new"]
        pool = etcd._pool
        call()
        assert etcd._pool is pool


def test_secure_mode_speaks_nothing_older_than_tls_1_3(tmp_path):
    tlskit = pytest.importorskip("kits.tlskit", exc_type=ImportError)
    etcd_store = pytest.importorskip("multiworld._net.stores.etcd_store", exc_type=ImportError)
    ours = tlskit.authority()
    files = tlskit.Files(tmp_path / "member", ours)
    theirs = tlskit.Files(tmp_path / "server", ours, host="127.0.0.1", addresses=("127.0.0.1",))
    server = Greeted(theirs, latest=ssl.TLSVersion.TLSv1_2)
    text = f"etcd://{server.address}/p?ca={files.ca}&cert={files.cert}&key={files.key}"
    with contextlib.closing(server):
        with contextlib.closing(etcd_client.EtcdClient(EtcdAddress.parse(text))) as etcd:
            assert etcd._post(0, "/kv/range", {}, {}, 20.0) == (0, {})
        until = time.monotonic() + 30.0
        with pytest.raises(StoreUnreachableError, match="SSL"):
            etcd_store.open_etcd(text, world="w", secure=True, deadline=until, cancelled=server.failed.is_set)
