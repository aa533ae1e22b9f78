"""Members of a secure world that connect their lanes: TLS between hosts, a check of the user within one."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from kits.doorkit import (
    HOST,
    doors,
    ends,
    hang_up,
    roster_of,
    soon,
)
from kits.meetkit import until
from kits.tlskit import Files, authority

from multiworld._net import peer_user, procfs
from multiworld._net.lane import greeter, wakes
from multiworld._net.lane.endpoint import Endpoint
from multiworld._net.lane.meeting import meet
from multiworld._net.tls.stream import TlsStream
from multiworld.errors import JoinTimeoutError


@pytest.fixture(autouse=True)
def nothing_stays_open():
    wakes.mine()  # of this thread, for good
    before = set(procfs.names("/proc/self/fd"))
    yield
    # Connections on which bytes are on their way are closed a moment later.
    until(lambda: gc.collect() >= 0 and set(procfs.names("/proc/self/fd")) <= before)


@pytest.fixture(scope="module")
def ours():
    return authority("a job")


@pytest.fixture
def of_hosts(tmp_path, ours):
    """Credentials of members on hosts of these names."""

    def make(*hosts):
        return [Files(tmp_path / f"{at}", ours, host=host).credentials for at, host in enumerate(hosts)]

    return make


def together(opened, credentials, within=30.0):
    """Let all members meet; returns what each has met, or its error."""

    def join(rank):
        roster = roster_of([each.address for each in opened], rank)
        try:
            return meet(
                opened[rank],
                roster,
                deadline=time.monotonic() + within,
                check=lambda: None,
                credentials=credentials[rank],
            )
        except JoinTimeoutError as error:
            return error

    with ThreadPoolExecutor(len(opened)) as pool:
        return list(pool.map(join, range(len(opened))))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_over_tcp_all_connections_are_tls(of_hosts, size):
    credentials = of_hosts(*(f"host{rank}" for rank in range(size)))
    with doors(size, places=[f"{rank:08x}" for rank in range(size)]) as opened:
        mets = together(opened, credentials)
    assert {type(each) for met in mets for each in met.connections.values()} == {TlsStream}
    members = [Endpoint(each.connections) for each in mets]
    for rank, each in enumerate(members):
        for peer in set(range(size)) - {rank}:
            each.send(peer, 0, 0, memoryview(bytes([rank])), soon())
    for rank, each in enumerate(members):
        for peer in set(range(size)) - {rank}:
            said = bytearray(1)
            each.receive(peer, 0, 0, memoryview(said), soon())
            assert said[0] == peer
    for each in members:
        each.fail(ConnectionError("the test is over"))


def test_the_greeting_does_not_wait_for_an_acknowledgement(of_hosts, monkeypatch):
    """40 ms in each join, if the kernel holds it back until the last message of TLS's handshake is known there."""
    at_once = []

    def begun(connection, *args, **more):
        at_once.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        return TlsStream(connection, *args, **more)

    monkeypatch.setattr(greeter, "TlsStream", begun)
    with doors(2, places=["00000000", "00000001"]) as opened:
        for met in together(opened, of_hosts("host0", "host1")):
            for each in met.connections.values():
                each.close()
    assert len(at_once) >= 2, "more, where a busy machine is too late for the first connection"
    assert set(at_once) == {1}


def test_on_one_host_unix_sockets_are_of_the_same_user(of_hosts, monkeypatch):
    credentials = of_hosts("host0", "host1")
    with doors(2) as opened:
        mets = together(opened, credentials)
    assert {each.family for met in mets for each in met.connections.values()} == {socket.AF_UNIX}
    hang_up(*mets)
    monkeypatch.setattr(peer_user, "refusal", lambda _: "a process of another user is at the other end")
    with doors(2) as opened:
        mets = together(opened, credentials, within=0.5)
    assert all(isinstance(each, JoinTimeoutError) for each in mets)


def test_a_certificate_of_another_host_is_not_its_members(of_hosts):
    credentials = of_hosts("host0", "elsewhere")
    with doors(2, places=["00000000", "00000001"]) as opened:
        mets = together(opened, credentials, within=1.0)
    assert all(isinstance(each, JoinTimeoutError) for each in mets)


def test_a_member_without_tls_does_not_connect(of_hosts):
    with doors(2, places=["00000000", "00000001"]) as opened:
        mets = together(opened, [*of_hosts("host0"), None], within=1.0)
    assert all(isinstance(each, JoinTimeoutError) for each in mets)


def test_strangers_are_dropped_within_a_second_or_so(of_hosts, tmp_path):
    credentials = of_hosts("host0", "host1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with doors(2, places=["00000000", "00000001"]) as opened, ThreadPoolExecutor(2) as pool:
        # Rank 1 is late, so that rank 0 goes on accepting.
        waiting = pool.submit(
            meet,
            opened[0],
            roster_of([each.address for each in opened], 0),
            deadline=soon(),
            check=lambda: None,
            credentials=credentials[0],
        )
        began = time.monotonic()
        at = HOST, opened[0].address.port
        strangers = []
        while not strangers:  # until it listens
            assert time.monotonic() < began + 10
            with contextlib.suppress(ConnectionRefusedError):
                strangers.append(socket.create_connection(at, timeout=10))
        strangers += [socket.create_connection(at, timeout=10) for _ in range(5)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
        strangers[1].sendall(b"\x16\x03\x01")
        without = strangers.pop()
        with pytest.raises(OSError, match=r"(?i)certificate"), context.wrap_socket(without) as stranger:
            stranger.recv(100)  # the refusal comes after the client's part of the handshake
        assert all(ends(each) for each in strangers)
        assert time.monotonic() - began < 8
        for each in strangers:
            each.close()
        roster = roster_of([each.address for each in opened], 1)
        late = meet(opened[1], roster, deadline=soon(), check=lambda: None, credentials=credentials[1])
        hang_up(late, waiting.result(30))


def test_large_and_small_messages_over_tcp(of_hosts):
    credentials = of_hosts("host0", "host1")
    with doors(2, places=["00000000", "00000001"]) as opened:
        mets = together(opened, credentials)
    one, other = (Endpoint(each.connections) for each in mets)
    size = 24 << 20
    sent, got = os.urandom(size), bytearray(size)
    with ThreadPoolExecutor(2) as pool:
        done = [
            pool.submit(one.send, 1, 0, 0, memoryview(sent), soon()),
            pool.submit(other.receive, 0, 0, 0, memoryview(got), soon()),
        ]
        for each in done:
            each.result(60)
        assert got == sent

        def many(end, peer):
            for turn in range(500):
                end.send(peer, 0, 1, memoryview(turn.to_bytes(4, "big")), soon())
                answer = bytearray(4)
                end.receive(peer, 0, 1, memoryview(answer), soon())
                assert int.from_bytes(answer, "big") == turn

        for each in [pool.submit(many, one, 1), pool.submit(many, other, 0)]:
            each.result(60)
    for each in (one, other):
        each.fail(ConnectionError("the test is over"))
