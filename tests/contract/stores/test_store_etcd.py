"""Stores in a real etcd cluster of three on this host: what torch's stores do, worlds, a leader that is killed."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import shutil
import subprocess
import threading
import time
import urllib.request

import pytest
import torch.distributed as dist
from kits.contract.elastickit import joins, member, together
from kits.contract.worldkit import enter_netns
from kits.netkit import Network

import multiworld as mw
from multiworld._net.stores import etcd_client
from multiworld._net.stores.etcd_address import EtcdAddress
from multiworld._net.stores.etcd_client import EtcdClient
from multiworld._net.stores.etcd_store import _SharedEtcd
from multiworld._net.stores.store import open_store
from multiworld.errors import InvalidJoinError, StoreUnreachableError

PATIENCE = 60.0


class Cluster:
    """Three members of etcd, each at an address of loopback at which no other program binds a port.

    `network`: they are on its first three hosts.
    """

    def __init__(self, folder, network=None):
        if shutil.which("etcd") is None:
            pytest.skip("there is no etcd server here (Debian: etcd-server)")
        pytest.importorskip("urllib3")
        pid = os.getpid()
        self.folder = folder
        self.network = network
        self.hosts = [f"127.{78 + at}.{(pid >> 8) & 255}.{pid & 255 or 1}" for at in range(3)]
        if network is not None:
            self.hosts = [network.address(at + 1) for at in range(3)]
        self.members = {}
        self.address = f"etcd://{','.join(f'{host}:2379' for host in self.hosts)}/worlds"

    def start(self, at):
        peers = ",".join(f"m{each}=http://{host}:2380" for each, host in enumerate(self.hosts))
        client, peer = (f"http://{self.hosts[at]}:{port}" for port in (2379, 2380))
        within = [] if self.network is None else ["ip", "netns", "exec", self.network.hosts[at]]
        with (self.folder / f"etcd{at}.log").open("ab") as log:
            self.members[at] = subprocess.Popen(
                [
                    *within, "etcd", "--name", f"m{at}", "--data-dir", str(self.folder / f"data{at}"),
                    "--listen-client-urls", client, "--advertise-client-urls", client,
                    "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                    "--initial-cluster", peers, "--unsafe-no-fsync",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def leader(self):
        """The number of the leader; None while there is none."""
        for at, process in self.members.items():
            if process.poll() is None and (said := self._status(at)):
                header, leader = said["header"]["member_id"], said.get("leader", "0")
                if header == leader:
                    return at
        return None

    def led(self):
        """Wait for a leader, which may change on a busy machine; return its number."""
        deadline = time.monotonic() + PATIENCE
        while (leader := self.leader()) is None:
            assert time.monotonic() < deadline, (self.folder / "etcd0.log").read_text()[-2000:]
            time.sleep(0.1)
        return leader

    def _status(self, at):
        """What a member says of itself; asked on its host, so in a thread that goes there."""
        said = []

        def ask():
            if self.network is not None:
                enter_netns(self.network.hosts[at])
            said.append(self._ask(at))

        asking = threading.Thread(target=ask)
        asking.start()
        asking.join(PATIENCE)
        return said[0] if said else None

    def _ask(self, at):
        asked = urllib.request.Request(
            f"http://{self.hosts[at]}:2379/v3/maintenance/status", data=b"{}", method="POST"
        )
        try:
            with urllib.request.urlopen(asked, timeout=5) as answer:  # noqa: S310  (http)
                return json.load(answer)
        except (OSError, ValueError):
            return None

    def __enter__(self):
        for at in range(3):
            self.start(at)
        self.led()
        return self

    def __exit__(self, *_):
        for process in self.members.values():
            process.kill()
            process.wait(30)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("etcd")) as made:
        yield made


def soon():
    return time.monotonic() + PATIENCE


def test_every_call_of_a_store(cluster):
    handle = open_store(cluster.address, world="w", serve=True, deadline=soon())
    store = handle.store
    assert not handle.serves
    assert handle.keeps_deadlines
    assert handle.local_host == "127.0.0.1"
    store.set("a", "text")
    store.set("b", b"\0\xff")
    assert (store.get("a"), store.get("b")) == (b"text", b"\0\xff")
    assert store.check(["a", "b"])
    assert not store.check(["a", "c"])
    assert (store.add("n", 5), store.add("n", -7), store.get("n")) == (5, -2, b"-2")
    assert store.compare_set("new", "", "1") == b"1"
    assert store.compare_set("new", "", "3") == b"1"
    assert store.compare_set("new", "0", "2") == b"1"
    assert store.compare_set("new", "1", "2") == b"2"
    assert store.compare_set("none", "0", "2") == b"0", "a missing key is left alone"
    assert not store.check(["none"])
    assert store.num_keys() >= 4
    assert store.delete_key("new")
    assert not store.delete_key("new")
    assert store.check([f"k{at}" for at in range(250)]) is False
    with pytest.raises(dist.DistStoreError, match="later"):
        store.wait(["later"], dt.timedelta(seconds=0.2))
    setter = threading.Timer(0.1, lambda: store.set("later", "x"))
    setter.start()
    assert store.get("later") == b"x"
    setter.join()
    under = dist.PrefixStore("p", handle.fresh())
    under.set("k", "v")
    assert store.get("p/k") == b"v"
    other = open_store(cluster.address + "2", world="w", serve=True, deadline=soon())
    assert not other.store.check(["a"]), "another prefix"
    other.close()
    handle.close()


def test_threads_do_not_lose_counts(cluster):
    handle = open_store(cluster.address, world="w", serve=False, deadline=soon())
    workers = [
        threading.Thread(target=lambda: [handle.store.add("sum", 1) for _ in range(20)]) for _ in range(4)
    ]
    for each in workers:
        each.start()
    for each in workers:
        each.join(PATIENCE)
    assert handle.store.get("sum") == b"80"
    handle.close()


def test_worlds_shrink_and_nothing_is_left_of_a_process(cast, cluster):
    members = [cast.start(member, number, size="1:3", store=cluster.address) for number in range(3)]
    assert together(members) == 1
    members.pop(0).kill()
    assert together(members) == 2


def test_the_record_of_a_world_stays_when_its_run_is_over(cluster, monkeypatch):
    monkeypatch.setenv("M8D_RUN_ID", "job7")
    mw.join("w1", 0, 1, store=cluster.address, timeout=PATIENCE).close()
    handle = open_store(cluster.address, world="w", serve=False, deadline=soon())
    assert handle.store.check(["m8d/job7@w1/record"])
    handle.close()


def test_the_leader_is_killed_under_joins(cast, cluster):
    actors = [cast.start(joins, rank, store=cluster.address, size=2, worlds=12) for rank in range(2)]
    actors[0].expect("joined")
    leader = cluster.led()
    cluster.members[leader].kill()
    cluster.members[leader].wait(30)
    for each in actors:
        assert each.expect("all").failed == []
    cluster.start(leader)


@pytest.mark.parametrize("leads", [True, False])
def test_a_member_is_cut_off_under_joins(cast, tmp_path, leads):
    """Its host is silent: what is asked there is not refused, and not answered."""
    with Network(4) as network, Cluster(tmp_path, network) as cluster:
        actors = [
            cast.start(joins, rank, store=cluster.address, size=2, worlds=12, netns=network.hosts[3])
            for rank in range(2)
        ]
        actors[0].expect("joined")
        leader = cluster.led()
        network.pull((leader if leads else (leader + 1) % 3) + 1)
        for each in actors:
            assert each.expect("all").failed == []


def certificate(folder, host):
    """Make a certificate of a host, signed by itself; returns it and its key."""
    folder.mkdir(exist_ok=True)
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=etcd",
            "-addext", f"subjectAltName=IP:{host}", "-keyout", str(key), "-out", str(cert),
        ],
        check=True, capture_output=True, timeout=PATIENCE,
    )  # fmt: skip
    return cert, key


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """One member that wants TLS and a login; its certificate, and its address without a login."""
    if shutil.which("etcd") is None:
        pytest.skip("there is no etcd server here (Debian: etcd-server)")
    if shutil.which("openssl") is None:
        pytest.skip("there is no etcd server here that has a certificate: no openssl")
    folder, pid = tmp_path_factory.mktemp("guarded"), os.getpid()
    host = f"127.81.{(pid >> 8) & 255}.{pid & 255 or 1}"
    cert, key = certificate(folder, host)
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [
                "etcd", "--data-dir", str(folder / "data"), "--cert-file", str(cert), "--key-file", str(key),
                "--listen-client-urls", f"https://{host}:2379", "--advertise-client-urls", f"https://{host}:2379",
                "--listen-peer-urls", f"http://{host}:2380", "--initial-advertise-peer-urls", f"http://{host}:2380",
                "--initial-cluster", f"default=http://{host}:2380",
            ],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        etcd = EtcdClient(EtcdAddress.parse(f"etcd://{host}:2379/x?ca={cert}"))
        for path, body in (
            ("/auth/user/add", {"name": "root", "password": "s3cret:/@"}),
            ("/auth/user/grant", {"user": "root", "role": "root"}),
            ("/auth/enable", {}),
        ):
            with contextlib.suppress(ConnectionError):  # it was done, and the answer was late
                etcd.call(path, body, deadline=soon())
        etcd.close()
        yield cert, f"{host}:2379/worlds?ca={cert}"
    finally:
        process.kill()
        process.wait(30)


def test_a_login_over_tls(guarded):
    _, where = guarded
    handle = open_store(f"etcd://root:s3cret%3A%2F%40@{where}", world="w", serve=False, deadline=soon())
    handle.store.set("a", "b")
    assert handle.store.get("a") == b"b"
    assert handle.store.add("n", 2) == 2
    handle.close()


@pytest.mark.parametrize("login", ["", "root:wrong@"])
def test_who_does_not_log_in_is_refused_at_once(guarded, login):
    _, where = guarded
    began = time.monotonic()
    with pytest.raises(StoreUnreachableError, match="refuses") as caught:
        open_store(f"etcd://{login}{where}", world="w", serve=False, deadline=soon())
    assert time.monotonic() - began < PATIENCE / 2
    assert "wrong" not in str(caught.value)


def test_a_stranger_is_not_trusted(guarded, tmp_path, monkeypatch):
    """With another certificate it is no member of the cluster: the password is not sent."""
    monkeypatch.setattr(etcd_client, "_SHORTEST", PATIENCE)  # no attempt is given up while etcd stands still
    cert, where = guarded
    other, _ = certificate(tmp_path, where.partition(":")[0])
    with pytest.raises(StoreUnreachableError, match="CERTIFICATE_VERIFY_FAILED"):
        open_store(
            f"etcd://root:x@{where.replace(str(cert), str(other))}",
            world="w",
            serve=False,
            deadline=time.monotonic() + 3.0,
        )
    with pytest.raises(InvalidJoinError, match="PEM"):
        open_store(f"etcd://root:x@{where}{tmp_path}/none", world="w", serve=False, deadline=soon())


def test_nobody_answers():
    began = time.monotonic()
    with pytest.raises(StoreUnreachableError, match=r"etcd://127\.0\.0\.1:9,127\.0\.0\.1:10/x"):
        open_store(
            "etcd://user:secret@127.0.0.1:9,127.0.0.1:10/x",
            world="w",
            serve=False,
            deadline=time.monotonic() + 0.5,
        )
    assert time.monotonic() - began < PATIENCE / 2


def test_what_torch_waits_for_has_as_long_as_at_other_stores():
    """NCCL waits so for rank 0's id, which makes it once it has a communicator."""
    pytest.importorskip("urllib3")
    shared = _SharedEtcd("", EtcdClient(EtcdAddress.parse("etcd://127.0.0.1:9/x")))
    assert shared.fresh().timeout >= dt.timedelta(seconds=30)
    shared.close()


