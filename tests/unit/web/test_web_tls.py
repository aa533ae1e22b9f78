"""The page in secure mode: who is let in with a certificate, and what others get."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time

import pytest
from kits.httpskit import connected, fetch, hello, seconds_until_dropped
from kits.tlskit import Files, authority
from unit.web.webkit import FakeSource, read_slowly, view

from multiworld.errors import MultiworldError
from multiworld.metrics.health import Health
from multiworld.web import connections, tls_connections
from multiworld.web.server import serve, serve_page

SLACK = 4.0
"""Seconds: the machine is shared."""
PATHS = ["/", "/static/main.js", "/api/v1/view", "/api/v1/events", "/openapi.json", "/metrics", "/nothing"]
NAMES = ("w0", "alpha", "process 10")
REFUSED = (ConnectionError, http.client.HTTPException, OSError)


@pytest.fixture(scope="module")
def ours():
    return authority("job")


@pytest.fixture
def files(tmp_path, ours):
    return Files(tmp_path / "server", ours, name="server")


@pytest.fixture
def member(tmp_path, ours):
    return Files(tmp_path / "member", ours)


@pytest.fixture
def source():
    return FakeSource(view(worlds=[{"name": "w0", "state": "active"}]))


@pytest.fixture
def page(source, files, monkeypatch):
    for name, path in files.environment.items():
        monkeypatch.setenv(name, path)
    with serve(source, token="t0ken") as found:  # noqa: S106  (a test's)
        yield found


@pytest.fixture
def ask(page, files):
    def ask(path, **more):
        return fetch((page.host, page.port), path, ca=files.ca, **more)

    return ask


def until(holds):
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_link_is_https_and_says_whom_to_trust(page, files):
    assert page.link == f"https://127.0.0.1:{page.port}/?token=t0ken"
    assert page.ca == str(files.ca)
    assert not page.exposed


@pytest.mark.parametrize("path", PATHS)
def test_a_stranger_reads_nothing(ask, source, path):
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        answer = ask(path, headers=headers)
        assert answer.status == 401
        assert not any(name in answer.body + str(answer.headers) for name in NAMES)
    assert source.asked == 0


def test_errors_before_the_token_name_nothing(ask, source):
    source.healthy = Health(False, "w0 on alpha is broken")
    assert ask("/live")[:2] == ask("/ready?world=w0")[:2] == (503, "no\n")
    for answer in (
        ask("/api/v1/view", headers={"Host": "evil.example"}), ask("/?token=wrong"), ask("/api", method="POST"),
        ask("/live", method="POST"), ask("/live/"), ask("//alpha"),
    ):  # fmt: skip
        assert answer.status in {401, 405, 421}
        assert not any(name in answer.body + str(answer.headers) for name in NAMES)


def test_the_token_lets_in_and_the_cookie_is_for_tls_only(page, ask):
    answer = ask("/api/v1/view", headers={"Authorization": "Bearer t0ken"})
    assert json.loads(answer.body)["worlds"][0]["name"] == "w0"
    answer = ask("/?token=t0ken")
    assert (answer.status, answer.headers["location"]) == (303, "/")
    assert "secure" in [part.strip().lower() for part in answer.headers["set-cookie"].split(";")]
    cookie = answer.headers["set-cookie"].partition(";")[0]
    assert ask("/api/v1/view", headers={"Cookie": cookie}).status == 200


def test_a_certificate_of_the_job_needs_no_token(ask, source, member):
    for path in set(PATHS) - {"/nothing", "/api/v1/events"}:
        assert ask(path, shown=member).status == 200
    source.healthy = Health(False, "w0 is broken")
    assert ask("/live", shown=member).body == "w0 is broken\n"
    # Not under a name that was made to point here.
    assert ask("/api/v1/view", shown=member, headers={"Host": "evil.example"}).status == 421


def test_certificates_of_others_are_refused(tmp_path, ask, source, ours, caplog):
    other = ours.load("other job", ours.pem)
    for stranger in (Files(tmp_path / "job", other), Files(tmp_path / "ca", authority("job"))):
        with pytest.raises(REFUSED):
            ask("/live", shown=stranger, headers={"Authorization": "Bearer t0ken"})
    assert source.asked == 0
    assert [each.getMessage() for each in caplog.records if "other job" in each.getMessage()]


def test_new_files_are_used_for_the_next_connection(tmp_path, page, ask, files, ours):
    assert ask("/live").server == "server"
    files.replace(ours, name="renewed")
    until(lambda: ask("/live").server == "renewed")
    # And another authority: who has a certificate of the former one is refused.
    former = Files(tmp_path / "former", ours)
    theirs = authority("job")
    files.ca.write_bytes(theirs.certificate)
    files.replace(theirs, name="other")

    def of_the_new_one():
        with contextlib.suppress(OSError):
            return ask("/live").server == "other"

    until(of_the_new_one)
    with pytest.raises(REFUSED):
        ask("/api/v1/view", shown=former)
    assert ask("/api/v1/view", shown=Files(tmp_path / "latter", theirs)).status == 200


@pytest.mark.parametrize(
    ("said", "slowly"), [(b"", False), (hello()[:50], False), (hello(), False), (hello()[:80], True)],
    ids=["nothing", "a part", "no second message", "byte by byte"],
)  # fmt: skip
def test_a_handshake_that_is_not_completed_is_cut_off(page, said, slowly):
    assert seconds_until_dropped((page.host, page.port), said, slowly=slowly) < 2.0 + SLACK
    until(lambda: not page._server.server_state.connections)


@pytest.mark.parametrize(
    "said", [b"GET /api/v1/view HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\xff" * 300], ids=["HTTP", "garbage"]
)
def test_what_is_no_tls_is_cut_off_at_once(page, source, said):
    with socket.create_connection((page.host, page.port), timeout=30) as stranger:
        stranger.sendall(said)
        heard = b""
        with contextlib.suppress(ConnectionError):
            while part := stranger.recv(1 << 16):
                heard += part
        assert b"HTTP" not in heard
    assert source.asked == 0


def test_handshakes_count_as_connections_and_the_oldest_makes_room(page, ask, monkeypatch):
    monkeypatch.setattr(connections, "MOST", 20)
    monkeypatch.setattr(tls_connections, "HANDSHAKE", 60.0)
    silent = [socket.create_connection((page.host, page.port), timeout=30) for _ in range(60)]
    for each in (silent[0], silent[39]):
        with contextlib.suppress(ConnectionResetError):
            assert each.recv(1) == b""
    until(lambda: len(page._server.server_state.connections) <= 20)
    assert ask("/live").status == 200
    for each in silent:
        each.close()


def test_who_does_not_take_leave_is_cut_off(page, files, member, monkeypatch):
    """The server ends TLS first: it does not wait for the other side's end for long."""
    monkeypatch.setattr(connections, "FIRST", 0.5)
    monkeypatch.setattr(tls_connections, "_GOODBYE", {})  # as in Python 3.10; 30 s in later ones
    credentials = member.credentials
    with (
        socket.create_connection((page.host, page.port), timeout=30) as plain,
        credentials.context(server=False).wrap_socket(plain) as link,
    ):
        link.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        began = time.monotonic()
        until(lambda: not page._server.server_state.connections)
        assert time.monotonic() - began < 20


