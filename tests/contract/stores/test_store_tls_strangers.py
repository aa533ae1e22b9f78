"""The store's server in secure mode, and those who are no members: none comes in, none keeps a member out."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from kits.meetkit import until
from kits.tlskit import Files, authority

from multiworld._net.stores import tls_server
from multiworld._net.stores.tcp_client import NotAStoreError, TcpClient
from multiworld._net.stores.tls_server import TlsStoreServer

PATIENCE = 30.0
HELLO = struct.pack("=BI", 0, 0x3C85F7CE)


def soon(seconds=PATIENCE):
    return time.monotonic() + seconds


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(scope="module")
def ours():
    return authority("job")


@pytest.fixture(scope="module")
def files(tmp_path_factory, ours):
    return Files(tmp_path_factory.mktemp("tls"), ours)


@pytest.fixture
def server(files):
    served = TlsStoreServer(socket.AF_INET, ("127.0.0.1", 0), credentials=files.credentials)
    before = threading.active_count()
    yield served
    served.close()
    assert threading.active_count() < before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", served.port), timeout=1)


def member(server, files, seconds=PATIENCE):
    address = ("127.0.0.1", server.port)
    return TcpClient.connect_as(files.credentials, socket.AF_INET, address, deadline=soon(seconds))


def dialed(server, sent=b""):
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    sock.sendall(sent)
    return sock


def read_to_the_end(sock):
    got = bytearray()
    with contextlib.suppress(ConnectionError):
        while chunk := sock.recv(4096):
            got += chunk
    return bytes(got)


def context_of(files=None):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if files is not None:
        context.load_cert_chain(files.cert, files.key)
    return context


def asks(server, context):
    """What a client with that context gets for a query of the key "/secret"; it checks nothing itself."""
    with dialed(server) as sock, context.wrap_socket(sock) as tls:
        key = b"/secret"
        query = b"\x05" + struct.pack("=QQ", 1, len(key)) + key
        try:
            tls.sendall(HELLO + query)
            return tls.recv(100)
        except (ssl.SSLError, ConnectionError) as error:
            return error


def test_a_member_is_answered(server, files):
    client = member(server, files)
    client.set("secret", b"1", deadline=soon())
    assert asks(server, context_of(files)) == b"\0"
    client.close()


def test_one_without_a_certificate_is_refused(server):
    assert "CERTIFICATE_REQUIRED" in str(asks(server, context_of()))


def test_one_of_another_authority_is_refused(server, files, tmp_path):
    theirs = Files(tmp_path, authority("job"))
    assert "UNKNOWN_CA" in str(asks(server, context_of(theirs)))
    with pytest.raises(NotAStoreError, match="the certificate of the store there is refused") as caught:
        member(server, theirs)
    assert "M8D_TLS_CA" in caught.value.next_step


def test_one_of_another_job_is_refused(server, ours, tmp_path):
    theirs = Files(tmp_path, type(ours)("job 2", ours._certificate, ours._key))
    answer = asks(server, context_of(theirs))
    assert answer == b"" or isinstance(answer, ConnectionError)
    with pytest.raises(NotAStoreError, match=r"'job'.*'job 2'"):
        member(server, theirs)


def test_a_refused_member_is_told_why(server, files, tmp_path):
    """It trusts the server, which does not trust it."""
    theirs = Files(tmp_path, authority("job"))
    theirs.ca.write_bytes(files.ca.read_bytes() + theirs.ca.read_bytes())
    with pytest.raises(NotAStoreError, match=r"refuses this process's certificate.*UNKNOWN_CA") as caught:
        member(server, theirs)
    assert "M8D_TLS_CERT" in caught.value.next_step


def test_tls_1_2_is_refused(server, files):
    context = context_of(files)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with dialed(server) as sock, pytest.raises(ssl.SSLError, match=r"(?i)version"):
        context.wrap_socket(sock)


@pytest.mark.parametrize(
    "sent",
    [HELLO, b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, os.urandom(100), b"\x16\x03\x01\xff\xff" + b"x" * 70000],
)
def test_garbage_is_hung_up_on(server, files, sent):
    with dialed(server, sent) as sock:
        assert len(read_to_the_end(sock)) <= 7  # an alert, or nothing
    member(server, files).close()


def test_a_client_without_tls_is_told_that_tls_is_spoken_here(server):
    with pytest.raises(NotAStoreError, match="speaks TLS, and this process is not in secure mode") as caught:
        TcpClient.connect_as(None, socket.AF_INET, ("127.0.0.1", server.port), deadline=soon())
    assert "M8D_TLS_CERT" in caught.value.next_step


def test_a_malformed_query_ends_only_that_members_connection(server, files):
    client, other = member(server, files), member(server, files)
    client._sock.sendall(b"\xff")
    with pytest.raises(ConnectionError):
        client.get("a", deadline=soon())
    assert other.add("n", 1, deadline=soon()) == 1
    client.close()
    other.close()


# -- many -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01"])
def test_many_idle_connections_keep_no_member_out_and_give_their_descriptors_back(server, files, sent):
    steady = member(server, files)
    before = descriptors()
    idle = [dialed(server, sent) for _ in range(400)]
    assert steady.add("n", 1, deadline=soon()) == 1
    fresh = member(server, files)
    assert fresh.add("n", 1, deadline=soon()) == 2
    fresh.close()
    assert descriptors() - before <= 400 + tls_server._STRANGERS + 2
    until(lambda: descriptors() <= before + 400)
    assert steady.add("n", 1, deadline=soon()) == 3
    for each in idle:
        each.close()
    steady.close()


def test_few_strangers_are_kept_at_a_time(server, files, monkeypatch):
    """What comes beyond makes the oldest go, long before its second is over."""
    monkeypatch.setattr(tls_server, "_PATIENCE", 600.0)
    before = descriptors()
    strangers = [dialed(server, b"\x16") for _ in range(tls_server._STRANGERS + 40)]
    assert all(read_to_the_end(each) == b"" for each in strangers[:40])
    client = member(server, files)
    client.close()
    for each in strangers:
        each.close()
    until(lambda: descriptors() <= before)


def test_a_flood_keeps_no_member_out(server, files, monkeypatch):
    monkeypatch.setattr(tls_server, "_PATIENCE", 600.0)  # for members: this process may stand still
    steady, over = member(server, files), threading.Event()

    def flood():
        while not over.is_set():
            with contextlib.suppress(OSError):
                dialed(server, b"\x16\x03\x01").close()

    floods = [threading.Thread(target=flood) for _ in range(3)]
    for each in floods:
        each.start()
    try:
        for number in range(10):
            fresh = member(server, files)
            assert fresh.add("n", 1, deadline=soon()) == 2 * number + 1
            assert steady.add("n", 1, deadline=soon()) == 2 * number + 2
            fresh.close()
    finally:
        over.set()
        for each in floods:
            each.join(PATIENCE)
    steady.close()


def test_without_descriptors_a_stranger_makes_room(files, tmp_path):
    """In a process that may have few: members come in while strangers hold what is left."""
    program = """
import resource, socket, sys, time
from multiworld._net.stores import tls_server
from multiworld._net.stores.tls_server import TlsStoreServer
from multiworld._net.tls.credentials import Credentials
import os
tls_server._PATIENCE = 600.0
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
served = TlsStoreServer(socket.AF_INET, ("127.0.0.1", 0), credentials=Credentials(*sys.argv[1:]))
used = max(map(int, os.listdir("/proc/self/fd")))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 12, used + 12))
print(served.port, flush=True)
sys.stdin.read()
served.close()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, (files.cert, files.key, files.ca))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip
    try:
        port = int(process.stdout.readline())
        strangers = []
        for _ in range(40):
            sock = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
            sock.sendall(b"\x16")
            strangers.append(sock)
        client = TcpClient.connect_as(files.credentials, socket.AF_INET, ("127.0.0.1", port), deadline=soon())
        assert client.add("n", 1, deadline=soon()) == 1
        client.close()
        for each in strangers:
            each.close()
        process.stdin.close()
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait(PATIENCE)
        process.stdout.close()
