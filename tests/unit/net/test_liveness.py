"""The watchdog's sockets, against whatever connects to them."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import time
from types import SimpleNamespace

import pytest
from kits.tlskit import Files, authority

from multiworld._core.liveness.detector import ConnectionEnd, Probe
from multiworld._core.liveness.wire import Beat, Close, Hello, encode
from multiworld._core.membership.roster import Endpoint
from multiworld._net.liveness import sockets as module
from multiworld._net.liveness import tcpinfo
from multiworld._net.liveness.executor import feed
from multiworld._net.liveness.sockets import Accepted, Closed, Connected, Received, Sockets
from multiworld._net.tls.session import Session
from multiworld.errors import MultiworldError

PATIENCE = 30.0  # seconds; nothing here takes that long when all is well, on a machine that runs


class Clock:
    """A clock in the test's hand, for what the sockets do after some time."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def sockets(request):
    clock = request.getfixturevalue("clock") if "clock" in request.fixturenames else time.monotonic
    found = Sockets(itertools.count(1).__next__, clock)
    yield found
    found.shut_down()


def until(sockets, kind):
    """Wait for an event of a kind; what came with it is given too."""
    deadline, events = time.monotonic() + PATIENCE, []
    while True:
        events += sockets.wait(0.1)
        for event in events:
            if isinstance(event, kind):
                return event, events
        assert time.monotonic() < deadline, f"no {kind} among {events}"


def gather(sockets, *wanted):
    """Wait until these events have come; returns all that came, at once afterwards too."""
    deadline, events = time.monotonic() + PATIENCE, []
    while not all(each in events for each in wanted):
        assert time.monotonic() < deadline, f"not all of {wanted} among {events}"
        events += sockets.wait(0.1)
    return events + sockets.wait(0.01)


def test_a_dial_without_a_descriptor_is_a_connection_that_never_was(sockets, monkeypatch):
    endpoint = sockets.listeners.listen("127.0.0.1")

    def none_left(*_args, **_kwargs):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("multiworld._net.liveness.sockets.socket.socket", none_left)
        sockets.dial(7, endpoint)
    assert sockets.wait(PATIENCE) == [Closed(7, ConnectionEnd.DEAD, refused=False)]
    sockets.dial(8, endpoint)
    until(sockets, Connected)


def test_an_address_that_no_member_has_is_a_connection_that_never_was(sockets):
    sockets.dial(7, Endpoint("127.0.0.1", 2**63))
    assert sockets.wait(PATIENCE) == [Closed(7, ConnectionEnd.DEAD, refused=False)]


def client(endpoint):
    return socket.create_connection((endpoint.host, endpoint.port), timeout=PATIENCE)


def connected(sockets):
    endpoint = sockets.listeners.listen("127.0.0.1")
    sockets.dial(1000, endpoint)
    events = []
    while not {Accepted, Connected} <= {type(event) for event in events}:
        events += sockets.wait(1.0)
    return 1000, next(event.channel for event in events if isinstance(event, Accepted))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_frames_go_both_ways(sockets, host):
    try:
        endpoint = sockets.listeners.listen(host)
    except MultiworldError:
        pytest.skip(f"{host} is not there")
    assert endpoint.port > 0
    sockets.dial(1000, endpoint)
    events = []
    while len(events) < 2:
        events += sockets.wait(1.0)
    far = next(event.channel for event in events if isinstance(event, Accepted))
    sockets.send(1000, Beat(1))
    sockets.send(far, Beat(2))
    gather(sockets, Received(far, [Beat(1)], None), Received(1000, [Beat(2)], None))
    deadline = time.monotonic() + PATIENCE
    while (probe := sockets.probe(1000)) is None or probe.unacknowledged:
        assert time.monotonic() < deadline, probe
        time.sleep(0.01)  # the kernel may wait a moment with its acknowledgement
    assert isinstance(probe, Probe)
    assert probe.last_ack < PATIENCE


def test_one_listener_per_address_until_the_last_hold(sockets):
    first, second = sockets.listeners.listen("127.0.0.1"), sockets.listeners.listen("127.0.0.1")
    assert first == second
    assert sockets.listeners.hold(first)
    assert not sockets.listeners.hold(Endpoint("127.0.0.1", 1))
    assert not sockets.listeners.hold(Endpoint("127.0.0.9", first.port))
    sockets.listeners.unlisten(Endpoint("127.0.0.1", 1))
    for held in (True, True, False):
        assert len(sockets.listeners) == 1
        sockets.listeners.unlisten(first)
        assert len(sockets.listeners) == held
    sockets.listeners.unlisten(first)
    with pytest.raises(ConnectionRefusedError):
        client(first)
    assert sockets.listeners.listen("127.0.0.1").port > 0
    sockets.listeners.unlisten_all()
    assert len(sockets.listeners) == 0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "localhost", "", "203.0.113.7"])  # noqa: S104  (refused)
