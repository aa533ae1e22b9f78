"""Which sockets are a group's: by address, exactly; nothing else is ever touched."""

import contextlib
import os
import socket
import struct
import warnings

import pytest
from kits.descriptorkit import no_descriptor

from multiworld._c10d.gloo import sockets
from multiworld._c10d.gloo.sockets import find, parse_address, shut, still_open


def published(family, host, port, name=b"vm", seqs=2):
    if family == socket.AF_INET:
        raw = struct.pack("=H", family) + struct.pack("!H", port) + socket.inet_aton(host)
    else:
        raw = struct.pack("=H", family) + struct.pack("!HI", port, 0) + socket.inet_pton(family, host)
    raw = raw.ljust(128, b"A") + b"\xff" * 8
    return (
        struct.pack("=Q", len(name))
        + name
        + struct.pack("=Q", len(raw))
        + raw
        + struct.pack(f"={seqs}Q", *range(seqs))
    )


@pytest.mark.parametrize(
    ("family", "host"),
    [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "10.1.2.3"), (socket.AF_INET6, "::1")],
)
def test_published_addresses(family, host):
    assert parse_address(published(family, host, 29500)) == (host, 29500)
    assert parse_address(published(family, host, 1, name=b"")) == (host, 1)


def test_what_is_no_address():
    good = published(socket.AF_INET, "127.0.0.1", 5)
    for bad in (
        b"",
        b"\0" * 8,
        good[:100],
        b"\xff" * 200,
        good.replace(b"\x02\x00\x00\x05", b"\x01\x00\x00\x05"),
    ):
        assert parse_address(bad) is None


@pytest.fixture
def stack():
    with contextlib.ExitStack() as opened:
        yield opened


def listener(stack, family=socket.AF_INET, host="127.0.0.1"):
    sock = stack.enter_context(socket.socket(family))
    sock.bind((host, 0))
    sock.listen()
    return sock


def pair(stack, to):
    caller = stack.enter_context(socket.create_connection(to.getsockname()[:2]))
    accepted = stack.enter_context(to.accept()[0])
    caller.settimeout(2)
    accepted.settimeout(2)
    return caller, accepted


def works(caller, accepted):
    try:
        caller.sendall(b"x")
        return accepted.recv(1) == b"x"
    except OSError:
        return False


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_only_a_groups_own_sockets_are_shut(stack, family, host):
    try:
        ours, theirs, foreign = (listener(stack, family, host) for _ in range(3))
    except OSError:
        pytest.skip("no IPv6 here")
    _, accepted = pair(stack, ours)
    called, _ = pair(stack, theirs)
    other = pair(stack, foreign)
    unix = [stack.enter_context(each) for each in socket.socketpair()]
    udp = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
    udp.bind((host, 0))
    links, listeners = find({ours.getsockname()[:2]}, {theirs.getsockname()[:2]})
    # Both ends of both connections are in this process: accepted by us, and leading to the member's listener.
    assert {link.fd for link in links} == {accepted.fileno(), called.fileno()}
    assert [link.fd for link in listeners] == [ours.fileno()]
    assert shut(links) == 2
    assert accepted.recv(1) == b""
    assert called.recv(1) == b""
    assert works(*other)
    unix[0].sendall(b"y")
    assert unix[1].recv(1) == b"y"
    assert works(*pair(stack, ours)), "the listener was touched"


def test_a_descriptor_that_became_another_socket_is_left_alone(stack):
    ours, foreign = listener(stack), listener(stack)
    caller, accepted = pair(stack, ours)
    (link,) = (each for each in find({ours.getsockname()}, set())[0] if each.fd == accepted.fileno())
    other = pair(stack, foreign)
    fd = accepted.detach()  # closed below: its number is then another socket's
    os.dup2(other[1].fileno(), fd)
    try:
        assert shut([link]) == 0
        assert still_open([link]) == ()
        assert works(*other)
    finally:
        os.close(fd)
    assert caller.recv(1) == b""


def test_a_closed_descriptor_is_no_error(stack):
    ours = listener(stack)
    _, accepted = pair(stack, ours)
    links, _ = find({ours.getsockname()}, set())
    assert still_open(links) == links
    accepted.close()
    assert shut(links) == 0
    assert still_open(links) == ()


