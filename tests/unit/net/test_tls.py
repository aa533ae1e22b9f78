"""TLS sessions, streams and credentials: real certificates, real sockets."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import ssl
import threading
from typing import TYPE_CHECKING

import pytest
from kits.tlskit import HOST, Files, authority, met

from multiworld._net.tls.credentials import Credentials, current
from multiworld._net.tls.identity import Identity, uri
from multiworld._net.tls.session import RefusedError, Session
from multiworld._net.tls.stream import TlsStream
from multiworld.errors import MultiworldError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from multiworld._net.tls.authority import Authority


@pytest.fixture(scope="module")
def ours() -> Authority:
    return authority("job / 1")


@pytest.fixture
def files(tmp_path: Path, ours: Authority) -> Files:
    return Files(tmp_path / "a", ours)


def meet(dials: Session, accepts: Session) -> None:
    there = dials.seal(b"")
    while there:
        assert accepts.open(there) == b""
        back = accepts.seal(b"")
        assert not back or dials.open(back) == b""
        there = dials.seal(b"")


def test_both_ends_know_each_other_and_what_is_sealed_is_opened(files: Files) -> None:
    dials, accepts = Session(files.credentials, server=False), Session(files.credentials, server=True)
    meet(dials, accepts)
    assert dials.peer == accepts.peer == Identity("job / 1", HOST, "member")
    text = os.urandom(300_000)
    sealed = dials.seal(text)
    assert text[:64] not in sealed
    opened = b"".join(accepts.open(sealed[at : at + 7001]) for at in range(0, len(sealed), 7001))
    assert opened == text


def test_what_is_sealed_before_the_handshake_is_over_follows_it(files: Files) -> None:
    dials, accepts = Session(files.credentials, server=False), Session(files.credentials, server=True)
    hello = dials.seal(b"early")
    assert b"early" not in hello
    accepts.open(hello)
    dials.open(accepts.seal(b""))
    assert accepts.open(dials.seal(b"")) == b"early"


def test_another_authoritys_process_is_refused(tmp_path: Path, files: Files) -> None:
    theirs = Files(tmp_path / "b", authority("job / 1")).credentials
    dials, accepts = Session(theirs, server=False), Session(files.credentials, server=True)
    with pytest.raises(ssl.SSLCertVerificationError):
        meet(dials, accepts)
    assert accepts.peer is None


def test_a_process_of_another_job_is_refused(tmp_path: Path, ours: Authority, files: Files) -> None:
    ours_elsewhere = type(ours)("job 2", ours._certificate, ours._key)
    theirs = Files(tmp_path / "b", ours_elsewhere).credentials
    dials, accepts = Session(files.credentials, server=False), Session(theirs, server=True)
    with pytest.raises(RefusedError, match=r"'job 2'.*'job / 1'"):
        meet(dials, accepts)


def test_a_process_without_a_certificate_is_refused(files: Files) -> None:
    context = ssl.create_default_context(cafile=str(files.ca))
    context.check_hostname = False
    arrived, written = ssl.MemoryBIO(), ssl.MemoryBIO()
    dials = context.wrap_bio(arrived, written)
    accepts = Session(files.credentials, server=True)
    with pytest.raises(ssl.SSLWantReadError):
        dials.do_handshake()
    accepts.open(written.read())
    arrived.write(accepts.seal(b""))
    dials.do_handshake()
    with pytest.raises(ssl.SSLError, match=r"(?i)certificate"):
        accepts.open(written.read())


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 64, b"\x16\x03\x01\xff\xff" + b"x" * 70000]
)
def test_what_is_no_tls_is_refused(files: Files, sent: bytes) -> None:
    accepts = Session(files.credentials, server=True)
    with pytest.raises(OSError):
        accepts.open(sent)


def test_tls_1_2_is_refused(files: Files) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    written = ssl.MemoryBIO()
    dials = context.wrap_bio(ssl.MemoryBIO(), written)
    with pytest.raises(ssl.SSLWantReadError):
        dials.do_handshake()
    with pytest.raises(ssl.SSLError, match=r"(?i)version|protocol"):
        Session(files.credentials, server=True).open(written.read())


# -- files -------------------------------------------------------------------------------------------------------


def test_new_files_are_used_for_new_connections(files: Files, ours: Authority) -> None:
    credentials = files.credentials
    before = credentials.context(server=True)
    files.replace(ours, name="second")
    credentials._look_at = 0.0
    assert credentials.identity.subject == "second"
    assert credentials.context(server=True) is not before


def test_wrong_new_files_are_not_used(files: Files, tmp_path: Path) -> None:
    credentials = files.credentials
    before = credentials.context(server=True)
    files.cert.write_bytes(Files(tmp_path / "b", authority("test")).cert.read_bytes())
    credentials._look_at = 0.0
    assert credentials.context(server=True) is before
    files.cert.unlink()
    credentials._look_at = 0.0
    assert credentials.context(server=True) is before


def test_nobody_waits_while_another_thread_reads_new_files(files: Files, ours: Authority) -> None:
    credentials = files.credentials
    before = credentials.context(server=True)
    files.replace(ours, name="second")
    found: list[ssl.SSLContext] = []
    asks = threading.Thread(target=lambda: found.append(credentials.context(server=True)))
    with credentials._lock:
        credentials._look_at = 0.0
        asks.start()
        asks.join(30)
        assert found == [before]
    assert credentials.identity.subject == "second"


def test_a_child_that_is_forked_while_files_are_read_reads_them_itself(files: Files, ours: Authority) -> None:
    credentials = files.credentials
    files.replace(ours, name="second")
    credentials._look_at = 0.0
    with credentials._lock:
        child = os.fork()
        if not child:
            signal.alarm(30)  # where it waits for its parent's thread
            os._exit(0 if credentials.identity.subject == "second" else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("which", ["cert", "key", "ca"])
def test_files_that_do_not_belong_together_are_an_error(files: Files, tmp_path: Path, which: str) -> None:
    other = Files(tmp_path / "b", authority("test"))
    paths = {name: str(getattr(files, name)) for name in ("cert", "key", "ca")}
    paths[which] = str(getattr(other, which))
    with pytest.raises(MultiworldError, match="M8D_TLS_CERT"):
        Credentials(**paths)


def test_a_missing_file_is_an_error(files: Files) -> None:
    files.key.unlink()
    with pytest.raises(MultiworldError, match="No such file"):
        files.credentials  # noqa: B018  (read)


def test_secure_mode_is_by_the_settings(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    assert current() is None
    for name, value in files.environment.items():
        monkeypatch.setenv(name, value)
    found = current()
    assert found is not None
    assert found is current()
    assert found.identity.job == "job / 1"
    monkeypatch.delenv("M8D_TLS_CA")
    with pytest.raises(MultiworldError, match="All three are set, or none"):
        current()


def test_names_in_certificates_are_read_as_they_were_given() -> None:
    named = {"subjectAltName": (("DNS", "x"), ("URI", uri("a/b?c", "h:1")))}
    assert Identity.of(named) == Identity("a/b?c", "h:1")
    assert Identity.of({"subjectAltName": (("URI", "spiffe://a/b"),)}) == Identity()
    assert Identity.of({"subjectAltName": (("URI", "m8d://[odd/h"),)}) == Identity("[odd", "h")
    assert Identity("j", "h").is_on("h")
    assert not Identity("j", "h").is_on("g")
    assert Identity("j").is_on("g")


# -- streams -----------------------------------------------------------------------------------------------------


@pytest.fixture
def streams(files: Files) -> Iterator[tuple[TlsStream, TlsStream]]:
    left, right = socket.socketpair()
    for each in (left, right):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    ends = met(left, right, files.credentials)
    yield ends
    for end in ends:
        end.close()


def read(stream: TlsStream, size: int, sizes: tuple[int, ...] = (65536,)) -> bytes:
    got, poll = bytearray(), select.poll()
    poll.register(stream.fileno(), select.POLLIN)
    turn = 0
    while len(got) < size:
        buffer = bytearray(sizes[turn % len(sizes)])
        turn += 1
        try:
            count = stream.recv_into(buffer)
        except BlockingIOError:
            assert poll.poll(10_000)
            continue
        if not count:
            break
        got += buffer[:count]
    return bytes(got)


@pytest.mark.parametrize("sizes", [(1,), (40, 5), (65536,), (16384, 7), (100_000, 3, 70_000)])
def test_a_stream_carries_what_is_written_though_records_are_written_in_parts(
    streams: tuple[TlsStream, TlsStream], sizes: tuple[int, ...]
) -> None:
    left, right = streams
    text = os.urandom(20_000 if sizes == (1,) else 3_000_000)

    def write() -> None:
        at, turn = 0, 0
        poll = select.poll()
        poll.register(left.fileno(), select.POLLOUT)
        while at < len(text):
            first = sizes[turn % len(sizes)]
            turn += 1
            parts = [memoryview(text)[at : at + first], memoryview(text)[at + first : at + first + sizes[-1]]]
            try:
                at += left.sendmsg(parts)
            except BlockingIOError:
                poll.poll(10_000)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert read(right, len(text), (65536, 33)) == text
    finally:
        writer.join(10)
    assert not writer.is_alive()


def test_a_write_that_stays_in_part_is_told_but_for_one_byte(streams: tuple[TlsStream, TlsStream]) -> None:
    left, right = streams
    text = os.urandom(16384) * 200
    sent = left.send(text)
    assert sent % 16384 == 16383
    with pytest.raises(BlockingIOError):
        left.send(text[sent:])
    assert read(right, sent // 16384 * 16384) == text[: sent // 16384 * 16384]
    rest = 0
    while not rest:
        with pytest.raises(BlockingIOError):  # the record in part, which makes room for its rest
            right.recv_into(bytearray(1))
        assert select.select([], [left.fileno()], [], 10)[1]
        with contextlib.suppress(BlockingIOError):
            rest = left.send(text[sent : sent + 1])
    sent += rest
    assert sent % 16384 == 0
    assert read(right, 16384) == text[sent - 16384 : sent]


def test_a_full_buffer_may_leave_bytes_pending_and_one_that_is_not_full_none(
    streams: tuple[TlsStream, TlsStream],
) -> None:
    left, right = streams
    left.send(b"x" * 1000)
    select.select([right.fileno()], [], [], 10)
    assert right.recv_into(bytearray(400)) == 400
    assert right.pending == 600
    assert right.recv_into(bytearray(700)) == 600
    assert right.pending == 0
    with pytest.raises(BlockingIOError):
        right.recv_into(bytearray(1))


def test_the_records_of_a_long_message_are_read_at_once(files: Files) -> None:
    left, right = met(*socket.socketpair(), files.credentials)
    assert left.send(b"a" * 40_000) == 40_000
    select.select([right.fileno()], [], [], 10)
    got = bytearray(50_000)
    assert right.recv_into(got) == 40_000
    assert got[:40_000] == b"a" * 40_000
    assert left.send(b"b" * 40_000) == 40_000
    assert right.recv_into(got, 20_000) == 20_000
    assert right.pending == 12_768, "of the second record"
    assert right.recv_into(got) == 12_768
    for each in (left, right):
        each.close()


def test_an_error_behind_a_long_message_is_raised_after_it(files: Files) -> None:
    ends = socket.socketpair()
    behind = ends[0].dup()
    left, right = met(*ends, files.credentials)
    assert left.send(b"a" * 32_768) == 32_768
    behind.send(b"no record of TLS")
    select.select([right.fileno()], [], [], 10)
    assert right.recv_into(bytearray(50_000)) == 32_768
    for _ in range(2):
        with pytest.raises(ssl.SSLError):
            right.recv_into(bytearray(1))
    for each in (left, right, behind):
        each.close()


def test_the_end_is_read_after_what_was_written(streams: tuple[TlsStream, TlsStream]) -> None:
    left, right = streams
    right.send(b"to the left")
    left.send(b"to the right")
    left.shutdown(socket.SHUT_WR)
    assert read(right, 100) == b"to the right"
    assert read(left, 11) == b"to the left"
    right.close()
    right.close()
    assert left.recv_into(bytearray(1)) == 0


def test_a_stranger_ends_the_handshake_with_an_error(files: Files) -> None:
    left, right = socket.socketpair()
    right.setblocking(False)
    stream = TlsStream(right, files.credentials, server=True)
    with pytest.raises(BlockingIOError):
        stream.shake_hands()
    left.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ssl.SSLError):
        stream.shake_hands()
    left.close()
    stream.close()


def test_a_dialed_stream_waits_until_it_is_connected(files: Files) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialing = socket.socket()
        dialing.setblocking(False)
        dialing.connect_ex(listener.getsockname())
        stream = TlsStream(dialing, files.credentials, server=False)
        poll = select.poll()
        poll.register(stream.fileno(), stream.events)
        assert poll.poll(10_000)
        with pytest.raises(BlockingIOError):
            stream.shake_hands()
        assert stream.events == select.POLLIN
        accepted, _ = listener.accept()
        assert accepted.recv(1) == b"\x16"
        accepted.close()
        stream.close()


def test_a_refused_dial_is_told(files: Files) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    dialing = socket.socket()
    dialing.setblocking(False)
    dialing.connect_ex(address)
    stream = TlsStream(dialing, files.credentials, server=False)
    poll = select.poll()
    poll.register(stream.fileno(), stream.events)
    assert poll.poll(10_000)
    with pytest.raises(ConnectionRefusedError):
        stream.shake_hands()
    stream.close()