def test_an_address_that_is_not_one_of_this_host_is_refused(sockets, host):
    with pytest.raises(MultiworldError) as caught:
        sockets.listeners.listen(host)
    assert host in str(caught.value)
    assert len(sockets.listeners) == 0


def test_a_peer_that_goes_is_lost_with_its_last_words_first(sockets):
    endpoint = sockets.listeners.listen("127.0.0.1")
    peer = client(endpoint)
    accepted, _ = until(sockets, Accepted)
    peer.sendall(encode(Beat(7)))
    peer.close()
    closed, events = until(sockets, Closed)
    assert closed == Closed(accepted.channel, ConnectionEnd.LOST, refused=False)
    assert events.index(Received(accepted.channel, [Beat(7)], None)) < events.index(closed)
    assert sockets.open == 0


def test_a_reset_is_lost_too(sockets):
    endpoint = sockets.listeners.listen("127.0.0.1")
    peer = client(endpoint)
    until(sockets, Accepted)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    peer.close()
    assert until(sockets, Closed)[0].ending is ConnectionEnd.LOST


def test_bytes_that_are_no_frame_are_reported_with_the_frames_before_them(sockets):
    endpoint = sockets.listeners.listen("127.0.0.1")
    with client(endpoint) as peer:
        peer.sendall(encode(Beat(1)) + b"\x16\x03\x01\x02\x00\x01\x00")
        received, _ = until(sockets, Received)
        assert received.frames == [Beat(1)]
        assert "begins with" in received.error


def test_a_frame_that_comes_byte_by_byte(sockets):
    endpoint = sockets.listeners.listen("127.0.0.1")
    data = encode(Hello("1" * 32, "2" * 32, b"n" * 16))
    with client(endpoint) as peer:
        events = []
        for byte in data:
            peer.sendall(bytes([byte]))
            events += sockets.wait(0.01)
        hello = Hello("1" * 32, "2" * 32, b"n" * 16)
        while not [each for each in events if isinstance(each, Received)]:
            events += sockets.wait(0.1)
        assert [each.frames for each in events if isinstance(each, Received)] == [[hello]]


def test_nobody_listens(sockets):
    endpoint = sockets.listeners.listen("127.0.0.1")
    sockets.listeners.unlisten(endpoint)
    sockets.dial(5, endpoint)
    assert until(sockets, Closed)[0] == Closed(5, ConnectionEnd.DEAD, refused=True)


@pytest.mark.parametrize("host", ["not-an-address", "255.255.255.255"])
def test_an_address_that_cannot_be_dialed_is_closed_like_any_other(sockets, host):
    sockets.dial(5, Endpoint(host, 4))
    assert until(sockets, Closed)[0] == Closed(5, ConnectionEnd.DEAD, refused=False)
    assert sockets.open == 0


def test_a_connection_to_oneself_counts_as_refused(sockets, monkeypatch):
    """Dialing a free local port can meet the very port that the kernel chose for the dialer."""
    near, _ = connected(sockets)
    entry = sockets._channels[near]

    class Mirror:
        def __getattr__(self, name):
            return getattr(entry_socket, name)

        def getpeername(self):
            return entry_socket.getsockname()

        def getsockopt(self, *_):
            return 0

    entry_socket, entry.socket, entry.connecting = entry.socket, Mirror(), True
    events: list = []
    sockets._finish_connect(entry, events)
    assert events == [Closed(near, ConnectionEnd.DEAD, refused=True)]


def test_a_peer_that_is_gone_as_soon_as_it_was_reached_is_told_by_the_next_read(sockets):
    """It resets the connection between the question for an error and the question for its address."""
    near, far = connected(sockets)
    entry = sockets._channels[near]

    class Gone:
        def __getattr__(self, name):
            return getattr(entry_socket, name)

        def getpeername(self):
            raise OSError(errno.ENOTCONN, "not connected")

        def getsockopt(self, *_):
            return 0

    entry_socket, entry.socket, entry.connecting = entry.socket, Gone(), True
    events: list = []
    sockets._finish_connect(entry, events)
    entry.socket = entry_socket
    assert events == [Connected(near)]
    sockets.close(far, orderly=False)
    assert until(sockets, Closed)[0].channel == near