def test_what_is_not_read_is_cut_off_and_what_is_read_slowly_goes_on(page, source, member, monkeypatch):
    monkeypatch.setattr(connections, "FIRST", 2.0)
    page._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    size = 1 << 20
    source.metrics = lambda accept: (b"#" * size, "text/plain")
    asks = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    more = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3
    with contextlib.ExitStack() as opened:
        links = []
        for _ in range(2):
            plain = opened.enter_context(socket.socket())
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            plain.settimeout(30)
            plain.connect((page.host, page.port))
            context = member.credentials.context(server=False)
            links.append(opened.enter_context(context.wrap_socket(plain)))
        slow, deaf = links
        slow.sendall(asks)
        deaf.sendall(more)
        known = page._server.server_state.connections
        until(lambda: len(known) == 2 and all(each.waits_from is not None for each in tuple(known)))
        assert read_slowly(slow, 1 << 12, 0.05, 7).endswith(b"#" * size)
        until(lambda: not known)


PROBE = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "said", [b"", PROBE[:20], PROBE, PROBE.replace(b"/live", b"/api/v1/view"), b"\xff" * 300],
    ids=["nothing", "a part", "a probe", "a request without the token", "garbage"],
)  # fmt: skip
def test_a_stranger_that_is_silent_after_the_handshake_is_cut_off(page, files, said, monkeypatch):
    monkeypatch.setattr(connections, "FIRST", 60.0)
    began = time.monotonic()
    with connected((page.host, page.port), files.ca) as stranger:
        stranger.sendall(said)
        with contextlib.suppress(OSError):
            while stranger.recv(1 << 16):
                continue
        assert time.monotonic() - began < 1.0 + SLACK
    until(lambda: not page._server.server_state.connections)


