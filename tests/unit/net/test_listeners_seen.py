"""The kit that lists listeners, and the judge of what strangers got: each must be able to fail."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time

import pytest
from kits import portkit
from kits.strangerkit import MANNERS, Expected, Visit, judge, reads, visit

OPEN = Expected("x", (1.0, 1.0, None), readable=True)
NAME = "confidential"


@contextlib.contextmanager
def listening(host="127.0.0.1", family=socket.AF_INET):
    with socket.socket(family) as sock:
        sock.bind((host, 0) if family != socket.AF_UNIX else host)
        sock.listen()
        yield sock


def mine():
    return portkit.listeners([os.getpid()])


def found(sock):
    address = sock.getsockname()
    wanted = "@" + address[1:].decode() if isinstance(address, bytes) else tuple(address[:2])
    (one,) = [each for each in mine() if each.address == wanted and each.type == sock.type]
    return one


def test_listeners_of_each_kind_are_seen():
    name = f"\0m8d-test-{secrets.token_hex(4)}"
    with (
        listening() as tcp,
        listening(name, socket.AF_UNIX) as unix,
        socket.socket(type=socket.SOCK_DGRAM) as udp,
    ):
        udp.bind(("127.0.0.1", 0))
        assert found(tcp).port == tcp.getsockname()[1]
        assert found(udp).host == "127.0.0.1"
        found(unix).address.startswith("@m8d-test-")
        gone = found(tcp)
    assert gone not in mine()


def test_what_listens_everywhere_is_reached_by_loopback():
    with listening("0.0.0.0") as sock:  # noqa: S104  (for as long as this test)
        one = found(sock)
        assert one.host == "127.0.0.1"
        portkit.plain(one).close()


def test_ipv6_is_seen():
    with contextlib.ExitStack() as stack:
        try:
            sock = stack.enter_context(listening("::1", socket.AF_INET6))
        except OSError:
            pytest.skip("no IPv6 here")
        assert found(sock).address[0] == "::1"


def test_a_listener_that_no_rule_knows_has_no_name():
    with listening() as known, listening() as unknown:
        kinds = portkit.named(mine(), {known.getsockname()[1]: "store"})
        assert kinds[found(known)] == "store"
        assert kinds[found(unknown)] == ""


def test_a_connection_is_held_until_its_other_end_closes_it():
    with listening() as sock, portkit.plain(found(sock)) as ours:
        one = found(sock)
        assert not portkit.held(one, ours), "the kernel alone has it"
        theirs, _ = sock.accept()
        assert portkit.held(one, ours)
        theirs.close()
        assert not portkit.held(one, ours)


def visited(manner, answer, most):
    """Visit a server that does `answer(connection)`."""
    with listening() as sock:
        kept = []

        def serve():
            theirs, _ = sock.accept()
            kept.append(theirs)
            answer(theirs)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        made = visit(found(sock), "page", manner, ["x"], portkit.plain, most)
        thread.join(10)
        for each in kept:
            each.close()
        return made


def close_late(sock):
    time.sleep(0.3)
    sock.close()


@pytest.mark.parametrize("manner", MANNERS)
def test_a_visit_says_when_it_was_dropped(manner):
    assert 0.2 < visited(manner, close_late, 1.0).dropped < 5


def test_a_visit_says_that_it_was_never_dropped():
    assert visited("nothing", lambda _: None, None).dropped is None


def test_a_visit_says_what_it_heard():
    assert (
        visited("first bytes", lambda sock: (sock.sendall(NAME.encode()), sock.close()), 1.0).heard
        == NAME.encode()
    )


def wrong(expected, **facts):
    made = Visit(None, "store", facts.pop("manner", "nothing"), **facts)
    return judge(made, expected, [NAME], slack=1.0)


def test_what_the_table_says_is_not_wrong():
    assert wrong(OPEN, dropped=1.5) == []
    assert wrong(OPEN, dropped=None, manner="first bytes", heard=NAME.encode()) == []


def test_one_that_stays_too_long_is_wrong():
    assert "dropped never" in wrong(OPEN, dropped=None)[0]
    assert "after 3.0 s" in wrong(OPEN, dropped=3.0)[0]


def test_a_name_that_comes_back_unasked_is_wrong():
    assert NAME in wrong(OPEN, dropped=0.1, heard=b"hello from confidential")[0]


def test_strict_lets_nothing_be_read_and_nothing_stay():
    strict = OPEN.strict()
    assert wrong(strict, dropped=0.5, manner="first bytes") == []
    assert len(wrong(strict, dropped=None, manner="first bytes", heard=NAME.encode())) == 2


def test_kinds_that_tell_are_named():
    assert reads(
        [Visit(None, "store", "nothing", heard=b"a confidential b"), Visit(None, "page", "nothing")], [NAME]
    ) == {"store"}