def test_each_group_on_a_listener_has_the_sockets_that_are_new(stack):
    ours = listener(stack)
    own = {ours.getsockname()}
    _, first = pair(stack, ours)
    assert [link.fd for link in find(own, set())[0]] == [first.fileno()]
    assert find(own, set())[0] == ()
    _, second = pair(stack, ours)
    found, listeners = find(own, set())
    assert [link.fd for link in found] == [second.fileno()]
    assert [link.fd for link in listeners] == [ours.fileno()]
    # A number that is free again is the next socket's: the caller's, or the one that is accepted.
    numbers = {first.fileno(), second.fileno()}
    first.close()
    second.close()
    caller, third = pair(stack, ours)
    assert {caller.fileno(), third.fileno()} == numbers
    assert [link.fd for link in find(own, set())[0]] == [third.fileno()]


def test_descriptors_are_not_used_up(stack):
    ours = listener(stack)
    pair(stack, ours)
    count = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(50):
        shut(find({ours.getsockname()}, set())[0])
    assert len(os.listdir("/proc/self/fd")) == count  # noqa: PTH208


@pytest.mark.parametrize("number", range(1, 9))
def test_ctrl_c_in_a_look_closes_no_socket(stack, monkeypatch, number):
    """In the moment when the object for a descriptor is made, which is another one's."""
    ours = listener(stack)
    mine = [ours, *pair(stack, ours)]
    links, _ = find({ours.getsockname()}, set())
    before, left, init = [os.fstat(each.fileno()).st_ino for each in mine], [number], socket.socket.__init__

    def interrupted(self, *args, **more):
        init(self, *args, **more)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(socket.socket, "__init__", interrupted)
        shut(links)
        while left[0] > 0:
            sockets.listener(ours.getsockname())
    assert [os.fstat(each.fileno()).st_ino for each in mine] == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find({ours.getsockname()}, set()) == ((), (sockets.listener(ours.getsockname()),))


# -- without a free descriptor -------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_spare(monkeypatch):
    monkeypatch.setattr(sockets, "_kept", [None])


def test_sockets_are_shut_without_a_free_descriptor(stack):
    ours = listener(stack)
    caller, accepted = pair(stack, ours)
    links, _ = find({ours.getsockname()}, set())
    spare = sockets.spare()
    assert sockets.spare() is spare
    with no_descriptor():
        assert shut(links) == len(links) == 1
    assert caller.recv(1) == accepted.recv(1) == b""
    numbers = spare._null, spare._copy
    assert all(os.path.samestat(os.fstat(each), os.stat(os.devnull)) for each in numbers), "it holds a socket"  # noqa: PTH116
    del spare
    for each in numbers:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(each)


def test_no_other_socket_is_touched_then(stack):
    ours, foreign = listener(stack), listener(stack)
    _, accepted = pair(stack, ours)
    links, _ = find({ours.getsockname()}, set())
    other = pair(stack, foreign)
    fd = accepted.detach()
    os.dup2(other[1].fileno(), fd)
    spare = sockets.spare()
    try:
        with no_descriptor():
            assert shut(links) == 0
        assert works(*other)
        os.close(fd)
        fd = -1
        with no_descriptor():
            assert shut(links) == 0, "its number is not open, or another file's"
    finally:
        if fd >= 0:
            os.close(fd)
    assert spare is not None


def test_it_is_said_that_sockets_could_not_be_shut(stack, caplog):
    ours = listener(stack)
    connected = pair(stack, ours)
    links, _ = find({ours.getsockname()}, set())
    with no_descriptor():
        assert sockets.spare() is None
        assert shut(links) == 0
    assert "no descriptor is free to shut 1 of gloo's sockets" in caplog.text
    assert works(*connected)


def test_a_spare_descriptor_in_use_is_not_waited_for_for_long(stack):
    """As in a signal's handler that interrupts `shut`."""
    ours = listener(stack)
    pair(stack, ours)
    links, _ = find({ours.getsockname()}, set())
    spare = sockets.spare()
    with spare.lent(ours.fileno()), no_descriptor():
        assert shut(links) == 0
    with no_descriptor():
        assert shut(links) == 1


def test_a_forked_child_has_a_spare_descriptor_of_its_own(monkeypatch):
    spare = sockets.spare()
    monkeypatch.setattr(sockets, "_adding", list(sockets._adding))
    sockets.forked()
    assert sockets.spare() is not spare