def test_an_orderly_close_delivers_and_waits_for_the_other_end(sockets):
    near, far = connected(sockets)
    sockets.send(near, Beat(9))
    sockets.close(near, orderly=True)
    assert sockets.closing == 1
    sockets.send(near, Beat(10))
    found = gather(sockets, Received(far, [Beat(9)], None), Closed(far, ConnectionEnd.LOST, refused=False))
    deadline = time.monotonic() + PATIENCE
    while sockets.open:
        assert time.monotonic() < deadline
        found += sockets.wait(0.1)
    assert [event for event in found if event.channel == near] == []
    assert sockets.closing == 0


def test_an_orderly_close_does_not_wait_for_long(sockets, clock):
    endpoint = sockets.listeners.listen("127.0.0.1")
    with client(endpoint):
        accepted, _ = until(sockets, Accepted)
        sockets.close(accepted.channel, orderly=True)
        clock.now += 0.2
        sockets.wait(0)
        assert sockets.open == 1
        clock.now += 0.1
        sockets.wait(0)
        assert sockets.open == 0


def test_closing_and_probing_what_is_gone_is_harmless(sockets):
    near, far = connected(sockets)
    for channel in (near, far, 77):
        sockets.close(channel, orderly=False)
        sockets.close(channel, orderly=False)
        sockets.send(channel, Beat(1))
        assert sockets.probe(channel) is None
    assert sockets.open == 0
    sockets.dial(9, sockets.listeners.listen("127.0.0.1"))
    sockets.close(9, orderly=True)
    assert sockets.open == 0


def test_a_peer_that_never_reads_is_given_up_and_beats_do_not_pile_up(sockets, monkeypatch):
    endpoint = sockets.listeners.listen("127.0.0.1")
    with client(endpoint):
        accepted, _ = until(sockets, Accepted)
        entry = sockets._channels[accepted.channel]
        entry.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        while not entry.unsent:
            sockets.send(accepted.channel, Beat(1))
        waiting = len(entry.unsent)
        sockets.send(accepted.channel, Beat(2), droppable=True)
        assert len(entry.unsent) == waiting
        monkeypatch.setattr(module, "_UNSENT", 100)
        while entry.error is None:
            sockets.send(accepted.channel, Beat(1))
        assert until(sockets, Closed)[0].ending is ConnectionEnd.STUCK


@pytest.mark.parametrize("code", [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN])
def test_an_error_that_the_kernel_gives_for_a_dead_path_is_dead(sockets, code):
    near, _ = connected(sockets)
    entry = sockets._channels[near]
    real = entry.socket

    class Failing:
        def __getattr__(self, name):
            return getattr(real, name)

        def send(self, _):
            raise OSError(code, os.strerror(code))

    entry.socket = Failing()
    sockets.send(near, Beat(1))
    closed = Closed(near, ConnectionEnd.DEAD, refused=False)
    assert gather(sockets, closed).count(closed) == 1


def test_what_is_sent_before_the_connection_is_there_goes_with_it(sockets):
    endpoint = sockets.listeners.listen("127.0.0.1")
    sockets.dial(5, endpoint)
    sockets.send(5, Beat(3))
    received, _ = until(sockets, Received)
    assert received.frames == [Beat(3)]


def test_without_descriptors_accepting_pauses_instead_of_spinning(sockets, clock):
    endpoint = sockets.listeners.listen("127.0.0.1")
    listener = sockets.listeners._by_host["127.0.0.1"]
    real = listener.socket

    class Empty:
        calls = 0

        def __getattr__(self, name):
            return getattr(real, name)

        def accept(self):
            Empty.calls += 1
            raise OSError(errno.EMFILE, "no more")

    listener.socket = Empty()
    with client(endpoint):
        for _ in range(5):
            clock.now += 0.01
            sockets.wait(0)
        assert Empty.calls == 1
        listener.socket = real
        clock.now += 0.1
        until(sockets, Accepted)
    sockets._pause()
    sockets.listeners.unlisten(endpoint)
    clock.now += 1.0
    sockets.wait(0)  # raises if it takes the closed listener up again