def test_addresses():
    parsed = EtcdAddress.parse("etcd://me:a%40b@h1:2379,[::1]:2379/a/b?ca=/c.pem&cert=/d.pem&key=/e.pem")
    assert parsed.endpoints == ("h1:2379", "[::1]:2379")
    assert (parsed.prefix, parsed.user, parsed.password) == ("a/b/", "me", "a@b")
    assert (parsed.ca, parsed.cert, parsed.key, parsed.secure) == ("/c.pem", "/d.pem", "/e.pem", True)
    assert "a@b" not in f"{parsed} {parsed!r}"


@pytest.mark.parametrize(
    "text",
    [
        "etcd://h:1", "etcd://h:1/", "etcd://h/x", "etcd://h:0/x", "etcd://,h:1/x", "etcd://u@h:1/x",
        "etcd://h:1/x?tls=1", "etcd://h:1/x?cert=/a", "etcd://h:1/x?ca=", "etcd://h:1/x?ca",
        "etcd://h:1/x?ca=/a&cert=&key=", "etcd://h:1/x?ca=/a&ca=",
    ],
)  # fmt: skip
def test_bad_addresses(text):
    with pytest.raises(InvalidJoinError) as caught:
        EtcdAddress.parse(text)
    assert caught.value.rule
    assert caught.value.next_step


def test_a_password_is_not_shown():
    with pytest.raises(InvalidJoinError) as caught:
        EtcdAddress.parse("etcd://user:secret@h/x")
    assert "secret" not in str(caught.value)