def test_a_stranger_that_sends_has_its_time_and_no_more(page, files, monkeypatch):
    monkeypatch.setattr(connections, "SILENCE", 5.0)
    monkeypatch.setattr(connections, "FIRST", 60.0)
    with connected((page.host, page.port), files.ca) as slow:
        for at in range(0, len(PROBE), 3):
            slow.sendall(PROBE[at : at + 3])
            time.sleep(0.5)  # 6.5 s in all
        assert slow.recv(12) == b"HTTP/1.1 200"
    monkeypatch.setattr(connections, "FIRST", 0.5)
    with connected((page.host, page.port), files.ca) as endless, contextlib.suppress(OSError):
        for _ in range(100):
            endless.sendall(b"G")
            time.sleep(0.1)
        raise AssertionError("it may send for ever")


@pytest.mark.parametrize("how", ["certificate", "token", "link"])
def test_who_has_been_let_in_may_be_silent(page, files, member, how, monkeypatch):
    monkeypatch.setattr(connections, "SILENCE", 5.0)
    monkeypatch.setattr(connections, "FIRST", 60.0)
    monkeypatch.setattr(page._server.config, "timeout_keep_alive", 60)
    path = b"/?token=t0ken" if how == "link" else b"/api/v1/view"
    more = b"\r\nAuthorization: Bearer t0ken\r\n\r\n" if how == "token" else b"\r\n\r\n"
    asks = PROBE.replace(b"/live", path).replace(b"\r\n\r\n", more)
    with connected((page.host, page.port), files.ca, member if how == "certificate" else None) as link:
        link.sendall(asks)
        link.recv(1 << 16)
        link.settimeout(2 * connections.SILENCE)
        with pytest.raises(TimeoutError):
            while link.recv(1 << 16):
                continue


def test_a_page_ends_in_the_middle_of_a_handshake(source, files, monkeypatch):
    for name, path in files.environment.items():
        monkeypatch.setenv(name, path)
    page = serve(source)
    with socket.create_connection((page.host, page.port), timeout=30) as silent:
        until(lambda: page._server.server_state.connections)
        assert page.close(30)
        with contextlib.suppress(ConnectionResetError):
            assert silent.recv(1) == b""


def test_files_that_cannot_be_used_are_said(source, files, monkeypatch):
    for name, path in files.environment.items():
        monkeypatch.setenv(name, path)
    files.key.write_text("none")
    with pytest.raises(MultiworldError, match="M8D_TLS_KEY"):
        serve(source)


def test_a_page_for_others_in_plain_text_is_warned_of(caplog):
    with serve_page("127.0.0.1:0") as page:
        assert not page.exposed
    assert not caplog.records
    with serve_page("0.0.0.0:0") as page:
        assert page.exposed
        assert f"{page.url} is not encrypted" in caplog.text