def test_waking_ends_a_wait(sockets):
    sockets.wake()
    began = time.monotonic()
    assert sockets.wait(2 * PATIENCE) == []
    assert time.monotonic() - began < PATIENCE


def test_a_kernel_that_says_nothing_gives_no_probe():
    near, far = socket.socketpair()
    with near, far:
        assert tcpinfo.probe(near) is None


def test_waking_after_the_end_is_harmless():
    sockets = Sockets(itertools.count(1).__next__)
    sockets.listeners.listen("127.0.0.1")
    sockets.abandon()
    sockets.wake()


def test_a_changed_tls_record_ends_that_connection_alone(tmp_path):
    credentials = Files(tmp_path, authority()).credentials
    sockets, peers = Sockets(itertools.count(1).__next__, credentials=credentials), []
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            for number in (91, 92):
                sockets.dial(number, Endpoint(*server.getsockname()))
                until(sockets, Connected)
                peer, tls = server.accept()[0], Session(credentials, server=True)
                peers.append((peer, tls))
                peer.setblocking(False)
                while tls.peer is None:
                    sockets.wait(0.01)
                    with contextlib.suppress(BlockingIOError):
                        tls.open(peer.recv(65536))
                    peer.send(tls.seal(b""))
        (first, spoiled), (second, sound) = peers
        record = bytearray(spoiled.seal(encode(Beat(1))))
        record[-1] ^= 1
        first.send(record)
        found, _ = until(sockets, Received)
        assert (found.channel, found.frames) == (91, [])
        assert found.error.startswith("TLS: ")

        sockets.send(91, Beat(2))  # as the protocol says a last word, or answers what came before
        assert not sockets.hand_over(91, Close(), lambda *_: pytest.fail("handed over"))
        sockets.close(91, orderly=True)
        second.send(sound.seal(encode(Beat(3))))
        found, _ = until(sockets, Received)
        assert found == Received(92, [Beat(3)], None)
    finally:
        sockets.shut_down()
        for peer, _ in peers:
            peer.close()


def test_who_dials_and_who_logs_why_tls_is_refused(tmp_path, clock, caplog):
    ours = authority("job 1")
    theirs = type(ours)("job 2", ours._certificate, ours._key)
    numbers = itertools.count(1).__next__
    ends = [
        Sockets(numbers, clock, credentials=Files(tmp_path / name, each).credentials)
        for name, each in (("a", ours), ("b", theirs))
    ]
    try:
        endpoint = ends[1].listeners.listen("127.0.0.1")

        def refused(channel):
            ends[0].dial(channel, endpoint)
            deadline, found = time.monotonic() + PATIENCE, {}
            while len(found) < 2:
                assert time.monotonic() < deadline, found
                for end in ends:
                    events = end.wait(0.01)
                    found.update((end, each.error) for each in events if isinstance(each, Received))
            return found

        found = refused(91)
        assert "(job 'job 2' on" in found[ends[0]].partition(", this process's of")[0]
        assert "(job 'job 1' on" in found[ends[1]].partition(", this process's of")[0]
        said = [each.getMessage() for each in caplog.records if each.name == module.__name__]
        assert said == [f"a connection to the watchdog is refused: {found[ends[1]]}"]
        refused(92)
        assert len(caplog.records) == 1, "not at each"
        clock.now += 11
        refused(93)
        assert len(caplog.records) == 2
    finally:
        for end in ends:
            end.shut_down()


def test_what_comes_over_tls_comes_with_the_host_that_the_certificate_names(tmp_path):
    ours, numbers = authority(), itertools.count(1).__next__
    ends = [
        Sockets(numbers, credentials=Files(tmp_path / host, ours, host=host).credentials)
        for host in ("east", "west")
    ]
    try:
        ends[0].dial(91, ends[1].listeners.listen("127.0.0.1"))
        ends[0].send(91, Beat(1))
        found, deadline = {}, time.monotonic() + PATIENCE
        peers = SimpleNamespace(
            received=lambda channel, frames, now, *, error, host: found.update({host: (frames, error)}),
            accepted=lambda channel, now: ends[1].send(channel, Beat(2)),
            connected=lambda channel, now: None,
        )
        while len(found) < 2:
            assert time.monotonic() < deadline, found
            for end in ends:
                for event in end.wait(0.01):
                    feed(peers, event, 0.0)
        assert found == {"east": ([Beat(1)], None), "west": ([Beat(2)], None)}
    finally:
        for end in ends:
            end.shut_down()
